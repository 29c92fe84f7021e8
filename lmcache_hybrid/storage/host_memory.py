# SPDX-License-Identifier: Apache-2.0
"""Allocates pinned host memory for LMCache's CPU pool, no more than asked for."""

import contextlib
import ctypes
import mmap
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmcache import device_ops
from lmcache.v1.platform import current_device_spec
from vllm.logger import init_logger

from lmcache_hybrid.core.sizes import size_text

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

logger = init_logger("vllm.lmcache_hybrid.storage.host_memory")

PAGE = mmap.PAGESIZE
# Makes torch not round sizes above 64 MB.
DONT_ROUND = "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64"
# torch reads the first of these that is set.
TORCH_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NODES = Path("/sys/devices/system/node")
# Threads that touch the pool's pages, and bytes that one touches at a time.
TOUCHERS = 8
TOUCHED_AT_ONCE = 256 << 20


def rounded(size: int) -> int:
    """Return the bytes of pinned memory that torch takes for a pool of ``size`` bytes.

    LMCache asks torch for one page more, so even a power of two is rounded up to the next.
    """
    asked = size + PAGE
    return asked if asked > _rounding_ends_at() else 1 << (asked - 1).bit_length()


def _rounding_ends_at() -> int:
    """Return the largest size in bytes that torch rounds up."""
    options = next((os.environ[name] for name in TORCH_OPTIONS if name in os.environ), "")
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb\s*:\s*(\d+)", options)
    return min((int(limit) << 20 for limit in limits), default=sys.maxsize)


def compiled_part_missing(ops: Any) -> bool:
    """Whether LMCache runs on CUDA without its compiled part."""
    return ops.device_type == "cuda" and "alloc_pinned_ptr" not in vars(ops)


class ExactPinned:
    """Allocates pinned host memory page by page instead of in powers of two.

    Its public methods have the names and parameters of LMCache's compiled part, whose place
    they take with ``DeviceOps.bind_native``. Owns each piece of memory until LMCache frees its
    address. Called by one thread, at the start and the end of the engine. Sizes are in bytes.
    """

    def __init__(self, ops: Any, spec: Any) -> None:
        """
        Args:
            ops: LMCache's ``DeviceOps``; its class is the fallback.
            spec: LMCache's ``DeviceSpec``, which pins memory with the CUDA runtime.
        """
        self._ops, self._spec = ops, spec
        self._held: dict[int, mmap.mmap] = {}

    def alloc_pinned_ptr(self, size: int, device_id: int = 0) -> int:
        return self._allocate(size, -1)

    def alloc_pinned_numa_ptr(self, size: int, numa_id: int = 0) -> int:
        return self._allocate(size, numa_id)

    def alloc_hugepage_pinned_ptr(self, size: int, device_id: int = 0) -> int:
        return self.alloc_hugepage_pinned_numa_ptr(size, -1)

    def alloc_hugepage_pinned_numa_ptr(self, size: int, numa_id: int = 0) -> int:
        logger.warning(
            "local_cpu_use_hugepages needs LMCache's compiled part, which does not load with "
            "this torch; the pool asks for transparent huge pages instead."
        )
        return self._allocate(size, numa_id)

    def free_pinned_ptr(self, ptr: int) -> None:
        self._free(ptr)

    def free_pinned_numa_ptr(self, ptr: int, size: int | None = None) -> None:
        self._free(ptr)

    def free_hugepage_pinned_ptr(self, ptr: int, size: int = 0) -> None:
        self._free(ptr)

    def free_hugepage_pinned_numa_ptr(self, ptr: int, size: int = 0) -> None:
        self._free(ptr)

    def _bytes_at(self, ptr: int) -> int | None:
        """Return the bytes held at ``ptr``; None if not ours."""
        return len(self._held[ptr]) if ptr in self._held else None

    def _allocate(self, size: int, node: int) -> int:
        """Allocate pinned zeros, on a NUMA node unless it is negative; returns their address."""
        fallback: int = rounded(size)
        if fallback > size + PAGE:
            try:
                memory = _touched(size, node)
                address = _address(memory)
                if self._spec.pin_memory(address, len(memory)):
                    self._held[address] = memory
                    logger.info(
                        "Repaired LMCache without its compiled part: its CPU pool takes %s of "
                        "pinned memory instead of %s.",
                        size_text(len(memory)),
                        size_text(fallback),
                    )
                    return address
                memory.close()
                reason = "CUDA does not register it"
            except (OSError, RuntimeError) as error:  # no memory, no thread, no device
                reason = str(error)
            logger.warning(
                "%s of host memory cannot be pinned as they are (%s): LMCache's CPU pool takes "
                "%s. Set %s to avoid that.",
                size_text(size),
                reason,
                size_text(fallback),
                DONT_ROUND,
            )
        address = type(self._ops).alloc_pinned_ptr(self._ops, size)
        return int(address)

    def _free(self, ptr: int) -> None:
        memory = self._held.get(ptr)
        if memory is None:
            type(self._ops).free_pinned_ptr(self._ops, ptr)
        elif self._spec.unpin_memory(ptr):
            del self._held[ptr]
            memory.close()
        else:
            # A device may still write to it.
            logger.warning("LMCache's CPU pool stays allocated: CUDA does not release it.")


def pin_exactly() -> None:
    """Have LMCache's CPU pool take the pinned memory that was asked for, no more. Idempotent.

    Bug: LMCache 0.5.6 allocates the pool with ``torch.empty(pin_memory=True)`` where its
    compiled part does not load, as with torch 2.14; torch rounds that up to a power of two.
    Symptom: max_local_cpu_size 64 takes 128 GiB per rank; hosts run out of memory, and NUMA
    options are ignored.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: LMCache's compiled part loads with the torch of every supported vLLM, or its
    fallback registers memory of the size asked for.

    Only on CUDA, and only in a process that calls this before the engine opens its backends.
    """
    if torch.version.cuda is not None and compiled_part_missing(device_ops):
        device_ops.bind_native(ExactPinned(device_ops, current_device_spec))


def report_pool(backend: "LocalCPUBackend", device: torch.device) -> None:
    """Log the pool's size, and warn where copies to and from ``device`` block the host."""
    pool = backend.memory_allocator.buffer
    taken = size_text(_taken(pool, backend))
    if device.type == "cpu":
        logger.info("LMCache's CPU pool takes %s of host memory on this rank.", taken)
    elif pool.is_pinned():
        logger.info("LMCache's CPU pool takes %s of pinned host memory on this rank.", taken)
    else:
        logger.warning(
            "LMCache's CPU pool takes %s of host memory on this rank and is not pinned, so every "
            "copy of the KV cache holds up its step. Lower max_local_cpu_size, or set %s.",
            taken,
            DONT_ROUND,
        )


def _taken(pool: torch.Tensor, backend: "LocalCPUBackend") -> int:
    allocator = getattr(vars(device_ops).get("alloc_pinned_ptr"), "__self__", None)
    ours = allocator if isinstance(allocator, ExactPinned) else None
    held = ours and ours._bytes_at(pool.data_ptr())
    if held:
        return held
    by_torch = ours is not None or compiled_part_missing(device_ops)
    return rounded(pool.numel()) if by_torch and pool.is_pinned() else pool.numel()


# Memory


def _touched(size: int, node: int) -> mmap.mmap:
    """Map whole pages, at least ``size`` bytes, and touch each of them.

    Pages lie on the NUMA node of the thread that touches them first. Raises OSError, and
    RuntimeError where no thread can be started.
    """
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # After a fork the first write would replace our page under the device.
    memory.madvise(mmap.MADV_DONTFORK)
    start = _address(memory)
    with ThreadPoolExecutor(TOUCHERS, initializer=partial(_stay_on, node)) as pool:
        for at in range(0, len(memory), TOUCHED_AT_ONCE):
            pool.submit(_touch, start + at, min(TOUCHED_AT_ONCE, len(memory) - at))
    return memory


def _touch(address: int, size: int) -> None:
    ctypes.memset(address, 0, size)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _stay_on(node: int) -> None:
    """Keep the calling thread on a NUMA node's cores; warn where that is not allowed."""
    if node < 0:
        return
    try:
        os.sched_setaffinity(0, _cores_of(node))
    except (OSError, ValueError) as error:
        logger.warning_once(
            "LMCache's CPU pool may lie on another NUMA node than %d: %s", node, error
        )


def _cores_of(node: int) -> set[int]:
    cores: set[int] = set()
    for part in (NODES / f"node{node}" / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
