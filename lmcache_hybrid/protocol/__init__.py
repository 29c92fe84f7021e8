# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler side and the worker side."""
