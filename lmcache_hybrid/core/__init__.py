# SPDX-License-Identifier: Apache-2.0
"""Words that every room uses: groups, keys, digests, errors, counts, threads."""
