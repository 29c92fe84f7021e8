# SPDX-License-Identifier: Apache-2.0
"""Lossless compression of pages and states: what it saves and how fast it is."""
