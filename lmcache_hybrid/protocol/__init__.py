# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side and the worker side say to each other."""
