# SPDX-License-Identifier: Apache-2.0
"""Stores that LMCache itself has filled."""

from ..store_box import box, valkey  # noqa: F401
