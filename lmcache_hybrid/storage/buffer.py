# SPDX-License-Identifier: Apache-2.0
"""One record's memory in LMCache's CPU pool."""

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.storage.record_format import HEADER_BYTES, payload_bytes


def record_shape(size: int) -> torch.Size:
    """Shape of a record of ``size`` bytes in LMCache's [2, layers, tokens, hidden] format."""
    return torch.Size([1, 1, 1, size])


class LMCacheBuffer:
    """A record in LMCache's CPU pool, see :class:`Buffer`; ``release`` drops our reference."""

    def __init__(self, memory: MemoryObj, digester: Digester) -> None:
        self.memory, self.digester, self.digests = memory, digester, b""

    @property
    def record(self) -> memoryview:
        view = memoryview(self.memory.byte_array)
        return view if view.format == "B" else view.cast("B")

    @property
    def payload(self) -> torch.Tensor:
        tensor = self.memory.tensor
        if tensor is None or tensor.dtype != torch.uint8:
            raise ValueError(f"LMCache gave {tensor!r} for the bytes of a record")
        record = tensor.view(-1)
        return record[HEADER_BYTES : HEADER_BYTES + payload_bytes(record.numel())]

    def release(self) -> None:
        self.memory.ref_count_down()
