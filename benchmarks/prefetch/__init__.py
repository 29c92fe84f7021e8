# SPDX-License-Identifier: Apache-2.0
"""How soon a prefetched prompt gets its first token."""
