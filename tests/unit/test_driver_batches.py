# SPDX-License-Identifier: Apache-2.0
"""Copies handed over in batches. CPU memory and ``memmove`` stand for the device only."""

import ctypes
import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.worker import driver_batches, streams
from lmcache_hybrid.worker.driver_batches import (
    BatchedTransfer,
    copy_one_by_one,
    join,
    queue_batched,
    transfer_for,
)
from lmcache_hybrid.worker.pages import GroupPages, Spans

GPU = torch.device("cuda", 0)
SCHEMA = (
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes,"
    " bool is_src_access_order_any=False) -> ()"
)


class OnDevice(torch.Tensor):
    """CPU memory that says it is the device's."""

    device = property(lambda self: GPU)


def on_device(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8).as_subclass(OnDevice)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=made, dtype=torch.uint8)


class Op:
    """vLLM's op with its checks, over memmove.

    Attributes:
        calls: per call (copies, whether the order of the source is any).
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[int, int, int]], bool]] = []
        self.error: Exception | None = None
        self.spoil = 0

    def __call__(self, src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False) -> None:
        for each in (src_ptrs, dst_ptrs, sizes):
            assert each.dtype == torch.int64 and each.device.type == "cpu"
            assert each.is_contiguous() and each.shape == sizes.shape
        batch = list(zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True))
        self.calls.append((batch, is_src_access_order_any))
        if self.error is not None:
            raise self.error
        assert all(size > 0 for *_, size in batch), "the driver refuses empty copies"
        for source, target, size in batch:
            ctypes.memmove(target, source, size - self.spoil)

    @property
    def copies(self) -> int:
        return sum(len(batch) for batch, _ in self.calls)


@pytest.fixture
def op():
    """As vLLM registers it: for pointers in CPU tensors."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(SCHEMA)
    fake = Op()
    library.impl("swap_blocks_batch", fake, "CPU")
    yield fake
    library._destroy()
    if "swap_blocks_batch" in vars(torch.ops._C_cache_ops):
        del torch.ops._C_cache_ops.swap_blocks_batch


class Stream(nullcontext):
    """A stream of the device; ``waits`` has the streams that it waited for.

    Attributes:
        cuda_stream: its address, 0 and 1 of default ones.
    """

    def __init__(self, cuda_stream: int = 43) -> None:
        super().__init__()
        self.cuda_stream, self.waits = cuda_stream, []

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)

    def synchronize(self) -> None:
        return


@pytest.fixture
def gpu(monkeypatch):
    """What the choice and each call ask of CUDA; change its fields to change the answer."""
    state = SimpleNamespace(cuda="13.0", driver=13000, device=0, current=Stream(42), pinned=True)
    monkeypatch.setattr(torch.version, "cuda", state.cuda)
    monkeypatch.setattr(driver_batches, "_driver_version", lambda: state.driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())

    @contextmanager
    def current(stream):
        before, state.current = state.current, stream
        try:
            yield
        finally:
            state.current = before

    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: state.pinned)
    monkeypatch.setattr(driver_batches, "MIN_BATCHED", 0)
    monkeypatch.setattr(driver_batches, "_stream", lambda device: Stream())
    monkeypatch.setattr(
        driver_batches, "_pinned", lambda size: torch.zeros(size, dtype=torch.uint8)
    )
    zeros = torch.zeros
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *size, device=None, **more: (
            on_device(*size) if device == GPU else zeros(*size, device=device, **more)
        ),
    )
    return state


class Item:
    """Pieces as a test wants them: pairs of (page, its place in ``payload``)."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs, self.payload = pairs, pairs[0][1]

    def pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._pairs

    def spans(self) -> Spans:
        rows = [
            (page.data_ptr(), part.data_ptr(), page.numel(), page.untyped_storage().data_ptr())
            for page, part in self._pairs
        ]
        return Spans(*np.array(rows, np.int64).T.copy())


def items_of(pairs: list[tuple[torch.Tensor, torch.Tensor]], count: int = 3) -> list[Item]:
    """Some items of as many pieces, or one more."""
    cuts = [len(pairs) * number // count for number in range(count + 1)]
    return [Item(pairs[start:end]) for start, end in zip(cuts, cuts[1:]) if start < end]


def random_pairs(seed: int, count: int, to_host: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of odd sizes at odd places, some side by side on one side or on both."""
    dice = random.Random(seed)
    sizes = [dice.choice((0, 1, 3, 255, 256, 1000, dice.randrange(5000))) for _ in range(count)]
    gaps = [(dice.choice((0, 0, 7)), dice.choice((0, 0, 5))) for _ in sizes]
    total = sum(sizes) + 7 * count + 16
    device, host = on_device(total), torch.zeros(total, dtype=torch.uint8)
    (device if to_host else host).copy_(noise(total, seed))
    pairs, there, here = [], 3, 1
    for size, (gap_there, gap_here) in zip(sizes, gaps):
        pairs.append((device[there : there + size], host[here : here + size]))
        there, here = there + size + gap_there, here + size + gap_here
    return pairs


def result(transfer, pairs, to_host: bool) -> list[torch.Tensor]:
    """All of the targets' memory after the copies."""
    transfer(items_of(pairs), to_host)
    wholes = {t.untyped_storage().data_ptr(): t for t in (pair[to_host] for pair in pairs)}
    return [
        torch.zeros(0, dtype=torch.uint8).set_(each.untyped_storage()).clone()
        for each in wholes.values()
    ]


# Joining


def test_neighbours_on_both_sides_are_one_copy():
    there, here = on_device(100), noise(100)
    cuts = [(0, 10), (10, 30), (30, 31), (31, 31), (31, 60)]
    items = items_of([(there[a:b], here[20 + a : 20 + b]) for a, b in cuts])
    joined = join([item.spans() for item in items])
    assert [each.tolist() for each in joined[:3]] == [
        [there.data_ptr()],
        [here.data_ptr() + 20],
        [60],
    ]


@pytest.mark.parametrize("there_gap, here_gap", [(1, 0), (0, 1), (-10, 0), (0, -10), (-20, 0)])
def test_pieces_that_do_not_adjoin_stay_apart(there_gap, here_gap):
    there, here = on_device(100), noise(100)
    to, of = 40 + there_gap, 40 + here_gap
    item = Item([(there[30:40], here[30:40]), (there[to : to + 10], here[of : of + 10])])
    assert join([item.spans()]).sizes.tolist() == [10, 10]


def test_adjacent_memory_of_two_allocations_stays_apart():
    memory = (ctypes.c_char * 100)()
    first, second = (
        torch.frombuffer(memory, dtype=torch.uint8, count=50, offset=at) for at in (0, 50)
    )
    assert second.data_ptr() == first.data_ptr() + 50
    here = noise(100)
    item = Item([(first, here[:50]), (second, here[50:])])
    assert join([item.spans()]).sizes.tolist() == [50, 50]


def test_copying_nothing_does_nothing(op, gpu):
    nothing = Item([(on_device(0), noise(0))])
    assert not len(join([]).sizes) and not len(join([nothing.spans()]).sizes)
    for transfer in (copy_one_by_one, BatchedTransfer(GPU)):
        transfer([], True)
        transfer([nothing], False)
    assert not op.calls


# Copying


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("to_host", [False, True])
def test_every_path_copies_the_same_bytes(op, gpu, seed, to_host):
    pairs, ours = (random_pairs(seed, 30, to_host) for _ in range(2))
    expected = result(copy_one_by_one, pairs, to_host)
    assert any(whole.any() for whole in expected)
    assert all(map(torch.equal, result(BatchedTransfer(GPU), ours, to_host), expected))
    assert op.copies == len(join([item.spans() for item in items_of(ours)]).sizes)
    assert {any_order for _, any_order in op.calls} == {not to_host}


def apart(count: int, size: int = 17) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces that join with none of their neighbours."""
    there, here = on_device(count * (size + 3)), noise(count * (size + 3))
    starts = range(0, count * (size + 3), size + 3)
    return [(there[at : at + size], here[at : at + size]) for at in starts]


def test_two_hundred_pages_are_one_call(op, gpu):
    pairs = apart(200)
    BatchedTransfer(GPU)(items_of(pairs, 50), False)
    assert len(op.calls) == 1 and op.copies == 200
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_batch_has_an_end(op, gpu):
    """Drivers break on more than some hundreds."""
    pairs = apart(700)
    BatchedTransfer(GPU)(items_of(pairs), False)
    assert [len(batch) for batch, _ in op.calls] == [256, 256, 188]
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("to_host", [False, True])
def test_small_pieces_are_not_batched_to_the_device(op, gpu, monkeypatch, to_host):
    """Drivers copy other bytes now and then where such are in a batch."""
    monkeypatch.setattr(driver_batches, "MIN_BATCHED", 20)
    small, large, both = (apart(4, size) for size in (19, 20, 21))
    both[2] = small[3]
    kept = [small[:3], large, both]
    expected = [pair[1 - to_host].clone() for pairs in kept for pair in pairs]
    BatchedTransfer(GPU)([Item(pairs) for pairs in kept], to_host)
    batched = {size for batch, _ in op.calls for *_, size in batch}
    assert batched == ({19, 20, 21} if to_host else {20})
    done = [pair[to_host] for pairs in kept for pair in pairs]
    assert all(map(torch.equal, done, expected))


def test_batches_are_such_as_were_seen_to_be_right():
    """Of ``benchmarks.gpu.batches``: no piece below 4,096 bytes, no more than 512 in a call."""
    assert driver_batches.MIN_BATCHED >= 4096 and driver_batches.MAX_BATCH <= 512
    cuts, _ = driver_batches._checked_cuts()
    assert all(end - start >= driver_batches.MIN_BATCHED for start, end in cuts)


class Record(NamedTuple):
    """As :class:`.copies.CopyJob`: blocks of a group in a buffer, which starts within the pool."""

    pages: GroupPages
    block: tuple[int, ...]
    payload: torch.Tensor

    def pieces(self):
        return self.pages.pieces(self.block, self.payload)

    def spans(self):
        return self.pages.spans(self.block, self.payload)


def kv_cache(seed: int) -> dict[str, torch.Tensor]:
    """Layers with padding behind a block, in two pieces a block, and not from the start on."""
    padded = noise(10 * 64, seed).view(10, 64)[:, :50]
    apart = noise(2 * 10 * 24, seed + 1).view(2, 10, 24).transpose(0, 1)
    late = noise(7 + 10 * 9, seed + 2)[7:].view(10, 9)
    return {"padded": padded, "apart": apart, "late": late}


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("to_host", [False, True])
def test_blocks_of_a_kv_cache_get_their_own_bytes(op, gpu, to_host, moved):
    """Through addresses as through tensors; after a sleep, too, when the memory is another."""
    caches = kv_cache(0)
    pages = GroupPages(list(caches), caches, count=2)
    if moved:
        pages.unmap()
        with pytest.raises(LoadError, match="freed"):
            pages.spans((1, 2), torch.empty(pages.block_bytes, dtype=torch.uint8))
        old, caches = caches, kv_cache(10)
        before = {name: cache.clone() for name, cache in old.items()}
        pages.map(caches)
    size = pages.block_bytes
    pool = noise(3 * (size + 192), 5)
    blocks = [(3, 1), (8, 9), (2, 7)]
    records = [
        Record(pages, block, pool[192 + number * (size + 192) :][:size])
        for number, block in enumerate(blocks)
    ]
    expected = []
    for record in records:
        pairs = record.pieces()
        expected += [pair[1 - to_host].clone() for pair in pairs]
    rest = pool[:192].clone(), caches["padded"].clone()
    BatchedTransfer(GPU)(records, to_host)
    assert op.copies
    done = [pair[to_host] for record in records for pair in record.pieces()]
    assert len(done) == 3 * 2 * 4 and all(map(torch.equal, done, expected))
    assert torch.equal(pool[:192], rest[0])
    others = [block for block in range(10) if block not in sum(blocks, ())]
    assert torch.equal(caches["padded"][others], rest[1][others])
    if moved:
        assert all(torch.equal(old[name], before[name]) for name in old)


def test_pages_are_read_in_the_order_of_the_stream(op, gpu):
    """The forward that writes them may only be queued."""
    item = Item(apart(2))  # holds the memory
    queue_batched(item.spans(), to_host=True)
    queue_batched(item.spans(), to_host=False)
    assert [any_order for _, any_order in op.calls] == [False, True]


@pytest.mark.parametrize("change", [{"pinned": False}, {"device": 1}], ids=str)
def test_what_the_driver_does_not_batch_is_copied_one_by_one(op, gpu, change):
    vars(gpu).update(change)
    expected = result(copy_one_by_one, random_pairs(1, 30, True), True)
    got = result(BatchedTransfer(GPU), random_pairs(1, 30, True), True)
    assert all(map(torch.equal, got, expected))
    assert not op.calls


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("default", [0, 1])
def test_batches_of_a_default_stream_run_between_two_parts_of_it(
    op, gpu, monkeypatch, default, fails
):
    """Behind the forward that writes the pages, and before the one that overwrites them."""
    gpu.current = queue = Stream(default)
    seen = []

    def queue_and_look(spans, to_host):
        seen.append((gpu.current, list(gpu.current.waits), list(queue.waits)))
        queue_batched(spans, to_host)

    monkeypatch.setattr(driver_batches, "queue_batched", queue_and_look)
    op.error = RuntimeError("cuMemcpyBatchAsync failed") if fails else None
    expected = result(copy_one_by_one, random_pairs(1, 30, True), True)
    got = result(BatchedTransfer(GPU), random_pairs(1, 30, True), True)
    assert all(map(torch.equal, got, expected))
    ((own, behind, before),) = seen
    assert own is not queue and own.cuda_stream not in driver_batches.DEFAULT_STREAMS
    assert (behind, before, queue.waits, gpu.current) == ([queue], [], [own], queue)


def test_batches_of_another_stream_run_on_it(op, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: pytest.fail("one more stream"))
    BatchedTransfer(GPU)(items_of(random_pairs(1, 30, True)), True)
    assert op.calls and not gpu.current.waits


def test_after_an_error_the_plain_path_goes_on(op, gpu, hybrid_log):
    transfer, op.error = BatchedTransfer(GPU), RuntimeError("cuMemcpyBatchAsync failed")
    for seed in (1, 2):
        expected = result(copy_one_by_one, random_pairs(seed, 30, True), True)
        got = result(transfer, random_pairs(seed, 30, True), True)
        assert all(map(torch.equal, got, expected))
    assert len(op.calls) == 1
    assert hybrid_log.text.count("one by one") == 1


# Choice


def test_the_batched_copy_is_chosen(op, gpu, hybrid_log):
    assert isinstance(transfer_for(GPU), BatchedTransfer)
    assert {any_order for _, any_order in op.calls} == {True, False}
    assert "in batches" in hybrid_log.text
    assert [r.levelname for r in hybrid_log.records] == ["INFO"]


def plain(hybrid_log, why: str) -> None:
    assert transfer_for(GPU) is copy_one_by_one
    assert why in hybrid_log.text and "one by one" in hybrid_log.text


def test_a_vllm_without_the_op(gpu, hybrid_log):
    plain(hybrid_log, "no batched copy")
    assert "WARNING" not in {record.levelname for record in hybrid_log.records}


@pytest.mark.parametrize(
    "error", [RuntimeError("invalid argument"), TypeError("renamed"), torch.OutOfMemoryError("x")]
)
def test_an_op_that_raises(op, gpu, hybrid_log, error):
    op.error = error
    plain(hybrid_log, "it fails here")


@pytest.mark.parametrize("to_host", [False, True])
def test_an_op_that_copies_other_bytes(op, gpu, hybrid_log, monkeypatch, to_host):
    """The last byte of each piece is missing, on one of the ways."""
    real = queue_batched

    def queue(spans, way):
        op.spoil = int(way == to_host)
        real(spans, way)

    monkeypatch.setattr(driver_batches, "queue_batched", queue)
    plain(hybrid_log, "other bytes")


def test_an_op_that_writes_beyond(op, gpu, hybrid_log):
    op.spoil = -1
    plain(hybrid_log, "other bytes")


@pytest.mark.parametrize(
    "cuda, driver, why",
    [
        (None, 13000, "need CUDA"),
        ("12.6", 13000, "built for 12.6"),
        ("12.8", 12060, "is of 12.6"),
        ("13.0", 0, "unknown version"),
    ],
)
def test_a_cuda_without_batched_copies_takes_the_plain_path(
    op, gpu, hybrid_log, monkeypatch, cuda, driver, why
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu.driver = driver
    plain(hybrid_log, why)
    assert not op.calls


def test_the_first_cuda_with_batches(op, gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    gpu.driver = 12080
    assert isinstance(transfer_for(GPU), BatchedTransfer)


def test_the_version_of_the_driver(monkeypatch):
    def library(name):
        if installed is None:
            raise OSError(name)
        return SimpleNamespace(cuDriverGetVersion=answer)

    def answer(version):
        ctypes.memmove(version, ctypes.byref(ctypes.c_int(installed)), 4)

    monkeypatch.setattr(ctypes, "CDLL", library)
    for installed in (12090, None):
        assert driver_batches._driver_version() == (installed or 0)


def test_a_device_that_is_no_gpu_copies_one_by_one(hybrid_log):
    assert transfer_for(torch.device("xpu", 0)) is copy_one_by_one
    assert "this is xpu" in hybrid_log.text


def test_the_choice_is_what_a_worker_copies_with(op, gpu, monkeypatch):
    made = []
    monkeypatch.setattr(
        streams, "StreamCopies", lambda device, transfer: made.append(transfer) or made
    )
    assert streams.copies_for(GPU, None) is made
    assert isinstance(made[0], BatchedTransfer)
