# SPDX-License-Identifier: Apache-2.0
"""Stores of one engine: RAM, and ``local_disk``."""

from lmcache_hybrid.config.stores.base import Place, StoreKind
from lmcache_hybrid.core.backends import DISK, RAM


class Memory(StoreKind):
    """LMCache's CPU pool, which a restart empties."""

    backend = RAM
    option = "local_cpu"
    title = "RAM"
    survives = False

    def shown(self, place: Place) -> str:
        return self.title


class Disk(StoreKind):
    """Folders of one engine."""

    backend = DISK
    option = "local_disk"
    title = "local disk"

    def shown(self, place: Place) -> str:
        return f"The folder {place.url}"
