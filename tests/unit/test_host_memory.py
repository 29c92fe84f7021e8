# SPDX-License-Identifier: Apache-2.0
"""LMCache's pool without its compiled part: real allocators, a CUDA runtime that only counts."""

import ctypes
import mmap
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1 import memory_management
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec
from lmcache.v1.platform.devices.cuda.device_ops import CudaDeviceOps
from lmcache.v1.platform.torch_ops import mem_alloc
from lmcache.v1.system_detection import NUMAMapping

from lmcache_hybrid.storage import host_memory as pinned
from lmcache_hybrid.storage import service_factory as services
from lmcache_hybrid.storage.host_memory import ExactPinned, pin_exactly, report_pool, rounded

GIB = 1 << 30
SIZE = (5 << 20) + 123
GPU = torch.device("cuda", 0)


class Cudart:
    """The calls that LMCache makes of the runtime; each can fail with an error code.

    Attributes:
        registered: bytes by address.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        assert ptr % mmap.PAGESIZE == 0 and size % mmap.PAGESIZE == 0 and flags == 0
        assert ctypes.string_at(ptr, size) == bytes(size)
        if not self.error:
            self.registered[ptr] = size
        return self.error

    def cudaHostUnregister(self, ptr: int) -> int:
        ctypes.string_at(ptr, self.registered[ptr])  # still mapped
        if not self.error:
            del self.registered[ptr]
        return self.error


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    for name in pinned.TORCH_OPTIONS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cudart(monkeypatch):
    """A process with CUDA in which LMCache's compiled part did not load; not repaired yet."""
    runtime, spec, ops = Cudart(), CudaDeviceSpec(), CudaDeviceOps()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(pinned, "current_device_spec", spec)
    for module in (pinned, memory_management):
        monkeypatch.setattr(module, "device_ops", ops)
    return runtime


@pytest.fixture
def repaired(cudart):
    pin_exactly()
    return cudart


def held() -> dict[int, mmap.mmap]:
    return vars(pinned.device_ops)["alloc_pinned_ptr"].__self__._held


# Size


@pytest.mark.parametrize(
    "options, size, taken",
    [
        ("", 5 * GIB, 8 * GIB),
        ("", 64 * GIB, 128 * GIB),
        ("", 64 * GIB - mmap.PAGESIZE, 64 * GIB),
        ("expandable_segments:True", 5 * GIB, 8 * GIB),
        ("pinned_max_round_threshold_mb:64", 5 * GIB, 5 * GIB + mmap.PAGESIZE),
        ("a:1, pinned_max_round_threshold_mb : 8192", 5 * GIB, 8 * GIB),
        ("pinned_max_cached_size_mb:1024,a:1", 5 * GIB, 5 * GIB + mmap.PAGESIZE),
        ("pinned_max_round_threshold_mb:8192,pinned_max_cached_size_mb:1024", 2 * GIB, None),
    ],
)
@pytest.mark.parametrize("name", pinned.TORCH_OPTIONS)
def test_a_size_is_rounded_as_torch_rounds_it(monkeypatch, name, options, size, taken):
    if options:
        monkeypatch.setenv(name, options)
    assert rounded(size) == (taken or size + mmap.PAGESIZE)


def test_the_option_that_is_advised_is_one(monkeypatch):
    name, _, value = pinned.DONT_ROUND.partition("=")
    monkeypatch.setenv(name, value)
    assert rounded(5 * GIB) == 5 * GIB + mmap.PAGESIZE


# Allocation, through LMCache's own


def test_the_pool_is_as_large_as_asked_for(repaired, hybrid_log):
    allocator = MixedMemoryAllocator(SIZE)
    pool = allocator.buffer
    ((address, size),) = repaired.registered.items()
    assert (address, pool.numel()) == (pool.data_ptr(), SIZE)
    assert SIZE <= size < SIZE + mmap.PAGESIZE
    assert "5.0 MiB of pinned memory instead of 8.0 MiB" in hybrid_log.text
    record = allocator.allocate(torch.Size([1, 1, 1, 4097]), torch.uint8)
    record.tensor.fill_(7)
    assert pool.sum() == 7 * 4097
    record.ref_count_down()

    (memory,) = held().values()
    allocator.close()
    assert not repaired.registered and not held() and memory.closed


def test_memory_that_cuda_does_not_release_is_not_given_back(repaired, hybrid_log):
    """The device could still write to what the system has given to somebody else."""
    allocator = MixedMemoryAllocator(SIZE)
    (memory,) = held().values()
    repaired.error = 1
    allocator.close()
    assert not memory.closed and held() and "stays allocated" in hybrid_log.text
    repaired.error = 0
    pinned.device_ops.free_pinned_ptr(next(iter(held())))
    assert memory.closed


def fails_to_register(cudart, monkeypatch):
    cudart.error = 2


def raises(cudart, monkeypatch):
    def register(*args):
        raise RuntimeError("no device")

    cudart.cudaHostRegister = register


def has_no_memory(cudart, monkeypatch):
    def nothing(*args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", nothing)


def has_no_threads(cudart, monkeypatch):
    def nothing(thread):
        raise RuntimeError("can't start new thread")  # as the interpreter says it

    monkeypatch.setattr(threading.Thread, "start", nothing)


@pytest.mark.parametrize("fault", [fails_to_register, raises, has_no_memory, has_no_threads])
def test_where_it_cannot_be_pinned_lmcache_allocates(repaired, hybrid_log, monkeypatch, fault):
    fault(repaired, monkeypatch)
    allocator = MixedMemoryAllocator(SIZE)
    address = allocator.buffer.data_ptr()
    assert allocator.buffer.numel() == SIZE and address in mem_alloc._tensor_registry
    ours = [record for record in hybrid_log.records if record.name == pinned.logger.name]
    (warning,) = [record.message for record in ours if record.levelname == "WARNING"]
    assert "5.0 MiB of host memory cannot be pinned" in warning
    assert "takes 8.0 MiB" in warning and pinned.DONT_ROUND in warning
    allocator.close()
    assert address not in mem_alloc._tensor_registry


def test_where_torch_does_not_round_lmcache_allocates(repaired, hybrid_log, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1")
    allocator = MixedMemoryAllocator(SIZE)
    assert allocator.buffer.data_ptr() in mem_alloc._tensor_registry
    assert not repaired.registered and not hybrid_log.records
    allocator.close()


def test_many_parts_are_touched(repaired, monkeypatch):
    touched = []
    monkeypatch.setattr(pinned, "TOUCHED_AT_ONCE", 1 << 20)
    monkeypatch.setattr(pinned, "_touch", lambda at, size: touched.append((at, size)))
    allocator = MixedMemoryAllocator(SIZE)
    start = allocator.buffer.data_ptr()
    parts = [(start + (i << 20), 1 << 20) for i in range(5)] + [(start + (5 << 20), mmap.PAGESIZE)]
    assert sorted(touched) == parts
    allocator.close()


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Node 1 has the last core that this process may use."""
    core = max(os.sched_getaffinity(0))
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{core}\n")
    monkeypatch.setattr(pinned, "NODES", tmp_path)
    touched = []
    touch = pinned._touch

    def record(address, size):
        touched.append(os.sched_getaffinity(0))
        touch(address, size)

    monkeypatch.setattr(pinned, "_touch", record)
    return core, touched


@pytest.mark.parametrize("hugepages", [False, True])
def test_pages_lie_on_the_numa_node(repaired, hybrid_log, node, hugepages):
    core, touched = node
    before = os.sched_getaffinity(0)
    mapping = NUMAMapping({0: 1})
    allocator = MixedMemoryAllocator(SIZE, numa_mapping=mapping, use_hugepages=hugepages)
    assert touched == [{core}] and os.sched_getaffinity(0) == before
    assert ("local_cpu_use_hugepages" in hybrid_log.text) == hugepages
    allocator.close()
    assert not repaired.registered


@pytest.mark.parametrize("number, warned", [(-1, False), (7, True)])
def test_a_numa_node_that_is_not_known(repaired, hybrid_log, node, number, warned):
    """The system says -1 where a device belongs to no node."""
    allocator = MixedMemoryAllocator(SIZE, numa_mapping=NUMAMapping({0: number}))
    assert node[1] == [os.sched_getaffinity(0)] and repaired.registered
    assert ("another NUMA node" in hybrid_log.text) == warned
    allocator.close()


def test_hugepages_without_numa_become_transparent_ones(repaired, hybrid_log):
    allocator = MixedMemoryAllocator(SIZE, use_hugepages=True)
    assert repaired.registered and "transparent huge pages" in hybrid_log.text
    allocator.close()
    assert not repaired.registered


def test_cores_of_a_node(tmp_path, monkeypatch):
    monkeypatch.setattr(pinned, "NODES", tmp_path)
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text("0-2,8,10-11\n")
    assert pinned._cores_of(3) == {0, 1, 2, 8, 10, 11}


def test_a_fork_does_not_share_the_pool(repaired):
    """A child's copy would leave the device with pages that this process has left."""
    allocator = MixedMemoryAllocator(SIZE)
    start = f"{allocator.buffer.data_ptr():x}-"
    with open("/proc/self/smaps") as maps:
        lines = maps.read().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(start))
    flags = next(line for line in lines[at:] if line.startswith("VmFlags"))
    assert "dc" in flags.split()
    allocator.close()


# Where it acts


def test_lmcaches_compiled_part_stays(cudart):
    compiled = SimpleNamespace(alloc_pinned_ptr=lambda size, flags: 0)
    pinned.device_ops.bind_native(compiled)
    pin_exactly()
    assert pinned.device_ops.alloc_pinned_ptr is compiled.alloc_pinned_ptr


def test_a_torch_without_cuda_stays(cudart, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    pin_exactly()
    assert "alloc_pinned_ptr" not in vars(pinned.device_ops)


def test_repairing_twice_changes_nothing(repaired):
    first = pinned.device_ops.alloc_pinned_ptr
    pin_exactly()
    assert pinned.device_ops.alloc_pinned_ptr == first
    bound = {name for name in vars(pinned.device_ops) if not name.startswith("_")}
    assert bound == {name for name in vars(ExactPinned) if not name.startswith("_")}


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_worker_of_a_hybrid_model_asks_for_it(monkeypatch, role):
    calls = []
    monkeypatch.setattr(services, "pin_exactly", lambda: calls.append("pin"))
    builder = SimpleNamespace(get_or_create=lambda *a: calls.append("engine"))
    monkeypatch.setattr(services, "LMCacheEngineBuilder", builder)
    factory = services.HybridServiceFactory.__new__(services.HybridServiceFactory)
    factory.role, factory.metadata = role, object()
    factory.lmcache_config = SimpleNamespace()
    upstream = services.VllmServiceFactory
    monkeypatch.setattr(upstream, "get_or_create_lmcache_engine", lambda self: None)
    factory.get_or_create_lmcache_engine()
    assert calls == (["pin", "engine"] if role == "worker" else [])


# What is said at start-up


def pool_of(allocator) -> SimpleNamespace:
    return SimpleNamespace(memory_allocator=allocator)


@pytest.fixture
def pins(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)


def said(hybrid_log, allocator, device=GPU) -> str:
    hybrid_log.clear()
    report_pool(pool_of(allocator), device)
    allocator.close()
    (record,) = hybrid_log.records
    assert record.levelname == ("INFO" if "not pinned" not in record.message else "WARNING")
    return record.message


def test_what_the_pool_takes(repaired, pins, hybrid_log):
    assert "takes 5.0 MiB of pinned host memory" in said(hybrid_log, MixedMemoryAllocator(SIZE))


def test_what_a_rounded_pool_takes(cudart, pins, hybrid_log):
    assert "takes 8.0 MiB of pinned" in said(hybrid_log, MixedMemoryAllocator(SIZE))
    pin_exactly()
    cudart.error = 2
    assert "takes 8.0 MiB of pinned" in said(hybrid_log, MixedMemoryAllocator(SIZE))


def test_a_pool_that_is_not_pinned(repaired, hybrid_log):
    message = said(hybrid_log, MixedMemoryAllocator(SIZE))
    assert "5.0 MiB" in message and "not pinned" in message and pinned.DONT_ROUND in message


def test_what_the_pool_of_a_cpu_takes(hybrid_log):
    message = said(hybrid_log, MixedMemoryAllocator(SIZE), torch.device("cpu"))
    assert message == "LMCache's CPU pool takes 5.0 MiB of host memory on this rank."
