# SPDX-License-Identifier: Apache-2.0
"""LMCache's CPU pool without our repairs."""

import threading

from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

from lmcache_hybrid.storage import host_memory as pinned
from lmcache_hybrid.storage.read_reservation import ReadReservation
from tests.unit.test_host_memory import SIZE as POOL_SIZE
from tests.unit.test_host_memory import cudart, no_options  # noqa: F401

from .raw import Raw, happens
from .repair import shows_bug_of


@shows_bug_of(ReadReservation.allocate)
def test_a_read_waits_for_memory_for_ever():
    ram = Raw()
    held = list(iter(ram.allocate, None))
    shape, dtype = held[0].get_shape(), held[0].get_dtype()
    got = []
    waiting = threading.Thread(target=lambda: got.append(ram.backend.allocate(shape, dtype)))
    waiting.start()
    try:
        return not happens(lambda: not waiting.is_alive())
    finally:
        for memory in held:
            memory.ref_count_down()
        waiting.join(20)
        assert not waiting.is_alive()
        for memory in filter(None, got):
            memory.ref_count_down()
        ram.close()


@shows_bug_of(pinned.pin_exactly)
def test_without_its_compiled_part_lmcache_asks_torch(cudart):  # noqa: F811
    allocator = MixedMemoryAllocator(POOL_SIZE)
    exact = sum(cudart.registered.values())
    allocator.close()
    return not exact
