# SPDX-License-Identifier: Apache-2.0
"""Reads stores without an engine: files and Redis values, not RAM.

Neither vLLM, LMCache nor torch is imported, so that this also runs where the store is.
Anybody may have written the data: names and bytes are checked, never trusted.
"""
