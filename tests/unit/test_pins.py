# SPDX-License-Identifier: Apache-2.0
"""What waiting requests pin in LMCache's RAM is bounded, and none of them waits for ever."""

import math
import random
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_hybrid import connector
from lmcache_hybrid.core.groups import page_bytes
from lmcache_hybrid.protocol.lookup import MISS, LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler import lookups
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.pin_limit import FEW, RAM, Pins

from .helpers import (
    PLAN,
    STATE_SPEC,
    WINDOWS,
    Later,
    N,
    Ranks,
    engine_config,
    make_prefix,
    make_request,
)
from .lmcache_settings import lmcache_config
from .scheduler_rig import Rig, table
from .test_vllm_patch import FULL, cache_config

DISK = "LocalDiskBackend"
ENDS = len(PLAN.states)  # records of a boundary beside its pages


def records(count: float) -> float:
    """GiB of a pool for so many records of a byte."""
    return count / (1 << 30)


def pins_of(pool: float | None, plan=PLAN) -> Pins:
    return Pins(plan, dict.fromkeys(plan.groups, 1), None if pool is None else records(pool))


class Queue(Rig):
    """Requests that wait, and vLLM's scheduling pass over them.

    Attributes:
        waiting: the first one is the head.
    """

    def __init__(self, pool: float | None, name: str = RAM, later=None, **rig) -> None:
        self.pins = pins_of(pool)
        super().__init__(Ranks(1, PLAN, later), pins=self.pins, **rig)
        self.ranks.stores[0].name = name
        self.waiting: list = []

    def add(self, name: str, blocks: int, shared: int = 0, stored: bool = True):
        """A prompt of its own, whose first blocks others may share."""
        seed = 1000 * (1 + len(self.ranks.stores[0].records) + len(self.waiting))
        tokens = [*range(shared * N), *range(seed, seed + (blocks - shared) * N + 1)]
        request = make_request(name, tokens)
        if stored:
            self.holds(request, blocks, blocks)
        self.waiting.append(request)
        return request

    def burst(self, count: int, blocks: int, shared: int = 0, stored: bool = True) -> "Queue":
        for number in range(count):
            self.add(str(number), blocks, shared, stored)
        return self

    def schedule(self, room: int) -> list[str]:
        """One pass, in which vLLM has blocks for ``room`` requests; returns those."""
        admitted = []
        for request in list(self.waiting):
            tokens, _ = self.match(request)
            if tokens is None:
                continue
            if len(admitted) == room:
                break
            self.scheduler.update_state_after_alloc(request, table(request), tokens)
            self.waiting.remove(request)
            admitted.append(request)
        self.step()
        for request in admitted:
            self.loaded(request)
            self.scheduler.request_finished(request)
        return [request.request_id for request in admitted]

    @property
    def asked(self) -> list[str]:
        return list(dict.fromkeys(question.request_id for question in self.ranks.questions))

    @property
    def pinned(self) -> int:
        return len(self.ranks.stores[0].pins)


@pytest.mark.parametrize("blocks", [2, 5, 40])
def test_a_burst_of_hits_pins_half_of_the_pool(blocks):
    queue = Queue(100).burst(30, blocks)
    one = blocks + ENDS
    admitted = []
    while queue.waiting:
        for request in queue.waiting:  # vLLM has no blocks, and asks for every one
            queue.match(request)
        assert queue.pins.bytes == queue.pinned
        assert queue.pinned < 50 + one or queue.pinned <= FEW * one
        assert queue.pinned >= min(50, len(queue.waiting) * one)
        admitted += queue.schedule(room=3)
    assert admitted == [str(number) for number in range(30)]  # nobody overtakes
    assert queue.scheduler.counts.lookups == {"hit": 30}
    assert queue.pins.bytes == queue.pinned == 0


def test_who_has_waited_in_vain_asks_again_whatever_others_pin(monkeypatch):
    """It would give up the hit that it has, and wait once more."""
    queue = Queue(None)
    request = queue.add("r", 4)
    assert queue.match(request) == (4 * N, True)
    monkeypatch.setattr(queue.pins, "may_ask", lambda request_id: False)
    monkeypatch.setattr(queue.scheduler.prefills, "wait", lambda tracker, start: None)
    assert queue.match(request) == (4 * N, True)
    assert len(queue.ranks.questions) == 2 and not queue.step().released


def test_who_must_not_read_pins_nothing_and_waits_for_no_pins(monkeypatch):
    """vLLM would run it at once, and all of it would be stored again."""
    queue = Queue(100)
    request = queue.add("r", 4)
    request.skip_reading_prefix_cache = True
    monkeypatch.setattr(queue.pins, "may_ask", lambda request_id: False)
    assert queue.match(request) == (0, False)
    assert queue.asked == ["r"] and queue.pins.bytes == queue.pinned == 0
    assert not queue.scheduler.counts.delayed_lookups


def test_requests_that_wait_for_others_are_counted_once():
    queue = Queue(100).burst(30, 40)
    for _ in range(5):
        for request in queue.waiting:
            queue.match(request)
        queue.step()
    assert queue.scheduler.counts.delayed_lookups == 30 - len(queue.asked)


def test_a_request_that_may_not_ask_yet_makes_no_question(monkeypatch):
    """vLLM asks for each in every pass, and hashing the boundaries inside its blocks takes time."""
    queue = Queue(100).burst(30, 40)
    for request in queue.waiting:
        queue.match(request)
    made = []
    monkeypatch.setattr(lookups, "question_of", lambda *given: made.append(given))
    assert [queue.match(request) for request in queue.waiting].count((None, False)) > 20
    assert made == []


def test_a_burst_that_shares_a_prefix_is_asked_for_at_once():
    queue = Queue(100).burst(30, 45, shared=40, stored=False)
    queue.holds(queue.waiting[0], 40, 40)
    assert all(queue.match(request) == (40 * N, True) for request in queue.waiting)
    assert queue.pins.bytes == queue.pinned == 40 + ENDS


def test_of_a_burst_that_shares_most_only_the_rest_counts():
    queue = Queue(240).burst(30, 41, shared=40)
    for request in queue.waiting:
        queue.match(request)
    assert len(queue.asked) == 20
    assert queue.pins.bytes == queue.pinned == 40 + 20 * (1 + ENDS) == 120


def test_lookups_count_with_all_they_may_find_until_they_are_answered():
    later = Later()
    queue = Queue(100, later=later).burst(12, 10, stored=False)
    for request in queue.waiting:
        queue.match(request)
    assert len(later.waiting) == FEW and queue.pins.bytes == FEW * (10 + ENDS)
    later.run()
    # vLLM has not heard of the answers yet, which are misses.
    urgent = queue.waiting[-FEW:]
    queue.step()
    assert [queue.match(request)[0] for request in urgent] == [None] * FEW
    assert len(later.waiting) == FEW


def test_the_head_of_the_queue_is_always_asked_for():
    queue = Queue(100).burst(10, 40)
    for request in queue.waiting:
        queue.match(request)
    queue.step()
    urgent = [queue.add(f"urgent {number}", 40) for number in range(2)]
    assert queue.match(urgent[0]) == (40 * N, True)
    assert queue.match(urgent[1]) == (None, False)


def test_who_waits_is_not_overtaken_within_a_pass():
    later = Later()
    queue = Queue(100, later=later).burst(6, 40, stored=False)
    first, *others, last, behind = queue.waiting
    for request in (first, *others, last):
        queue.match(request)
    assert queue.match(last) == (None, False) and last.request_id not in queue.asked
    later.run()
    assert queue.match(others[0]) == (0, False)
    assert queue.match(behind) == (None, False) and not later.waiting
    queue.step()
    queue.match(first)
    queue.match(last)
    assert len(later.waiting) == 1


ENDINGS = {
    "abort": lambda queue, request: queue.scheduler.request_finished(request),
    "load": lambda queue, request: queue.scheduler.update_state_after_alloc(
        request, table(request), 40 * N
    ),
    "compute": lambda queue, request: queue.scheduler.update_state_after_alloc(
        request, table(request), 0
    ),
    "local": lambda queue, request: queue.match(request, 40 * N),
    "reset": lambda queue, request: queue.scheduler.begin_reset(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_longer_pinned_does_not_count(ending):
    queue = Queue(100).burst(FEW + 1, 40)
    *before, last = queue.waiting
    for request in before:
        assert queue.match(request)[0]
    assert queue.match(last) == (None, False)
    ENDINGS[ending](queue, before[1])
    queue.step()
    left = 0 if ending == "reset" else FEW - 1
    assert queue.pins.bytes == left * (40 + ENDS)
    queue.scheduler.end_reset(True)
    assert queue.match(before[0])[0] and queue.match(last)[0]


def test_a_request_that_is_asked_for_again_counts_anew():
    queue = Queue(100).burst(FEW + 1, 40)
    second, last = queue.waiting[1], queue.waiting[-1]
    for request in queue.waiting[:-1]:
        assert queue.match(request, 30 * N)[0]
    assert queue.pins.bytes == FEW * (10 + ENDS)
    assert queue.match(second) == (40 * N, True)  # vLLM has lost its own blocks
    assert queue.pins.bytes == queue.pinned == FEW * (10 + ENDS) + 30
    assert queue.match(last) == (None, False)


@pytest.mark.parametrize("pool, name", [(100, DISK), (None, RAM)])
def test_there_is_no_bound_where_nothing_is_pinned_in_ram(pool, name):
    queue = Queue(pool, name).burst(30, 40)
    assert all(queue.match(request)[0] for request in queue.waiting)
    assert queue.pins.bytes == 0


def test_a_prompt_that_vllm_holds_waits_for_nobody():
    queue = Queue(100).burst(FEW + 2, 40)
    for request in queue.waiting[:-1]:
        queue.match(request)
    assert queue.match(queue.waiting[-1], 40 * N) == (0, False)


def answered(pins: Pins, request: LookupRequest, result: LookupResult) -> int:
    pins.ask(PendingLookup(request, 0.0))
    pins.answer(request.request_id, result)
    return pins.bytes


@pytest.mark.parametrize(
    "result, pinned",
    [
        (LookupResult(6, 6, ((RAM, 4),)), 4 + ENDS),  # from the floor on
        (LookupResult(6, 6, ((RAM, 3), (DISK, 1))), 3),
        (LookupResult(6, 6, ((DISK, 3), (RAM, 1))), 1 + ENDS),
        (LookupResult(5, 6, ((RAM, 4),), tail=4), 4 + ENDS),
        (MISS, 0),
    ],
)
def test_what_is_counted(result, pinned):
    prefix = make_prefix(8).with_inner({5 * N + 4: b"inner"})
    request = LookupRequest("r", prefix, 8, floor=2)
    assert answered(pins_of(100), request, result) == pinned


def test_tags_keep_records_apart():
    pins, result = pins_of(100), LookupResult(6, 6, ((RAM, 6),))
    for number, prefix in enumerate([make_prefix(6)] * 2 + [make_prefix(6, tags=(("a", "b"),))]):
        answered(pins, LookupRequest(str(number), prefix, 6, 0), result)
    assert pins.bytes == 2 * (6 + ENDS)


def test_windows_count_with_their_boundary():
    request = LookupRequest("r", make_prefix(8), 8, 0)
    pins = pins_of(100, WINDOWS)
    assert answered(pins, request, LookupResult(6, 6, ((RAM, 6),))) == 6 + 2


def test_the_bound_of_an_unanswered_lookup_has_its_tail():
    prefix = Prefix(make_prefix(4).hashes, inner={4 * N + 8: b"inner"})
    pins = pins_of(100)
    pins.ask(PendingLookup(LookupRequest("r", prefix, 4, 1, limit_tail=8), 0.0))
    assert pins.bytes == 3 + 1 + ENDS


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves(seed):
    """Any sizes, answers and blocks; some requests are aborted, some come with priority."""
    chance, later = random.Random(seed), Later()
    queue = Queue(chance.choice([1, 40, 200]), later=later)
    for number in range(60):
        queue.add(str(number), chance.randint(1, 30), stored=chance.random() < 0.7)
        if chance.random() < 0.2:
            queue.waiting.insert(0, queue.waiting.pop())
        if chance.random() < 0.1:
            queue.scheduler.request_finished(
                queue.waiting.pop(chance.randrange(len(queue.waiting)))
            )
        later.run(chance.randrange(4))
        queue.schedule(room=chance.randrange(3))
    passes = 2 * len(queue.waiting) + 2
    for _ in range(passes):
        head = queue.waiting[:1]
        queue.schedule(room=chance.randrange(3))
        later.run()
        assert not head or head[0].request_id in queue.asked
        if queue.waiting:
            queue.schedule(room=1)
    assert not queue.waiting, "some request is never looked up"
    queue.step()
    assert queue.pins.bytes == queue.pinned == 0


@pytest.fixture
def scheduler_of(monkeypatch):
    """Makes the scheduler side of a connector, without its ranks."""

    def make(lmcache, **parallel):
        monkeypatch.setattr(connector, "load_lmcache_config", lambda *_, **__: lmcache)
        asking = SimpleNamespace(ask=0, contents=0, drop=0, keep=0)
        monkeypatch.setattr(connector, "LookupClient", lambda *args: asking)
        monkeypatch.setattr(connector.HybridConnector, "_start_lmcache", lambda *args: None)
        config, groups = engine_config("lfm2"), cache_config(FULL, STATE_SPEC)
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        made = connector.HybridConnector(config, KVConnectorRole.SCHEDULER, groups)
        made._queue.close()
        return made.scheduler, groups

    return make


@pytest.mark.parametrize(
    "parallel, batches",
    [({}, 1), ({"data_parallel_size": 2}, math.inf), ({"pipeline_parallel_size": 2}, 3)],
)
def test_how_many_empty_steps_show_that_nothing_is_computed(scheduler_of, parallel, batches):
    empty = scheduler_of(lmcache_config(), **parallel)[0].idle_steps
    assert (empty._batches, empty.alone) == (batches, batches < math.inf)


@pytest.mark.parametrize("local_cpu, most", [(True, 3 << 30), (False, math.inf)])
def test_the_pool_is_that_of_a_rank(scheduler_of, local_cpu, most):
    scheduler, groups = scheduler_of(lmcache_config(local_cpu=local_cpu, max_local_cpu_size=6.0))
    pins = scheduler._lookups._pins
    assert pins._most == most
    if local_cpu:
        sizes = [page_bytes(group) for group in groups.kv_cache_groups]
        assert [pins._page_bytes, pins._end_bytes] == sizes
