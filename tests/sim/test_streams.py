# SPDX-License-Identifier: Apache-2.0
"""The order of copies on a device, one test for each rule of :class:`StreamCopies`.

The device runs nothing before it must (mode "late"), so what is not ordered comes too late.
The last tests put whole engines on such devices, without faults: there nothing may be lost.
"""

import inspect
import random
from collections import Counter

import numpy as np
import pytest
import torch

from lmcache_hybrid.core.digests import KeyedDigester
from lmcache_hybrid.core.errors import DamagedError
from lmcache_hybrid.storage.record_format import digests_of
from lmcache_hybrid.worker.copies import CopyJob
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.streams import StreamCopies
from tests.naive_store import NaiveStore

from . import device as simulated
from .device import BrokenCopy, Device, HostAccess, here, on_device
from .program import TRUNKS, Run, Tally
from .setup import Setup
from .storage import N
from .threads import Threads

BLOCKS, SIZE = 6, 64


@pytest.fixture(autouse=True)
def on_device_0(monkeypatch):
    monkeypatch.setattr(here, "device", 0)


class Bench:
    """One group of two layers on a late device, and the real copies."""

    def __init__(self) -> None:
        self.threads, self.reuses = Threads(0), Counter()
        self.device = Device("late", self.threads, self.reuses)
        self.device.enter()
        self.memory = {name: torch.zeros(BLOCKS, SIZE, dtype=torch.uint8) for name in "ab"}
        self.pages = on_device(GroupPages(list("ab"), self.memory), self.device)
        self.copies = StreamCopies(self.device.torch_device)
        self.store = NaiveStore()

    def forward(self, block: int, value: int) -> None:
        """Queue a forward that overwrites a block."""

        def run() -> None:
            for memory in self.memory.values():
                memory[block] = value

        self.device.compute.add("run", run)

    def item(self, block: int, value: int = 0) -> CopyJob:
        buffer = self.store.reserve(self.pages.block_bytes)
        buffer.payload.fill_(value)
        buffer.digests = digests_of(memoryview(buffer.payload.numpy()))
        return CopyJob(None, self.pages, block, buffer)

    def block(self, block: int) -> set[int]:
        """The values that are in it."""
        return {value for memory in self.memory.values() for value in memory[block].tolist()}


@pytest.fixture
def bench(monkeypatch):
    return Bench()


def values(item: CopyJob) -> set[int]:
    return set(item.buffer.payload.tolist())


def test_a_save_is_of_this_forward_and_not_of_the_next(bench):
    bench.forward(1, 7)
    finish = bench.copies.gather([item := bench.item(1)])
    bench.forward(1, 8)
    bench.device.drain()
    finish()
    assert values(item) == {7}


def test_a_save_costs_the_step_no_wait(bench):
    bench.forward(1, 7)
    bench.copies.gather([bench.item(1)])
    assert bench.block(1) == {0}, "the device was waited for"


def test_digests_are_of_what_was_copied(bench):
    bench.forward(1, 7)
    finish = bench.copies.gather([item := bench.item(1)])
    finish()
    assert item.buffer.digests == digests_of(memoryview(item.buffer.payload.numpy()))
    assert values(item) == {7}


def test_a_keyed_store_gets_keyed_digests(bench):
    """Of what is copied, and they are what a load is checked by."""
    bench.forward(1, 7)
    item = bench.item(1)
    item.buffer.digester = digester = KeyedDigester(bytes(range(32)))
    bench.copies.gather([item])()
    payload = memoryview(item.buffer.payload.numpy())
    assert item.buffer.digests == digests_of(payload, digester) != digests_of(payload)
    bench.copies.scatter([item._replace(block=2)], bench.copies.mark())
    bench.device.drain()
    assert bench.block(2) == {7}
    item.buffer.digests = digests_of(payload)
    with pytest.raises(DamagedError):
        bench.copies.scatter([item._replace(block=3)], bench.copies.mark())


def test_a_load_waits_for_what_was_queued_before_its_mark(bench):
    bench.forward(1, 7)
    finish = bench.copies.gather([saved := bench.item(1)])
    mark = bench.copies.mark()
    bench.copies.scatter([bench.item(1, 9)], mark)
    finish()
    bench.device.drain()
    assert values(saved) == {7}, "the block was loaded over before it was saved"
    assert bench.block(1) == {9}, "the forward came after the load"


def test_a_load_does_not_wait_for_what_was_queued_after_its_mark(bench):
    mark = bench.copies.mark()
    bench.forward(2, 7)
    bench.copies.scatter([bench.item(1, 9)], mark)
    assert bench.block(2) == {0}


def test_each_mark_is_of_its_own_moment(bench):
    marks = []
    for value in (1, 2, 3):
        bench.forward(value, value)
        marks.append(bench.copies.mark())
    bench.copies.scatter([bench.item(2, 9)], marks[1])
    bench.device.drain()
    assert bench.block(2) == {9}


def test_a_load_has_reached_its_pages_when_it_returns(bench):
    bench.copies.scatter([bench.item(1, 9)], bench.copies.mark())
    assert bench.block(1) == {9}


def test_a_load_that_fails_reads_no_buffer_later(bench):
    bench.device.breaking, bench.device.after = 1, 3
    items = [bench.item(1, 9), bench.item(2, 9)]
    with pytest.raises(BrokenCopy):
        bench.copies.scatter(items, bench.copies.mark())
    assert not any(stream.queue for stream in bench.device.streams)


def test_a_save_that_fails_writes_no_buffer_later(bench):
    bench.device.breaking, bench.device.after = 1, 3
    with pytest.raises(BrokenCopy):
        bench.copies.gather([bench.item(1), bench.item(2)])
    assert not any(stream.queue for stream in bench.device.streams)


def test_damaged_bytes_are_not_queued(bench):
    item = bench.item(1, 9)
    item.buffer.payload[3] = 1
    item = item._replace(key=type("Key", (), {"kind_name": "state"})())
    with pytest.raises(Exception, match="checksum"):
        bench.copies.scatter([item], bench.copies.mark())
    bench.device.drain()
    assert bench.block(1) == {0}


def test_each_restoring_thread_has_a_stream_of_its_own(bench):
    mark = bench.copies.mark()
    loads = [
        bench.threads.start(
            lambda b=block: [bench.copies.scatter([bench.item(b, 9)], mark) for _ in range(3)]
        )
        for block in (1, 2, 3)
    ]
    while bench.threads.advance(100):
        pass
    assert [load.error for load in loads] == [None] * 3
    assert len(bench.device.streams) == 2 + len(loads), "the device's own two, and one for each"
    bench.device.check()
    assert [bench.block(block) for block in (1, 2, 3)] == [{9}] * 3


def test_a_thread_that_waits_for_a_copy_sleeps(bench):
    bench.copies.scatter([bench.item(1, 9)], bench.copies.mark())
    bench.copies.gather([bench.item(1)])()
    bench.device.check()  # an event that is waited for was made with blocking=True


def test_each_rank_uses_its_own_device(bench):
    other = Bench()
    here.device = 0  # none of both, as in a new thread
    for each in (bench, other):
        each.forward(1, 7)
    finish = other.copies.gather([item := other.item(1)])
    bench.copies.scatter([bench.item(2, 9)], bench.copies.mark())
    finish()
    other.copies.scatter([other.item(2, 9)], other.copies.mark())
    assert values(item) == {7} and bench.block(2) == other.block(2) == {9}
    bench.device.check()
    other.device.check()


@pytest.mark.parametrize(
    "access",
    [
        lambda row: row[1].numpy(),
        lambda row: row[1].clone(),
        lambda row: row[1].tolist(),
        lambda row: torch.equal(row[1], row[2]),
        lambda row: torch.zeros(SIZE, dtype=torch.uint8).add_(row[1]),
        lambda row: np.copyto(np.zeros(SIZE, np.uint8), row[1]),
        lambda row: row[1].fill_(0),
        lambda row: row[1].copy_(row[2]),
    ],
)
def test_the_host_touches_no_device_memory(bench, access):
    """Of the simulation itself: whatever is no copy to or from the host raises."""
    with pytest.raises((HostAccess, TypeError)):
        access(bench.pages.rows[0])


@pytest.mark.parametrize("module, event", [(torch.cuda, {"blocking": True}), (torch.xpu, {})])
def test_torch_takes_the_calls_that_the_simulated_device_takes(module, event):
    """Of the simulation itself: there is no device here to call."""
    at = torch.device("cuda", 1)
    for function, args, named in (
        (module.set_device, (1,), {}),
        (module.current_stream, (at,), {}),
        (module.stream, (None,), {}),
        (module.Stream.__new__, (module.Stream,), {"device": at}),
        (module.Stream.wait_event, (None, None), {}),
        (module.Event.__new__, (module.Event,), event),
        (module.Event.record, (None, None), {}),
        (module.Event.synchronize, (None,), {}),
    ):
        inspect.signature(function).bind(*args, **named)
    assert torch.get_device_module(torch.device("cuda", 1)) is torch.cuda


def test_a_buffer_that_is_released_too_early_is_noticed(bench):
    """Of the simulation itself."""
    item = bench.item(1)
    bench.copies.gather([item])
    bench.reuses[item.buffer.payload.data_ptr() & ~0xFFF] += 1
    bench.device.drain()
    with pytest.raises(AssertionError, match="released before its copy ended"):
        bench.device.check()


# Whole engines


WITHOUT_FAULTS = ["step"] * 9 + ["add"] * 2 + ["again"] * 7 + ["reset"] * 4 + ["begin", "abort"]


def play(seed: int, tally: Tally, **setup) -> None:
    chance = random.Random(seed)
    setup = Setup(
        **{
            "groups": chance.choice(("sa", "as", "ssa", "saw")),
            "ranks": chance.choice((1, 2)),
            "blocks": chance.choice((16, 22, 30)),
            "seqs": 3,
            "part_bytes": chance.choice((1, 1 << 20)),
            "overlap": chance.random() < 0.5,
            "save_decode": chance.random() < 0.5,
            "runner": chance.choice(("v1", "v2")),
            "seed": seed,
            **setup,
        }
    )
    operations = [
        (verb, 0, chance.randrange(1 << 12), chance.randrange(1 << 10) | 1)
        for verb in chance.choices(WITHOUT_FAULTS, k=60)
    ]
    Run(setup, tally).play(operations)


def nothing_was_lost(tally: Tally, mode: str = "late") -> None:
    events = tally.events
    assert events["failed loads"] == events["records rejected"] == events["saves skipped"] == 0
    for name in ("loads", "pages saved", "loads of blocks that were saved"):
        assert events[f"device: {name}"], name
    assert bool(events["device: loads beside a forward"]) == (mode != "early")


@pytest.mark.parametrize("mode", ["late", "random", "early"])
def test_nothing_is_lost_on_a_device(mode):
    tally = Tally()
    for seed in range(8):
        play(seed, tally, device=mode)
    nothing_was_lost(tally, mode)
    assert tally.events["device: parts side by side"]


@pytest.mark.parametrize("runner", ["v1", "v2", "v2 deferred"])
def test_nothing_is_lost_beside_a_drafter(runner):
    tally = Tally()
    for seed in range(4):
        play(seed, tally, device="late", runner=runner, drafts=2, overlap=False, blocks=40)
    nothing_was_lost(tally)
    assert tally.events["accepted drafts"]


@pytest.mark.parametrize(
    "setup",
    [
        dict(runner="v2"),
        dict(runner="v2", overlap=True),
        dict(runner="v1", drafts=1),
        dict(runner="v2 deferred", drafts=1),
    ],
    ids=lambda setup: " ".join(f"{name}={value}" for name, value in setup.items()),
)
def test_a_block_that_is_still_being_saved_is_handed_to_a_load(setup, monkeypatch):
    """The pool holds one request: the next one's load gets the blocks of the one that ended."""
    monkeypatch.setattr(simulated, "PATIENCE", 0.98)
    setup = Setup(blocks=14, seqs=1, save_decode=True, device="late", **setup)
    run = Run(setup, tally := Tally())
    (engine,) = run.engines
    pool = engine.scheduler.kv_cache_manager.block_pool
    ballast = pool.get_new_blocks(pool.get_num_free_blocks() - 8 - setup.drafts)
    for number in range(18):
        # One of the last steps ends at a boundary, which is saved; prompts part in a last block.
        prompt = TRUNKS[number % 2][: 4 * N + 1] + TRUNKS[2][9 * number : 9 * number + 2]
        engine.add(f"r{number}", prompt, N - 2 + number % 3)
    engine.drain()
    pool.free_blocks(ballast)
    run.play([])
    assert tally.events["device: loads of blocks that are being saved"]
    nothing_was_lost(tally)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_aborted_while_its_load_copies(seed):
    setup = Setup(runner="v2", device="late", part_bytes=1, seed=seed)
    operations = [("add", 0, 9, 0), ("step", 0, 15, 0), ("reset", 0, 0, 0), ("again", 0, 0, 0)]
    operations += [("step", 0, 0, 0), ("begin", 0, 0, 0), ("abort", 0, 0, 1), ("again", 0, 0, 0)]
    Run(setup, tally := Tally()).play(operations)
    assert tally.events["device: loads of aborted requests"] == 1


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_checkpoints_inside_a_chunk_are_stored_and_hit(runner):
    """See ``num_prefill_checkpoint_blocks``: the chunk goes on past the boundary it writes."""
    setup = Setup(runner=runner, device="late", interior=1, batch=20 * N, blocks=60)
    operations = [("add", 0, 9, 0), ("step", 0, 15, 0), ("reset", 0, 0, 0)]
    operations += [("again", 0, 0, 0), ("step", 0, 15, 0)]
    tally = Tally()
    Run(setup, tally).play(operations)
    assert tally.events["hits"] == 1 and tally.events["hit tokens"] == 8 * N
    assert tally.events["checkpoints inside a chunk"]
