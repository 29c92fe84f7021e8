# SPDX-License-Identifier: Apache-2.0
"""Identifies what this engine computes with: weights, code, LoRA adapters, media."""
