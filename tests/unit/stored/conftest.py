# SPDX-License-Identifier: Apache-2.0
"""Stores that LMCache itself has filled."""

from ..store_box import blocked_loops, box, valkey  # noqa: F401
