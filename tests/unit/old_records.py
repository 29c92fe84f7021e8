# SPDX-License-Identifier: Apache-2.0
"""What earlier releases wrote to Redis beside each record: LMCache's metadata."""

import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_hybrid.storage.key_names import METADATA
from lmcache_hybrid.upstream.lmcache_home import take

RemoteMetadata = take("v1.protocol", "RemoteMetadata")


def metadata_of(size: int) -> bytes:
    """LMCache's metadata of a value of ``size`` bytes."""
    shape = torch.Size((1, 1, 1, size))
    return RemoteMetadata(size, [shape], [torch.uint8], MemoryFormat.KV_2LTD).serialize()


def add_metadata(box, key) -> None:
    """Make a record in a Redis one of an earlier release."""
    name = box.store.engine_key(key).to_string()
    box.redis.set(name + METADATA, metadata_of(len(box.raw(key))))
