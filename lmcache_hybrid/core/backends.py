# SPDX-License-Identifier: Apache-2.0
"""LMCache's names of its backends."""

RAM, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"
