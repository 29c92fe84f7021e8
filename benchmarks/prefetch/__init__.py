# SPDX-License-Identifier: Apache-2.0
"""First token of a prefetched prompt. See ``python -m benchmarks.prefetch --help``."""
