# SPDX-License-Identifier: Apache-2.0
"""Records in Redis and in shared folders: LMCache's remote connectors."""
