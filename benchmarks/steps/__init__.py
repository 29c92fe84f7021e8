# SPDX-License-Identifier: Apache-2.0
"""Time that the scheduler side takes of each step, with long prompts."""
