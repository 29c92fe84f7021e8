# SPDX-License-Identifier: Apache-2.0
"""LMCache for hybrid models in vLLM: attention pages and recurrent states together."""

__version__ = "0.1.0"
