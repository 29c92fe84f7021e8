# SPDX-License-Identifier: Apache-2.0
"""What this engine computes with: weights, LoRA adapters, media."""
