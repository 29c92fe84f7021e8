# SPDX-License-Identifier: Apache-2.0
"""What a key costs: digests alone, and copies of one state with their digests."""
