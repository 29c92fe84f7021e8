# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the scheduler's steps measures steps that store, and a hit that hits."""

import pytest

from benchmarks.steps import hints
from benchmarks.steps.measure import PER_STEP, N, Rig, measure, request
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup

from . import helpers  # noqa: F401  # so that blocks have hashes

BLOCKS = 2 * PER_STEP


@pytest.mark.parametrize("events", [False, True])
def test_each_kind_of_step_is_timed(events: bool) -> None:
    kinds = {"arrival", "step", "arrival of a hit", *(["all at once"] if events else [])}
    found = measure(BLOCKS, events)
    assert found.keys() == kinds and all(found.values())


def test_a_step_stores_all_that_it_computes() -> None:
    rig, made = Rig(True), request("first", BLOCKS)
    assert rig.scheduler.get_num_new_matched_tokens(made, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(made, ([],) * 4, 0)
    rig.step(made, PER_STEP)
    (tracker,) = rig.scheduler._trackers.values()
    assert tracker.stored.attention == len(tracker.stored.states) == PER_STEP


def test_what_the_rank_holds_is_a_hit() -> None:
    rig = Rig(False)
    rig.held = BLOCKS
    assert rig.scheduler.get_num_new_matched_tokens(request("second", BLOCKS), 0) == (
        BLOCKS * N,
        True,
    )


def test_requests_with_hints_are_timed_beside_those_without() -> None:
    found = hints.measure(BLOCKS, 8)
    assert found.keys() == hints.HINTS.keys()
    for values in found.values():
        assert values["more, q1"] <= values["more"] <= values["more, q3"] and values["without"] > 0


def test_time_that_every_request_waits_for_its_lookup_is_not_timed(monkeypatch):
    poll, waited = PendingLookup.poll, []

    def polled(self, seconds=0.0):
        waited.append(seconds)
        return poll(self, seconds)

    monkeypatch.setattr(PendingLookup, "poll", polled)
    hints.measure(BLOCKS, 2)
    # One request runs before the others of each hint, and may wait as nothing else runs.
    assert len(waited) > len(list(filter(None, waited))) == len(hints.HINTS)


@pytest.mark.parametrize(
    ("hint", "held", "said"),
    [
        ("keep", 0, {"kept": {"LocalCPUBackend": PER_STEP * N}, "stored": 0, "seconds": 3600}),
        ("drop", 0, {"removed": {"LocalCPUBackend": 1}}),
        ("prefetch", PER_STEP, {"loaded": {"LocalCPUBackend": PER_STEP * N}, "vllm": 0}),
    ],
)
def test_what_is_timed_does_what_the_hint_asks_for(hint: str, held: int, said: dict) -> None:
    asked = hints.Hinted(PER_STEP, held)
    _, answer = asked.ask("first", hints.HINTS[hint][0])
    assert answer == {f"lmcache.{hint}": said}
