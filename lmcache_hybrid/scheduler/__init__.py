# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: which boundary a request starts from, and what it stores."""
