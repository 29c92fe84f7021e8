# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side takes back at a reset."""

from types import SimpleNamespace as Namespace

import pytest
from vllm.v1.engine.core import EngineCore

from .helpers import N, make_request
from .scheduler_rig import STATES, Rig, table


def test_a_reset_takes_back_what_was_promised():
    """Also of a request that waits with its claim; it starts anew."""
    rig, request = Rig(), make_request("r", 3 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.match(request) == (3 * N, True)
    assert rig.scheduler.begin_reset() == 1
    assert rig.match(request) == (0, False), "not before every rank is reset"
    for store in rig.ranks.stores:
        store.clear(1)
    rig.scheduler.end_reset(True)
    assert rig.match(request) == (0, False)
    rig.step()
    assert rig.ranks.num_claims == [0]
    assert len(rig.ranks.questions) > 1, "the ranks were not asked again"


@pytest.mark.parametrize("save", [True, False])
def test_an_engine_that_stores_nothing_says_that_a_reset_ends_its_hits(save, hybrid_log):
    rig = Rig(save=save)
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(True)
    said = [each.getMessage() for each in hybrid_log.records if each.levelname == "WARNING"]
    assert [each.endswith("no prompt hits until it is restarted.") for each in said] == [True][
        save:
    ]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "first, then",
    [({"lmcache.skip_save": True}, None), ({"lmcache.tag.of": "a"}, {"lmcache.tag.of": "b"})],
)
def test_what_a_sessions_first_part_asked_for_outlives_a_reset(first, then, reset):
    """vLLM keeps only the last part's parameters, and the tokens of both."""
    rig = Rig()
    rig.match(make_request(tokens=3 * N + 1, params=first, resumable=True))
    if reset:
        rig.scheduler.begin_reset()
        rig.scheduler.end_reset(True)
        rig.step()
    assert rig.prefill(make_request(tokens=6 * N + 1, params=then, resumable=True)) is None


def test_a_failed_reset_ends_all_hits_and_saves_until_one_succeeds(hybrid_log):
    rig, request = Rig(), make_request("r", 3 * N + 1)
    rig.holds(request, 3, 3)
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(False)
    assert [r for r in hybrid_log.records if "A reset of all caches failed" in r.getMessage()]
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    offers = [(group, 9, 3 * N) for group in STATES]
    assert rig.forward(request, 3 * N, offers) is None
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(True)
    assert rig.match(make_request("next", 3 * N + 1)) == (3 * N, True)


def test_a_request_that_runs_across_a_reset_stores_nothing_any_more():
    """Its blocks may be of weights that were replaced."""
    rig, request = Rig(), make_request("r", 3 * N + 1)
    assert rig.admit(request) is None
    assert rig.forward(request, N).attention
    done = make_request("done", 2 * N)
    assert rig.prefill(done).attention  # stored as a whole: a reset takes nothing from it
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(True)
    assert rig.forward(request, 2 * N, [(group, 9, 3 * N) for group in STATES]) is None
    assert rig.scheduler.counts.skipped_requests == {"reset": 1}


def test_a_load_under_way_at_a_reset_is_not_taken_for_stored():
    rig, request = Rig(), make_request("r", 4 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.admit(request) is not None
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(True)
    rig.loaded(request)
    assert rig.match(request) == (0, False)
    assert rig.forward(request, 4 * N, [(group, 9, 4 * N) for group in STATES]) is None


def test_steps_say_which_reset_they_follow():
    rig = Rig()
    assert rig.step().epoch == 0
    rig.scheduler.begin_reset()
    rig.scheduler.end_reset(True)
    assert rig.step().epoch == 1


@pytest.mark.parametrize("asleep, left", [(False, True), (True, False)])
def test_vllm_keeps_what_encoders_made_unless_it_sleeps(asleep, left):
    """The docs ask for a call of its own after an encoder's weights were replaced."""
    made = {"image": "by the old weights"}
    scheduler = Namespace(
        reset_prefix_cache=lambda *args: True,
        reset_encoder_cache=lambda: None,
        has_unfinished_requests=lambda: False,
    )
    core = object.__new__(EngineCore)
    core.scheduler, core.mm_receiver_cache = scheduler, None
    core.model_executor = Namespace(
        reset_mm_cache=lambda: None,
        reset_encoder_cache=made.clear,
        collective_rpc=lambda name: None,
    )
    if asleep:
        core._finish_pause(clear_cache=True)
    else:
        assert core.reset_prefix_cache(True, True)
    assert bool(made) == left
