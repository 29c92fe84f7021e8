# SPDX-License-Identifier: Apache-2.0
"""Used by all other packages: groups, keys, digests, errors, counts, threads."""
