# SPDX-License-Identifier: Apache-2.0
"""A request with ``lmcache.prefetch`` loads what is stored of its prompt, and says what it was."""

import pytest

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler import prefetches
from lmcache_hybrid.scheduler.load_policy import LoadPolicy

from .helpers import PLAN, N, make_request
from .scheduler_rig import Rig, all_offers, table

PREFETCH = {"lmcache.prefetch": True}


def prefetching(params: dict = PREFETCH, **kwargs):  # noqa: B006
    return make_request("p", params=params, **kwargs)


def end(rig: Rig, request) -> dict:
    answer = rig.scheduler.request_finished(request)
    assert not rig.scheduler._trackers
    return answer["lmcache.prefetch"]


@pytest.mark.parametrize("computed", [0, N])
def test_what_is_stored_is_loaded_and_nothing_is_stored(computed):
    rig, request = Rig(), prefetching()
    rig.holds(request, 3, 3)
    load = rig.admit(request, computed)
    assert load.boundary == 3
    rig.loaded(request)
    request.num_computed_tokens = 3 * N
    rig.scheduler.update_state_after_alloc(request, table(request), 0)  # as vLLM does
    assert rig.forward(request, 1, all_offers(3)) is None
    assert end(rig, request) == {"loaded": {"naive": 3 * N - computed}, "vllm": computed}


def test_a_part_of_a_block_counts_as_far_as_it_is_loaded():
    prefetch = prefetches.Prefetch(asked=N + 4)
    prefetch.admit(LookupResult(2, 2, (("ram", 1), ("redis", 1)), tail=5), N)
    assert prefetch.loaded == {"ram": N - 4, "redis": 5}


def test_what_vllm_holds_is_not_loaded():
    rig, request = Rig(), prefetching()
    rig.holds(request, 3, 3)
    assert rig.admit(request, 3 * N) is None
    assert end(rig, request) == {"loaded": {}, "vllm": 3 * N}


def test_what_is_not_stored_is_an_error():
    rig, request = Rig(), prefetching()
    assert rig.prefill(request) is None, "it was stored"
    assert end(rig, request) == {"error": prefetches.NOTHING}


def test_a_load_that_fails_is_an_error():
    rig, request = Rig(), prefetching()
    rig.holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request, failed=True)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert end(rig, request) == {"error": prefetches.FAILED}


def test_a_rank_that_does_not_answer_is_an_error():
    rig, request = Rig(2), prefetching()
    rig.holds(request, 3, 3)
    rig.ranks.silent = True
    rig.admit(request)
    assert end(rig, request) == {"error": prefetches.SILENT}


def test_where_ram_keeps_nothing_it_is_an_error():
    rig, request = Rig(), prefetching()
    rig.scheduler.store_watch.in_ram = False
    rig.holds(request, 3, 3)
    rig.admit(request)
    assert end(rig, request) == {"error": prefetches.NO_RAM}


def test_a_request_that_ends_before_its_turn_says_so():
    rig, request = Rig(), prefetching()
    rig.holds(request, 3, 3)
    rig.match(request)
    assert end(rig, request) == {"error": prefetches.UNFINISHED}


def test_it_is_loaded_although_computing_is_faster():
    class Never(LoadPolicy):
        def judge(self, request, result, start):
            return None

    rig, request = Rig(policy=Never()), prefetching()
    rig.holds(request, 3, 3)
    assert rig.match(request) == (3 * N, True)
    assert rig.match(make_request("other")) == (0, False)


def test_a_prompt_that_vllm_computes_anyway_says_so():
    rig, request = Rig(), prefetching()
    request.skip_reading_prefix_cache = True
    rig.holds(request, 3, 3)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert end(rig, request) == {"error": prefetches.COMPUTED}


BAD = [
    ({"lmcache.prefetch": "maybe"}, "lmcache.prefetch='maybe' is neither true nor false"),
    ({"lmcache.prefetch": -1}, "lmcache.prefetch=-1 is neither true nor false"),
    ({"lmcache.prefetch": 31536000}, "lmcache.prefetch=31536000 is neither true nor false"),
    (PREFETCH | {"lmcache.tag.user": 1.5}, "this prompt is never cached"),
    (PREFETCH | {"lmcache.drop": True}, "write lmcache.drop or lmcache.prefetch, not both"),
]


@pytest.mark.parametrize("params, says", BAD, ids=lambda each: str(each)[:40])
def test_what_cannot_be_done_is_said(params, says):
    rig, request = Rig(), prefetching(params)
    rig.holds(make_request(), 3, 3)
    before = set(rig.ranks.stores[0].records)
    rig.admit(request)
    answer = rig.scheduler.request_finished(request)
    assert says in answer["lmcache.prefetch"]["error"]
    assert ("lmcache.drop" in answer) == ("lmcache.drop" in params)
    assert set(rig.ranks.stores[0].records) == before and not rig.ranks.drops


@pytest.mark.parametrize("value", [False, "false", 0, None])
def test_a_request_that_says_no_is_like_any_other(value):
    rig, request = Rig(), prefetching({"lmcache.prefetch": value})
    rig.admit(request)
    assert rig.forward(request, 3 * N + 1, all_offers(3, groups=PLAN.states)) is not None
    assert rig.scheduler.request_finished(request) is None


def test_a_request_while_caches_are_reset_is_refused():
    rig, request = Rig(), prefetching()
    rig.scheduler.begin_reset()
    assert rig.match(request) == (0, False)
    assert "are being reset" in end(rig, request)["error"]
