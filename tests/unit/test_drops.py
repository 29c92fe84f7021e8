# SPDX-License-Identifier: Apache-2.0
"""A request with ``lmcache.drop`` removes the records of its own prompt, and says what it did."""

import pytest
from vllm.lora.request import LoRARequest

from lmcache_hybrid.protocol.drop import DropResult
from lmcache_hybrid.protocol.hit_records import block_keys
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler import drops
from lmcache_hybrid.scheduler.prompt import inner_hashes, prefix_of
from lmcache_hybrid.storage.drops import CLOSED, IN_USE

from .helpers import PLAN, Counted, Later, N, Ranks, fill, make_request, put, tags_of
from .scheduler_rig import Rig, all_offers

DROP = {"lmcache.drop": True}


def dropping(request_id: str = "d", tokens: int = 3 * N + 1, params: dict = DROP, **kwargs):  # noqa: B006
    return make_request(request_id, tokens, params=params, **kwargs)


def wait(rig: Rig, request, passes: int = 500) -> tuple[int | None, bool]:
    """Match until the drop has ended."""
    for _ in range(passes):
        found = rig.match(request)
        if found[0] is not None:
            return found
        rig.step()
    raise AssertionError("its drop does not end")


def end(rig: Rig, request) -> dict:
    answer = rig.scheduler.request_finished(request)
    assert not rig.scheduler._trackers
    return answer["lmcache.drop"]


def left(rig: Rig) -> list[int]:
    """Boundaries of the records in the first rank's store."""
    return sorted({key.boundary // N for key in rig.ranks.stores[0].records})


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_records_of_a_prompt_are_removed_on_every_rank(ranks):
    rig, request = Rig(ranks), dropping()
    rig.holds(request, 3, 1, 3)
    assert rig.match(request) == (None, False), "its request is admitted before it"
    assert rig.step().step == 1, "no rank is told that earlier steps have saved"
    assert wait(rig, request) == (0, False)
    assert rig.scheduler._drops._turn is None, "the next drop frees its hashes"
    assert not any(store.records for store in rig.ranks.stores)
    assert rig.forward(request, 3 * N + 1, all_offers(3)) is None, "it is stored again"
    records = ranks * (3 + 2 * len(PLAN.states))
    assert end(rig, request) == {"removed": {"naive": records}}
    assert rig.scheduler.counts.drops == {"done": 1}
    assert rig.scheduler.counts.skipped_requests == {"skip_save": 1}


def test_a_request_that_vllm_does_not_let_wait_is_refused():
    rig, request = Rig(), dropping()
    request.skip_reading_prefix_cache = True
    rig.holds(request, 3, 3)
    assert rig.match(request) == (0, False)
    assert end(rig, request) == {"error": drops.NEVER_WAITS}
    assert not rig.ranks.drops and left(rig)
    assert rig.scheduler.counts.drops == {"refused": 1}


def test_ranks_are_asked_only_once_earlier_steps_have_saved():
    """This pass may still schedule saves of the prompt."""
    rig, request = Rig(), dropping()
    rig.step()
    rig.match(request)
    assert {asked.step for asked in rig.ranks.drops} == {3}
    assert [rig.step().step, rig.step().step] == [2, 3]


def test_a_step_without_drops_says_nothing_of_it():
    rig = Rig()
    assert rig.step({"r": 1}) == NOTHING


@pytest.mark.parametrize(
    "start, kept", [(0, []), (1, []), (N - 1, []), (N, [1]), (2 * N - 1, [1]), (2 * N, [1, 2])]
)
def test_records_that_end_before_an_offset_stay(start, kept):
    rig, request = Rig(), dropping(params=DROP | {"lmcache.drop_from": start})
    rig.holds(request, 3, 1, 2, 3)
    gain, _ = wait(rig, request)
    assert left(rig) == kept
    assert gain == len(kept) * N, "what stays is not loaded"


def test_what_others_have_of_another_salt_adapter_or_tag_stays():
    rig = Rig()
    other = [
        make_request("salt", cache_salt="theirs"),
        make_request("tag", params={"lmcache.tag.user": "them"}),
        make_request("longer", 5 * N + 1),
        make_request("else", [7] * (3 * N + 1)),
    ]
    for request in other:
        rig.holds(request, 3, 3)
    before = set(rig.ranks.stores[0].records)
    own = dropping(cache_salt="mine")
    rig.holds(own, 3, 3)
    wait(rig, own)
    assert set(rig.ranks.stores[0].records) == before
    assert end(rig, own)["removed"]["naive"] == 3 + len(PLAN.states)
    tagged = dropping("t", params=DROP | {"lmcache.tag.user": "me"})
    wait(rig, tagged)
    assert end(rig, tagged) == {"removed": {}}
    assert set(rig.ranks.stores[0].records) == before


def test_a_longer_prompt_loses_only_what_it_shares():
    rig = Rig()
    longer = make_request("longer", 5 * N + 1)
    rig.holds(longer, 5, 3, 5)
    wait(rig, dropping())
    assert left(rig) == [4, 5]
    assert rig.match(longer) == (0, False), "a hit without its first pages"


def test_boundaries_inside_a_block_are_removed_too():
    plan, unit = PLAN.with_unit(4), 4
    rig, request = (
        Rig(plan=plan, hash_block_size=unit),
        dropping(tokens=2 * N + 9, hash_block_size=unit),
    )
    prefix = prefix_of(request, N, N // unit, tags_of(request))
    inside = (4, N + 8, 2 * N + 4, 2 * N + 8)
    prefix = prefix.with_inner(inner_hashes(request, inside, plan))
    store = rig.ranks.stores[0]
    keys = [key for block in range(3) for key in block_keys(prefix, block, plan)]
    put(store, keys)
    assert {key.boundary for key in keys} == {N, 2 * N, *inside}
    wait(rig, request)
    assert not store.records


@pytest.mark.parametrize("blocks", [20, 200])
def test_the_prompt_s_length_makes_no_difference_to_the_scheduler(blocks):
    """The ranks' thread takes the hashes of all its boundaries."""
    later = Later()
    plan = PLAN.with_unit(4)
    rig = Rig(Ranks(1, plan, later), plan=plan, hash_block_size=4)
    request = dropping(tokens=blocks * N + 1, hash_block_size=4)
    request.block_hashes = hashes = Counted(request.block_hashes)
    assert rig.match(request) == (None, False)
    assert hashes.reads == 1, "more than its blocks' hashes at once"
    later.run()
    assert hashes.reads >= blocks


def test_beside_a_drafter_the_last_boundary_may_have_no_hash():
    """vLLM 0.33: it covers the next token, which is not known yet."""
    rig = Rig(plan=PLAN.with_unit(4), hash_block_size=4)
    request = dropping(tokens=2 * N + 8, hash_block_size=4)
    request.block_hashes.pop()
    wait(rig, request)
    assert end(rig, request) == {"removed": {}}


def test_an_adapter_s_records_are_found_by_its_content():
    lora = LoRARequest("adapter", 1, "/adapter")
    rig, request = Rig(2), dropping(lora=lora)
    prefix = prefix_of(request, N, 1, ()).computed_with(rig.ranks.contents)
    for store in rig.ranks.stores:
        fill(store, prefix, 3, (3,))
    wait(rig, request)
    assert not any(store.records for store in rig.ranks.stores)


def test_an_adapter_that_a_rank_does_not_know_is_refused():
    rig, request = Rig(2), dropping(lora=LoRARequest("adapter", 1, "/adapter"))
    rig.ranks.contents = (b"known", b"")
    wait(rig, request)
    assert end(rig, request) == {"removed": {}, "error": drops.UNKNOWN_ADAPTER}


@pytest.mark.parametrize("state", ["offered", "loading"])
def test_what_another_request_loads_or_was_promised_stays(state):
    rig, loads, request = Rig(2), make_request("loads"), dropping()
    rig.holds(loads, 3, 3)
    records = len(rig.ranks.stores[1].records)
    if state == "loading":
        rig.admit(loads)
    else:
        assert rig.match(loads)[0] == 3 * N
    assert wait(rig, request)[0] == 3 * N, "it may load them as well"
    assert [len(store.records) for store in rig.ranks.stores] == [records] * 2
    rig.scheduler.request_finished(loads)
    rig.loaded(loads)
    rig.step()
    answer = rig.scheduler.request_finished(request)["lmcache.drop"]
    assert answer == {"removed": {}, "error": IN_USE}
    assert rig.scheduler.counts.drops == {"refused": 1}
    rig.step()
    again = dropping("again")
    wait(rig, again)
    assert not any(store.records for store in rig.ranks.stores)


def test_what_another_request_loads_before_the_offset_is_not_in_use():
    rig, loads = Rig(), make_request("loads", 2 * N + 1)
    request = dropping(params=DROP | {"lmcache.drop_from": 2 * N})
    rig.holds(request, 3, 2, 3)
    rig.admit(loads)
    wait(rig, request)
    assert left(rig) == [1, 2]


BAD = [
    ({"lmcache.drop": "maybe"}, "lmcache.drop='maybe' is neither true nor false"),
    ({"lmcache.drop": 2026}, "lmcache.drop=2026 is neither true nor false"),
    ({"lmcache.drop": [True]}, "lmcache.drop=[True] is neither true nor false"),
    (DROP | {"lmcache.drop_from": -1}, "lmcache.drop_from=-1 is not a number of tokens"),
    (DROP | {"lmcache.drop_from": "all"}, "lmcache.drop_from='all' is not a number of tokens"),
    (DROP | {"lmcache.drop_from": 1.5}, "lmcache.drop_from=1.5 is not a number of tokens"),
    (DROP | {"lmcache.drop_from": True}, "lmcache.drop_from=True is not a number of tokens"),
    (DROP | {"lmcache.drop_from": 10**6}, "lies past the prompt of 49 tokens"),
    (DROP | {"lmcache.drop_from": 3 * N + 1}, "lies past the prompt of 49 tokens"),
    ({"lmcache.drop_from": 0}, "lmcache.drop_from does nothing without lmcache.drop"),
    ({"lmcache.drop": False, "lmcache.drop_from": 4}, "does nothing without lmcache.drop"),
    (DROP | {"lmcache.tag.user": 1.5}, "this prompt is never cached"),
]


@pytest.mark.parametrize("params, says", BAD, ids=lambda each: str(each)[:40])
def test_what_cannot_be_done_is_said_to_the_client_and_removes_nothing(params, says):
    rig, request = Rig(), dropping(params=params)
    rig.holds(make_request(), 3, 3)
    before = set(rig.ranks.stores[0].records)
    assert rig.match(request)[0] is not None, "it waits for nothing"
    assert not rig.ranks.drops
    answer = end(rig, request)
    assert says in answer["error"] and "removed" not in answer
    assert set(rig.ranks.stores[0].records) == before
    assert rig.scheduler.counts.drops == {"refused": 1}


@pytest.mark.parametrize("value", [False, "false", 0, None])
def test_a_request_that_says_no_is_like_any_other(value):
    rig, request = Rig(), dropping(params={"lmcache.drop": value})
    rig.holds(request, 3, 3)
    assert rig.match(request) == (3 * N, True)
    assert rig.scheduler.request_finished(request) is None


def test_a_request_that_asks_for_nothing_gets_no_answer():
    rig, request = Rig(), make_request()
    rig.match(request)
    assert rig.scheduler.request_finished(request) is None
    assert rig.scheduler.request_finished(request) is None


def test_a_prompt_too_short_for_a_record_has_none():
    rig, request = Rig(), dropping(tokens=N - 1)
    assert rig.match(request) == (0, False)
    assert end(rig, request) == {"removed": {}}
    assert not rig.ranks.drops


def test_a_rank_that_does_not_answer_fails_it():
    rig, request = Rig(2), dropping()
    rig.ranks.silent = True
    wait(rig, request)
    assert end(rig, request)["error"] == drops.UNANSWERED
    assert rig.scheduler.counts.drops == {"failed": 1}


def test_a_backend_that_fails_fails_it():
    rig, request = Rig(), dropping()
    rig.ranks.queue.drop = lambda asked: [DropResult(failure="Redis is away.")]
    wait(rig, request)
    assert end(rig, request) == {"removed": {}, "error": "Redis is away."}


def test_an_unexpected_error_fails_it(lenient):
    rig, request = Rig(), dropping()
    rig.ranks.queue.drop = lambda asked: 1 / 0
    wait(rig, request)
    assert end(rig, request)["error"] == drops.UNEXPECTED
    assert lenient == {"drop_records": 1}


def test_writes_in_flight_are_waited_for_and_not_for_ever(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drops.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(drops.time, "sleep", lambda seconds: None)
    rig, request = Rig(), dropping()
    rig.ranks.queue.drop = lambda asked: [DropResult(waits=True)]
    for _ in range(10):
        assert rig.match(request) == (None, False)
        now[0] += 1.0
        rig.step()
    now[0] += drops.DROP_SECONDS
    wait(rig, request)
    assert end(rig, request)["error"] == drops.LATE


def test_a_rank_that_waits_has_its_claims_looked_for_again():
    """Lookups come between two calls: what they claim must not be removed."""
    rig, request = Rig(2), dropping()
    rig.holds(request, 3, 3)
    drop, busy, asked = rig.ranks.drop, [True], []

    def they_wait(call):
        asked.append(call.block)
        if call.block is None or not busy[0]:
            return drop(call)
        return [DropResult(waits=True), DropResult(waits=True)]

    rig.ranks.queue.drop = they_wait
    for _ in range(100):
        assert rig.match(request) == (None, False)
        rig.step()
    assert asked[-1] == 0, "no rank was asked to remove anything"
    loads = make_request("loads")
    assert rig.match(loads)[0] == 3 * N
    busy[0] = False
    wait(rig, request)
    rig.scheduler.request_finished(loads)
    assert rig.scheduler.request_finished(request)["lmcache.drop"]["error"] == IN_USE


def test_a_store_that_is_closed_half_way_does_not_count_as_untouched():
    rig, request, begun = Rig(2), dropping(tokens=6 * N + 1), []

    def closing(call):
        if call.block is None:
            return [DropResult(), DropResult()]
        begun.append(call.block)
        if len(begun) == 1:
            return [DropResult(2, {"naive": 4}), DropResult(waits=True)]
        return [DropResult(refusal=CLOSED)] * 2

    rig.ranks.queue.drop = closing
    wait(rig, request)
    assert end(rig, request) == {"removed": {"naive": 4}, "error": drops.STOPPED}
    assert rig.scheduler.counts.drops == {"failed": 1}


def test_drops_are_done_one_after_the_other():
    """Else lookups of others would wait for all of them."""
    later = Later()
    rig = Rig(Ranks(1, executor=later))
    first, second = dropping("first"), dropping("second")
    for request in (first, second, first, second):
        assert rig.match(request) == (None, False)
    assert len(later.waiting) == 1
    rig.scheduler.request_finished(first)  # it asks no more
    rig.ranks.begun = 99
    for _ in range(5):
        later.run()
        rig.match(second)
        rig.step()
    assert end(rig, second) == {"removed": {}}
    assert {call.start for call in rig.ranks.drops} == {0} and len(rig.ranks.drops) == 4


def test_no_drop_waits_longer_than_its_time_however_many_come_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drops.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(drops.time, "sleep", lambda seconds: None)
    rig, requests = Rig(), [dropping(f"drop {number}") for number in range(3)]
    rig.ranks.queue.drop = lambda asked: [DropResult(waits=True)]
    for request in requests:  # a second apart
        assert rig.match(request) == (None, False)
        now[0] += 1.0
    answered = {}
    while len(answered) < len(requests):
        now[0] += 0.5
        assert now[0] < 2 * drops.DROP_SECONDS, "a drop waits for those before it"
        for request in requests:
            if request.request_id not in answered and rig.match(request)[0] is not None:
                answered[request.request_id] = now[0]
        rig.step()
    late = {
        name: at - asked - drops.DROP_SECONDS for asked, (name, at) in enumerate(answered.items())
    }
    assert list(answered) == ["drop 0", "drop 1", "drop 2"]
    assert all(0 < seconds <= 1 for seconds in late.values()), late
    assert rig.scheduler.counts.drops == {"failed": 3}
    for request in requests:
        assert "repeat it" in rig.scheduler.request_finished(request)["lmcache.drop"]["error"]


def test_a_drop_that_never_began_says_that_nothing_was_removed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drops.time, "monotonic", lambda: now[0])
    later = Later()
    rig = Rig(Ranks(executor=later))
    rig.ranks.begun = 99
    first, second, third = (dropping(name) for name in ("first", "second", "third"))
    for request in (first, second, third):
        assert rig.match(request) == (None, False)
        now[0] += 5.0
    while rig.scheduler._trackers["third"].drop.pending is None:  # vLLM asks for it first
        later.run()
        rig.match(third)
    now[0] = drops.DROP_SECONDS + 6.0
    rig.match(second)
    answer = rig.scheduler.request_finished(second)["lmcache.drop"]
    assert answer == {"removed": {}, "error": drops.BEHIND_OTHERS}
    assert rig.scheduler.counts.drops == {"failed": 1}
    assert rig.scheduler._trackers["third"].drop.answer is None


def test_a_drop_of_many_records_ends_in_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drops.time, "monotonic", lambda: now[0])
    rig, request = Rig(), dropping(tokens=40 * N)
    blocks = iter(range(1, 40))

    def one_block(asked):
        now[0] += 1.0
        return [DropResult(0 if asked.block is None else next(blocks), {"naive": 1})]

    rig.ranks.queue.drop = one_block
    wait(rig, request)
    answer = end(rig, request)
    assert answer["error"] == drops.LATE and answer["removed"]["naive"] > 20


def test_a_drop_whose_call_is_not_answered_ends_in_time_and_removes_nothing_later(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drops.time, "monotonic", lambda: now[0])
    later = Later()
    rig, request = Rig(Ranks(executor=later)), dropping()
    rig.holds(request, 3, 3)
    assert rig.match(request) == (None, False)
    now[0] += drops.DROP_SECONDS + 1
    rig.match(request)
    later.run()
    rig.match(request)
    assert end(rig, request) == {"removed": {}, "error": drops.LATE}
    assert rig.ranks.stores[0].records and not rig.ranks.drops


def test_calls_go_on_where_the_slowest_rank_is():
    rig, request, asked = Rig(2), dropping(tokens=6 * N + 1), []

    def a_few(request):
        asked.append(request.block)
        if request.block is None:
            return [DropResult(), DropResult()]
        return [DropResult(min(6, request.block + step), {"naive": 1}) for step in (1, 3)]

    rig.ranks.queue.drop = a_few
    wait(rig, request)
    assert asked == [None, 0, 1, 2, 3, 4, 5]
    assert end(rig, request) == {"removed": {"naive": 12}}


def test_others_are_looked_up_while_a_drop_waits():
    later = Later()
    rig = Rig(Ranks(1, executor=later))
    request, other = dropping(), make_request("other")
    rig.holds(other, 3, 3)
    rig.ranks.begun = 2
    assert rig.match(request) == (None, False)
    assert rig.match(other) == (None, False)
    later.run(1)
    assert not rig.ranks.stores[0].records
    assert rig.match(other) == (None, False)
    later.run()
    assert rig.match(other) == (0, False)


@pytest.mark.parametrize("how", ["ends", "reset"])
def test_a_request_that_ends_during_its_drop_leaves_nothing_behind(how):
    later = Later()
    rig = Rig(Ranks(1, executor=later))
    request = dropping()
    rig.match(request)
    if how == "reset":
        rig.scheduler.begin_reset()
        assert end(rig, request)["error"]
    else:
        assert end(rig, request) == {"error": drops.UNFINISHED}
    later.run()
    assert [rig.step().step, rig.step().step] == [1, 2]
    assert rig.step({"r": 1}) == NOTHING


def test_a_preempted_request_drops_once():
    rig, request = Rig(), dropping()
    wait(rig, request)
    calls = len(rig.ranks.drops)
    rig.scheduler.update_state_after_alloc(request, ([], [], [], []), 0)
    rig.match(request)
    assert len(rig.ranks.drops) == calls


def test_a_drop_while_caches_are_reset_is_refused():
    rig, request = Rig(), dropping()
    rig.scheduler.begin_reset()
    assert rig.match(request) == (0, False)
    assert "are being reset" in end(rig, request)["error"]


def test_a_request_like_it_may_come_again():
    """The options of a request are its own."""
    rig = Rig()
    for name in ("one", "two"):
        request = dropping(name)
        rig.holds(request, 3, 3)
        wait(rig, request)
        end(rig, request)
    assert rig.scheduler.counts.drops == {"done": 2}


def test_an_engine_that_stores_nothing_drops_too():
    rig, request = Rig(save=False), dropping()
    rig.holds(request, 3, 3)
    wait(rig, request)
    assert not rig.ranks.stores[0].records
