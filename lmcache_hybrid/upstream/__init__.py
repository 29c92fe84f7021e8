# SPDX-License-Identifier: Apache-2.0
"""Handles differences between releases of vLLM and LMCache."""
