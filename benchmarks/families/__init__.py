# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's hybrid architectures run here, and whether ours answers as vLLM does."""
