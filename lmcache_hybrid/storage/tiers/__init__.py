# SPDX-License-Identifier: Apache-2.0
"""Opens the storage tiers of a rank: a class for each kind of LMCache's backends."""

from typing import TYPE_CHECKING

from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.tiers.base import Opening, StorageTier
from lmcache_hybrid.storage.tiers.disk import DiskTier
from lmcache_hybrid.storage.tiers.ram import RamTier
from lmcache_hybrid.storage.tiers.remote import RemoteTier

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.storage_manager import StorageManager

# The tier class of each supported backend class.
KINDS: tuple[tuple[type, type[StorageTier]], ...] = (
    (LocalCPUBackend, RamTier),
    (LocalDisk, DiskTier),
    (RemoteBackend, RemoteTier),
)


def open_tiers(manager: "StorageManager", opening: Opening) -> dict[str, StorageTier]:
    """Open all backends, the nearest first.

    Returns:
        Each tier by its backend's name.

    Raises:
        ConfigError: LMCache has opened a backend of another kind.
    """
    tiers: dict[str, StorageTier] = {}
    for name, backend in manager.storage_backends.items():
        kind = next((tier for served, tier in KINDS if isinstance(backend, served)), None)
        if kind is None:
            raise ConfigError(
                f"LMCache has opened {name} ({type(backend).__name__}), in which no records can be "
                "kept; remove the option that opens it."
            )
        tiers[name] = tier = kind(name, backend, opening)
        tier.restore(opening)
    return tiers
