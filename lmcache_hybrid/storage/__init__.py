# SPDX-License-Identifier: Apache-2.0
"""Records in LMCache's storage backends, and lookups in them."""
