# SPDX-License-Identifier: Apache-2.0
"""Records on local disk: LMCache's local_disk, with an index that survives a restart."""
