# SPDX-License-Identifier: Apache-2.0
"""What lies in a store, seen without an engine: files and Redis values, not RAM.

Neither vLLM, LMCache nor torch is imported, so that this also runs where the store is.
Whatever is read may have been written by anybody: names and bytes are checked, never trusted.
"""
