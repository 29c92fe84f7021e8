# SPDX-License-Identifier: Apache-2.0
"""A request with ``lmcache.keep`` has its prompt evicted last, waits for nothing, and is told."""

import time

import pytest
from vllm.lora.request import LoRARequest

from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.scheduler import keeps
from lmcache_hybrid.scheduler.prompt import inner_hashes, prefix_of
from lmcache_hybrid.storage.keep_shares import OF_SALT, KeptNames
from lmcache_hybrid.storage.record_format import record_bytes

from .helpers import PLAN, Counted, Later, N, Ranks, make_request, put, tags_of
from .scheduler_rig import Rig, all_offers, table
from .worker_rig import PREFIX
from .worker_rig import Rig as WorkerRig

KEEP = {"lmcache.keep": 600}
STATES = len(PLAN.states)
RECORD = 1000  # bytes, of the ranks of these tests


def keeping(request_id: str = "k", tokens: int = 3 * N + 1, params: dict = KEEP, **kwargs):  # noqa: B006
    return make_request(request_id, tokens, params=params, **kwargs)


def compute(rig: Rig, request) -> None:
    """Match without a hit, then compute and store the prompt in one step."""
    assert rig.match(request)[0] == 0
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    last = (request.num_tokens - 1) // N
    offers = [] if rig.scheduler._trackers[request.request_id].skip_save else all_offers(last)
    rig.forward(request, request.num_tokens, offers)


def end(rig: Rig, request) -> dict:
    answer = rig.scheduler.request_finished(request)
    return answer["lmcache.keep"]


def kept(rig: Rig, rank: int = 0) -> dict[int, set[int]]:
    """Blocks whose pages are kept, and boundaries whose states are."""
    names = rig.ranks.stores[rank].kept["naive"]._names
    return {
        kind: {key.boundary // N for key in names if key.kind == kind}
        for kind in (ATTENTION, STATE)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_prompt_is_stored_and_kept_at_once(ranks):
    rig, request = Rig(ranks), keeping()
    assert rig.match(request) == (0, False), "it waits"
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.forward(request, 3 * N + 1, all_offers(3)) is not None, "it is not stored"
    assert end(rig, request) == {"kept": {"naive": 3 * N}, "stored": 0, "seconds": 600}
    for rank in range(ranks):
        assert kept(rig, rank) == {ATTENTION: {1, 2, 3}, STATE: {3}}
        assert rig.ranks.stores[rank].kept["naive"].size == (3 + STATES) * RECORD
    assert rig.scheduler.counts.keeps == {"done": 1}
    assert rig.ranks.num_claims == [0] * ranks and not rig.ranks.pins


@pytest.mark.parametrize("states", [(2,), (1, 2), (1, 2, 3)])
def test_what_is_stored_is_kept_with_the_states_of_its_deepest_hit(states):
    rig, request = Rig(2), keeping(params=KEEP | {"lmcache.skip_save": True})
    rig.holds(request, 3, *states)
    rig.admit(request)
    deepest = max(states)
    answer = {"kept": {"naive": deepest * N}, "stored": deepest * N, "seconds": 600}
    assert end(rig, request) == answer
    assert kept(rig) == {ATTENTION: set(range(1, deepest + 1)), STATE: {deepest}}
    rig.loaded(request)
    assert not rig.ranks.pins


def test_ranks_that_disagree_keep_what_both_have():
    rig, request = Rig(2), keeping(params=KEEP | {"lmcache.skip_save": True})
    rig.holds(request, 3, 1, 2)
    for key in [key for key in rig.ranks.stores[1].records if key.boundary == 2 * N]:
        rig.ranks.stores[1].discard(key)
    rig.admit(request)
    assert end(rig, request)["kept"] == {"naive": N}
    assert kept(rig) == kept(rig, 1) == {ATTENTION: {1}, STATE: {1}}


def test_only_what_ends_before_keep_to_is_kept_and_a_step_ends_there():
    """Its first request stores a state there, so that other prompts can go on from it."""
    rig, request = Rig(), keeping(tokens=5 * N + 1, params=KEEP | {"lmcache.keep_to": 3 * N - 1})
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    rig.step({"k": N}, {"k": table(request)})
    assert request.shared_prefix_boundary == 2 * N
    request.num_computed_tokens = N
    assert rig.forward(request, N, all_offers(2)) is not None
    assert end(rig, request)["kept"] == {"naive": 2 * N}
    assert kept(rig) == {ATTENTION: {1, 2}, STATE: {2}}


def test_a_prompt_that_starts_past_keep_to_keeps_what_is_stored_before_it():
    rig, request = Rig(), keeping(tokens=5 * N + 1, params=KEEP | {"lmcache.keep_to": 2 * N})
    rig.holds(request, 3, 1, 3)
    rig.admit(request)
    assert end(rig, request) == {"kept": {"naive": N}, "stored": N, "seconds": 600}
    assert kept(rig) == {ATTENTION: {1}, STATE: {1}}


def test_a_boundary_inside_a_block_is_kept_where_it_is_stored():
    plan = PLAN.with_unit(4)
    rig = Rig(plan=plan, hash_block_size=4)
    request = keeping(tokens=N + 9, hash_block_size=4, params=KEEP | {"lmcache.skip_save": True})
    prefix = prefix_of(request, N, N // 4, tags_of(request))
    prefix = prefix.with_inner(inner_hashes(request, (N + 8,), plan))
    put(rig.ranks.stores[0], load_keys(prefix, 0, 1, plan, tail=8))
    tokens, _ = rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    assert end(rig, request)["kept"] == {"naive": N + 8}
    assert set(rig.ranks.stores[0].kept["naive"]._names) == set(rig.ranks.stores[0].records)


BAD = [
    (
        {"lmcache.keep": -1},
        "lmcache.keep=-1 is not a number of seconds; write a number up to 86400",
    ),
    ({"lmcache.keep": 365 * 86400}, "lmcache.keep=31536000 is not a number of seconds"),
    ({"lmcache.keep": "1h"}, "lmcache.keep='1h' is not a number of seconds"),
    ({"lmcache.keep": "60"}, "lmcache.keep='60' is not a number of seconds"),
    ({"lmcache.keep": True}, "lmcache.keep=True is not a number of seconds"),
    ({"lmcache.keep": float("nan")}, "lmcache.keep=nan is not a number of seconds"),
    ({"lmcache.keep": [60]}, "lmcache.keep=[60] is not a number of seconds"),
    (
        KEEP | {"lmcache.keep_to": 10**6},
        "lmcache.keep_to=1000000 lies past the prompt of 49 tokens",
    ),
    (KEEP | {"lmcache.keep_to": -1}, "lmcache.keep_to=-1 is not a number of tokens"),
    (KEEP | {"lmcache.keep_to": 0}, "lmcache.keep_to=0 is not a number of tokens"),
    (KEEP | {"lmcache.keep_to": "all"}, "lmcache.keep_to='all' is not a number of tokens"),
    (KEEP | {"lmcache.keep_to": N - 1}, keeps.SHORT),
    ({"lmcache.keep_to": 4}, "lmcache.keep_to does nothing without lmcache.keep"),
    (KEEP | {"lmcache.tag.user": 1.5}, "this prompt is never cached"),
    (KEEP | {"lmcache.drop": True}, "write lmcache.drop or lmcache.keep, not both."),
    (KEEP | {"lmcache.prefetch": True}, "write lmcache.prefetch or lmcache.keep, not both."),
    ({"lmcache.keep": -1, "lmcache.drop": True}, "write lmcache.drop or lmcache.keep, not both."),
]


@pytest.mark.parametrize("params, says", BAD, ids=lambda each: str(each)[:40])
def test_what_cannot_be_done_is_said_to_the_client_and_keeps_nothing(params, says):
    rig, request = Rig(), keeping(params=params)
    rig.holds(make_request(), 3, 3)
    before = set(rig.ranks.stores[0].records)
    tokens, _ = rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    answer = rig.scheduler.request_finished(request)
    assert set(answer["lmcache.keep"]) == {"error"} and says in answer["lmcache.keep"]["error"]
    assert not rig.ranks.keeps and not rig.ranks.drops
    assert set(rig.ranks.stores[0].records) == before
    assert rig.scheduler.counts.keeps == {"refused": 1}


def test_a_share_of_0_keeps_nothing():
    rig, request = Rig(keep_share=0), keeping()
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.OFF} and not rig.ranks.keeps


def test_nothing_is_kept_of_a_prompt_that_is_neither_stored_nor_saved():
    rig, request = Rig(), keeping(params=KEEP | {"lmcache.skip_save": True})
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.NOTHING}
    assert kept(rig) == {ATTENTION: set(), STATE: set()}


def test_another_salt_s_records_are_neither_kept_nor_seen():
    rig, theirs = Rig(), make_request("theirs", cache_salt="theirs")
    rig.holds(theirs, 3, 3)
    request = keeping(params=KEEP | {"lmcache.skip_save": True}, cache_salt="mine")
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.NOTHING}
    names = rig.ranks.stores[0].kept["naive"]._names
    stored = keeping("stored", cache_salt="mine")
    compute(rig, stored)
    assert end(rig, stored)["stored"] == 0, "it says what another salt has stored"
    assert names and not set(names) & set(rig.ranks.stores[0].records)


def fits(rig: Rig, records: int) -> None:
    """Let one salt keep so many records on every rank."""
    for store in rig.ranks.stores:
        store.kept = {"naive": KeptNames(round(records * RECORD / OF_SALT / 0.25))}


def test_a_share_that_is_full_is_an_error_and_nothing_is_kept():
    rig = Rig(2)
    fits(rig, 3 + STATES)
    rig.ranks.stores[0].kept = {"naive": KeptNames(1 << 40)}  # nor on a rank that has room
    first = keeping("first", cache_salt="a")
    compute(rig, first)
    assert "kept" in end(rig, first)
    other = keeping("other", [7] * (3 * N + 1), cache_salt="a")
    before = [kept(rig, rank) for rank in (0, 1)]
    compute(rig, other)
    assert "this cache_salt would keep 0.0 MB" in end(rig, other)["error"]
    assert [kept(rig, rank) for rank in (0, 1)] == before
    again = keeping("again", cache_salt="a")
    compute(rig, again)
    assert "kept" in end(rig, again), "its own records are counted twice"
    theirs = keeping("theirs", cache_salt="b")
    compute(rig, theirs)
    assert "kept" in end(rig, theirs), "one salt takes another's share"
    assert rig.scheduler.counts.keeps == {"done": 3, "refused": 1}


def test_a_full_backend_does_not_keep_another_from_it():
    rig, request = Rig(), keeping()
    rig.ranks.stores[0].kept = {"RAM": KeptNames(10), "disk": KeptNames(1 << 40)}
    compute(rig, request)
    answer = end(rig, request)
    assert answer["kept"] == {"disk": 3 * N}
    assert "all requests without a cache_salt would keep" in answer["full"]["RAM"]
    assert not rig.ranks.stores[0].kept["RAM"]


def test_stores_that_evict_by_themselves_keep_nothing_and_it_is_said():
    rig, request = Rig(), keeping()
    rig.ranks.stores[0].kept = {}
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.NO_BACKEND}


def test_0_seconds_end_a_keep():
    rig = Rig()
    compute(rig, keeping("a", 5 * N + 1))
    assert kept(rig) == {ATTENTION: {1, 2, 3, 4, 5}, STATE: {5}}
    request = keeping("b", 5 * N + 1, {"lmcache.keep": 0, "lmcache.keep_to": 3 * N})
    rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert end(rig, request) == {"kept": {}}
    assert kept(rig) == {ATTENTION: {4, 5}, STATE: {5}}


def test_an_adapter_s_records_are_kept_under_its_content():
    rig, request = Rig(2), keeping(lora=LoRARequest("adapter", 1, "/adapter"))
    compute(rig, request)
    assert end(rig, request)["kept"] == {"naive": 3 * N}
    names = rig.ranks.stores[1].kept["naive"]._names
    prefix = prefix_of(request, N, 1, ()).computed_with(rig.ranks.contents)
    assert names and all(key.tags == prefix.tags for key in names)
    unknown = keeping("u", lora=LoRARequest("other", 2, "/other"))
    rig.ranks.contents = (b"known", b"")
    compute(rig, unknown)
    assert end(rig, unknown) == {"error": keeps.UNKNOWN_ADAPTER}
    assert rig.scheduler.counts.keeps == {"done": 1, "failed": 1}


def test_an_adapter_that_changes_meanwhile_is_not_kept():
    rig, request = Rig(2), keeping(lora=LoRARequest("adapter", 1, "/adapter"))
    assert rig.match(request) == (0, False)
    rig.ranks.contents = (b"other", b"weights")
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    rig.forward(request, 3 * N + 1, all_offers(3))
    assert end(rig, request) == {"error": keeps.UNKNOWN_ADAPTER}
    assert not rig.ranks.stores[0].kept["naive"].size


def test_a_rank_that_does_not_answer_fails_it():
    rig, request = Rig(2), keeping()
    rig.ranks.queue.keep = lambda asked: []
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.UNANSWERED}
    rig.ranks.queue.keep = lambda asked: [KeepResult(), KeepResult(failure="No store.")]
    other = keeping("o")
    compute(rig, other)
    assert end(rig, other) == {"error": "No store."}
    assert rig.scheduler.counts.keeps == {"failed": 2}


def test_an_unexpected_error_fails_it(lenient):
    rig, request = Rig(), keeping()
    rig.ranks.queue.keep = lambda asked: 1 / 0
    compute(rig, request)
    assert end(rig, request) == {"error": keeps.UNEXPECTED}
    assert lenient == {"keep_records": 1}


def test_neither_the_scheduler_nor_the_request_waits_for_the_ranks():
    later = Later()
    rig, request = Rig(Ranks(1, executor=later)), keeping()
    rig.match(request)
    later.run()
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert later.waiting and not rig.ranks.keeps, "it is asked on the scheduler's thread"
    assert rig.forward(request, 3 * N + 1, all_offers(3)) is not None
    assert end(rig, request) == {"error": keeps.UNFINISHED}
    later.run()
    assert kept(rig)[STATE] == {3}


def calls(rig: Rig) -> int:
    """How often keeps called the ranks."""
    found = [each for each in rig.ranks.questions if each.request_id.startswith("lmcache.keep")]
    return len(found) + len(rig.ranks.keeps)


def test_lookups_come_before_each_call_of_a_keep():
    """One thread calls the ranks for all."""
    later = Later()
    rig = Rig(Ranks(2, executor=later))
    requests = [keeping("k"), keeping("l", [7] * (3 * N + 1))]
    for request in requests:
        rig.match(request)
        later.run()
        assert rig.match(request) == (0, False)
    for request in requests:
        rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert len(later.waiting) == 1, "lookups wait for both keeps"
    for number in range(6):
        assert calls(rig) == number, "lookups wait for more than one call"
        others = [make_request(f"{each} {number}", [number] * (2 * N)) for each in "ab"]
        for other in others:
            assert rig.match(other) == (None, False)
        later.run(3)
        assert [rig.match(other) for other in others] == [(0, False)] * 2
        assert calls(rig) == number, "a keep came before lookups that waited"
        later.run(1)
    assert calls(rig) == 6 and not later.waiting
    for request in requests:
        rig.forward(request, 3 * N + 1, all_offers(3))
        assert end(rig, request)["kept"] == {"naive": 3 * N}


def test_a_reset_between_two_calls_of_a_keep_ends_it():
    later = Later()
    rig, request = Rig(Ranks(1, executor=later)), keeping()
    rig.match(request)
    later.run()
    rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    while len(rig.ranks.keeps) < 1:
        later.run(1)
    assert end(rig, request) == {"error": keeps.UNFINISHED}  # a reset does not know it any more
    rig.scheduler.begin_reset()
    later.run()
    assert not rig.ranks.stores[0].kept["naive"].size, "kept after the caches were emptied"
    assert rig.scheduler.counts.keeps == {"refused": 1}


def test_a_drop_between_two_calls_of_a_keep_ends_it():
    later = Later()
    rig, request = Rig(Ranks(1, executor=later)), keeping()
    rig.holds(request, 3, 3)
    rig.match(request)
    later.run()
    tokens, _ = rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    while len(rig.ranks.keeps) < 1:
        later.run(1)
    rig.ranks.queue.num_drops += 1
    later.run()
    assert end(rig, request) == {"error": keeps.DROPPED}
    assert not rig.ranks.stores[0].kept["naive"].size
    assert rig.scheduler.counts.keeps == {"refused": 1}


# Requests that end before they have stored what they promised


def begin(rig: Rig, request) -> None:
    """Admit it: what it asks is kept, and nothing is computed."""
    tokens, _ = rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_aborted_request_has_not_stored_is_kept_no_longer(ranks):
    rig, request = Rig(ranks), keeping()
    begin(rig, request)
    assert kept(rig, ranks - 1) == {ATTENTION: {1, 2, 3}, STATE: {3}}
    assert end(rig, request) == {"error": keeps.UNSTORED}
    for rank in range(ranks):
        assert kept(rig, rank) == {ATTENTION: set(), STATE: set()}
        assert rig.ranks.stores[rank].kept["naive"].size == 0
        rig.ranks.stores[rank].kept["naive"].check_integrity()


def test_a_broken_keep_that_a_rank_does_not_end_is_warned_of(hybrid_log):
    rig, request = Rig(), keeping()
    begin(rig, request)
    rig.ranks.queue.keep = lambda asked: [KeepResult(failure="Busy.")]
    assert end(rig, request) == {"error": keeps.UNSTORED}
    assert "could end a keep: what a request has not stored is kept" in hybrid_log.text


def test_what_an_aborted_request_has_stored_or_found_stays_kept():
    rig, request = Rig(), keeping(tokens=5 * N + 1)
    rig.holds(request, 1, 1)
    begin(rig, request)
    rig.loaded(request)
    request.num_computed_tokens = N
    assert kept(rig) == {ATTENTION: {1, 2, 3, 4, 5}, STATE: {1, 5}}
    assert rig.forward(request, 2 * N) is not None
    end(rig, request)
    assert kept(rig) == {ATTENTION: {1, 2, 3}, STATE: {1}}


def test_what_was_found_stays_kept_where_its_load_failed():
    rig, request = Rig(), keeping(tokens=5 * N + 1)
    rig.holds(request, 2, 2)
    begin(rig, request)
    rig.loaded(request, failed=True)
    end(rig, request)
    assert kept(rig) == {ATTENTION: {1, 2}, STATE: {2}}


@pytest.mark.parametrize("seconds", [60, 3600])
@pytest.mark.parametrize("first", ["k", "other"])
@pytest.mark.parametrize("ends", ["k", "other"])
def test_what_another_request_keeps_stays_kept(seconds, first, ends):
    rig = Rig()
    requests = {"k": keeping(), "other": keeping("other", params={"lmcache.keep": seconds})}
    for name in sorted(requests, key=lambda name: name != first):
        request = requests[name]
        rig.match(request)
        rig.scheduler.prefills.forget("k")
        rig.match(request)
        rig.scheduler.update_state_after_alloc(request, table(request), 0)
    end(rig, requests.pop(ends))
    assert kept(rig) == {ATTENTION: {1, 2, 3}, STATE: {3}}
    end(rig, *requests.values())
    assert kept(rig) == {ATTENTION: set(), STATE: set()}, "two aborted requests take a share"


def test_what_is_kept_again_by_another_stays_kept():
    """The first keep has ended meanwhile."""
    rig, request, other = Rig(), keeping(), keeping("other", params=KEEP | {"lmcache.keep_to": N})
    begin(rig, request)
    rig.scheduler._trackers["k"].save = False  # it computes for a long time
    rig.ranks.stores[0].kept["naive"].clear()
    rig.scheduler.prefills.forget("k")
    begin(rig, other)
    assert kept(rig) == {ATTENTION: {1}, STATE: {1}}
    end(rig, request)
    assert kept(rig) == {ATTENTION: {1}, STATE: {1}}


def test_a_request_that_ends_before_it_is_kept_takes_no_share_later():
    later = Later()
    rig, request = Rig(Ranks(1, executor=later)), keeping()
    rig.match(request)
    later.run()
    begin(rig, request)
    assert end(rig, request) == {"error": keeps.UNFINISHED}
    later.run()
    assert len(rig.ranks.keeps) == 3
    assert kept(rig) == {ATTENTION: set(), STATE: set()}


def test_what_was_stored_once_stays_kept_after_a_preemption():
    """The lookup after it says nothing of boundaries before its hit."""
    rig, request = Rig(), keeping(tokens=6 * N + 1, params=KEEP | {"lmcache.keep_to": 2 * N})
    begin(rig, request)
    rig.forward(request, 2 * N, all_offers(2))
    rig.forward(request, N)
    request.num_computed_tokens = 0
    rig.holds(request, 3, 3)
    tokens, _ = rig.match(request)
    assert tokens == 3 * N
    rig.scheduler.update_state_after_alloc(request, table(request), tokens)
    rig.loaded(request)
    assert end(rig, request)["kept"] == {"naive": 2 * N}
    assert kept(rig) == {ATTENTION: {1, 2}, STATE: {2}}


def test_an_error_as_it_is_taken_back_is_counted(lenient):
    rig, request = Rig(), keeping()
    begin(rig, request)
    rig.ranks.queue.keep = lambda asked: 1 / 0
    end(rig, request)
    assert lenient == {"keep_records": 1}


@pytest.mark.parametrize("blocks", [20, 200])
def test_the_prompt_s_length_makes_no_difference_to_the_scheduler(blocks):
    """The ranks' thread takes the hashes of all its boundaries."""
    later = Later()
    plan = PLAN.with_unit(4)
    rig = Rig(Ranks(1, plan, later), plan=plan, hash_block_size=4)
    request = keeping(tokens=blocks * N + 1, hash_block_size=4)
    rig.match(request)
    later.run()
    rig.match(request)
    request.block_hashes = hashes = Counted(request.block_hashes)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert not hashes.reads
    later.run()
    assert hashes.reads >= blocks


def test_a_hint_costs_the_scheduler_less_than_50_microseconds():
    later = Later()
    rig = Rig(Ranks(1, executor=later))
    took = []
    for number in range(50):
        request = keeping(f"k{number}", 200 * N + 1)
        rig.match(request)
        tracker = rig.scheduler._trackers[request.request_id]
        began = time.perf_counter()
        rig.scheduler._keeps.admit(
            tracker.keep, request, tracker.prefix, tracker.step_ends, tracker.save, 0
        )
        took.append(time.perf_counter() - began)
        later.waiting.clear()
    assert min(took) < 50e-6


def test_a_preempted_request_keeps_once():
    rig, request = Rig(), keeping()
    compute(rig, request)
    calls = len(rig.ranks.keeps)
    rig.match(request)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert len(rig.ranks.keeps) == calls > 0


def test_a_reset_ends_it_and_says_so():
    rig, request = Rig(), keeping()
    compute(rig, request)
    rig.scheduler.begin_reset()
    assert end(rig, request) == {"error": keeps.RESET}
    late = keeping("late")
    assert rig.match(late) == (0, False)
    assert "are being reset" in end(rig, late)["error"]


def test_the_gauge_rises_and_falls_with_what_is_kept():
    worker = WorkerRig().worker
    bytes_of = {group: record_bytes(pages.block_bytes) for group, pages in worker.pages.items()}
    size = 3 * bytes_of[PLAN.attention[0]] + sum(bytes_of[group] for group in PLAN.states)
    try:
        worker.count_kept()
        assert worker.ledger.report() is None
        for seconds, change in ((60, size), (0, -size)):
            worker.keep(KeepRequest(PREFIX, (3,), b"", seconds, 0.25, ("naive",)))
            worker.count_kept()
            assert worker.ledger.report() == {"worker.kept_bytes": {"naive": change}}
    finally:
        worker.shutdown()
