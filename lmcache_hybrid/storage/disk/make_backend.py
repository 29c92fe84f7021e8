# SPDX-License-Identifier: Apache-2.0
"""Makes the backend of ``local_disk``, in place of LMCache's own."""

from typing import TYPE_CHECKING, Any

from lmcache.v1 import storage_backend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from lmcache_hybrid.storage.disk.backend import LocalDisk

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface


def make_backend(config: "LMCacheEngineConfig", *args: Any) -> "StorageBackendInterface":
    """Make a backend with LMCache's arguments: its own for engines of other models."""
    kind = LocalDisk if getattr(config, "_hybrid_local_disk", False) else LocalDiskBackend
    return kind(config, *args)


def install(config: "LMCacheEngineConfig") -> None:
    """Have LMCache open ``local_disk`` of this configuration with a backend of ours. Idempotent.

    No bug: LMCache takes backends of others (``storage_plugins``), but not in the place of its
    own. It opens them last, so that a remote store would be asked before the disk. It would open
    its own, too, in the same folder. And where one does not open it goes on without it.
    Gain: a backend of ours instead of repairs of LMCache's.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: a plugin can take the place of ``local_disk``.
    """
    config._hybrid_local_disk = True
    storage_backend.LocalDiskBackend = make_backend
