# SPDX-License-Identifier: Apache-2.0
"""Stores that LMCache itself has filled."""

from ..test_lmcache_store import blocked_loops, box, valkey  # noqa: F401
