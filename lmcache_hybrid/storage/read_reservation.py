# SPDX-License-Identifier: Apache-2.0
"""Reserves memory for reads before they begin.

LMCache's reads wait for memory without end. Concurrent loads could each hold a part of what they
need and deadlock, so here no read waits: a load reserves all memory that it reads into, or it
fails and its tokens are computed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from vllm.logger import init_logger

from lmcache_hybrid.core.errors import NoRoomError
from lmcache_hybrid.storage.buffer import record_shape

logger = init_logger("vllm.lmcache_hybrid.storage.read_reservation")


class ReadReservation:
    """LMCache's CPU pool, with memory reserved for the loads in flight.

    Any thread may call it; LMCache's event loop does. Owns reserved memory until a read takes it
    or its load ends.

    Attributes:
        largest: bytes of the largest record.
        refused: reads that found no memory.
    """

    def __init__(self, backend: LocalCPUBackend, largest: int) -> None:
        """Replace the pool's ``allocate``. Mutates ``backend``.

        Args:
            backend: owner of the pool.
            largest: bytes of the largest record; from now on nothing larger is allocated.
        """
        self.refused = 0
        self.largest = largest
        self._allocate = backend.allocate
        self._lock = threading.Lock()
        # Memory for whichever read comes next; how many records are reserved in all.
        self._room: list[MemoryObj] = []
        self._promised = 0
        backend.allocate = self.allocate

    @contextmanager
    def room_for(self, records: int) -> Iterator[None]:
        """Reserve memory for ``records`` records of the largest size while reading them.

        Raises:
            NoRoomError: there is not enough.
        """
        held: list[MemoryObj] = []
        with self._lock:
            while len(held) < records:
                memory = self._plain(record_shape(self.largest), torch.uint8)
                if memory is None:
                    break
                held.append(memory)
            enough = len(held) == records
            if enough:
                self._room += held
                self._promised += records
            else:
                _free(held)
        if not enough:
            raise NoRoomError("LMCache's CPU pool has no room to read into (max_local_cpu_size)")
        try:
            yield
        finally:
            with self._lock:
                self._promised -= records
                # Unused by reads that failed or found nothing.
                spare = self._room[self._promised :]
                del self._room[self._promised :]
                _free(spare)

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Replaces ``LocalCPUBackend.allocate``: never waits, and gives memory to records only.

        Sizes and types of remote values come from the store. For a damaged size LMCache would
        evict all it holds and then wait for ever; floats or a negative length are never a record.

        Bug: ``RemoteConnector`` classes read into memory that ``LocalCPUBackend.allocate`` waits
        for as long as it takes.
        Symptom: loads that each hold a part of what they need wait for one another for ever.
        Seen in: LMCache 0.5.6 and 0.5.7rc2.
        Remove when: a read that finds no memory fails. The check of shape and type stays.

        Args:
            busy_loop: True for a read, which may use what :meth:`room_for` set aside.

        Returns:
            The memory, which the caller owns; None if there is none, or no record has this shape
            and type.
        """
        shape_list = [shapes] if isinstance(shapes, torch.Size) else list(shapes)
        dtype_list = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        size = sum(shape.numel() for shape in shape_list)
        bytes_only = all(dtype is torch.uint8 for dtype in dtype_list)
        if not bytes_only or size > self.largest or min(map(min, shape_list)) <= 0:
            logger.warning(
                "Refused memory for a stored value of shape %s, type %s: no record has these. Its "
                "load fails and is computed; another program may have written to the store.",
                shape_list,
                dtype_list,
            )
            return None
        with self._lock:
            if busy_loop and self._room:
                # The lock keeps others from allocating between these two.
                self._room.pop().ref_count_down()
            memory = self._plain(shapes, dtypes, fmt, eviction)
            if memory is None and busy_loop:
                self.refused += 1
            return memory

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        with self._lock:
            assert len(self._room) <= self._promised, "memory is set aside for nobody"

    def _plain(
        self, shapes: Any, dtypes: Any, fmt: MemoryFormat | None = None, eviction: bool = True
    ) -> MemoryObj | None:
        return self._allocate(shapes, dtypes, fmt, eviction, busy_loop=False)


def _free(memories: list[MemoryObj]) -> None:
    for memory in memories:
        memory.ref_count_down()
