# SPDX-License-Identifier: Apache-2.0
"""A store that takes or gives nothing is a warning that says why, and none that works is one."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from lmcache_hybrid.metrics import HybridStats, counts_of
from lmcache_hybrid.scheduler import store_watch
from lmcache_hybrid.scheduler.store_watch import FEW_PROMPTS, LOOK, LOOKUPS, PROMPTS, StoreWatch

from .helpers import OPTIONS, PLAN, N, make_request
from .scheduler_rig import Rig, table

SAVED = {"worker.saved_bytes": 1}


class Life:
    """Prompts that come one after another, a second apart."""

    def __init__(self, log, plan=PLAN, **options) -> None:
        self.log, self.now, self.number = log, 0.0, 0
        self.watch = StoreWatch(plan, dataclasses.replace(OPTIONS, **options), lambda: self.now)
        self.rig = Rig(plan=plan, store_watch=self.watch, **options)

    def prompts(
        self,
        count: int,
        tokens: int = 3 * N + 1,
        saves: dict | None = None,
        local: int = 0,
        **kwargs,
    ) -> "Life":
        """``count`` prompts that begin differently. What their ranks report is ``saves``."""
        for _ in range(count):
            self.number += 1
            ids = [1000 + self.number, *range(tokens - 1)]
            self.one(make_request(f"r{self.number}", ids, **kwargs), saves, local)
        return self

    def one(self, request, saves: dict | None = None, local: int = 0) -> None:
        self.now += 1.0
        scheduler = self.rig.scheduler
        gain = self.rig.match(request, local)[0]
        scheduler.update_state_after_alloc(request, table(request), gain)
        self.rig.step()
        if gain:
            self.rig.loaded(request)
        request.num_computed_tokens = local + gain
        self.rig.forward(request, request.num_prompt_tokens - local - gain)
        scheduler.request_finished(request)
        if saves:
            self.watch.reported(saves)

    def said(self, level: int = logging.WARNING) -> list[str]:
        """What it has said of one level, once."""
        name = "vllm.lmcache_hybrid.scheduler.store_watch"
        records = [each for each in self.log.records if each.name == name]
        self.log.clear()
        return [each.getMessage() for each in records if each.levelno == level]


@pytest.fixture
def life(hybrid_log):
    return lambda *args, **options: Life(hybrid_log, *args, **options)


def test_prompts_of_which_nothing_is_stored_are_a_warning(life):
    one = life().prompts(PROMPTS - 1)
    assert not one.said()
    one.prompts(1)
    (line,) = one.said()
    assert line == (
        "LMCache has stored nothing of the last 50 prompts, in 45 s: no step has counted why; "
        "please report it. See docs/troubleshooting.md, 'No hits at all'."
    )


@pytest.mark.parametrize(
    "prompt, options, reason",
    [
        ({"tokens": N - 1}, {}, f"50 are too short, a prompt hits from {N + 1} tokens on"),
        ({"params": {"lmcache.tag.a": "@"}}, {}, "50 cannot be cached"),
        (
            {"params": {"lmcache.skip_save": True}},
            {},
            "50 ask for lmcache.skip_save, drop or prefetch",
        ),
        ({"priority": 3}, {"priority_limit": 2}, "50 are above priority_limit=2"),
        (
            {"saves": {"worker.skipped_saves": {"no_room": 2}}},
            {},
            "ranks skipped 98 saves (no_room)",
        ),
    ],
)
def test_the_step_that_stopped_them_is_named(life, prompt, options, reason):
    (line,) = life(**options).prompts(PROMPTS, **prompt).said()
    assert f": {reason}" in line


def test_the_most_frequent_reasons_come_first(life):
    one = life().prompts(20, tokens=N - 1).prompts(30, params={"lmcache.skip_save": True})
    (line,) = one.said()
    assert "30 ask for lmcache.skip_save, drop or prefetch; 20 are too short" in line


def test_a_finer_unit_is_named_where_it_helps(life):
    plan = dataclasses.replace(PLAN, block_size=384)
    watch = StoreWatch(plan, OPTIONS)
    text = "3 are too short, a prompt hits from 385 tokens on"
    assert watch._reason("short", 3) == f"{text} (from 65 on with --prefix-match-unit 64)"
    finer = StoreWatch(plan.with_unit(64), OPTIONS)
    assert finer._reason("short", 3) == text.replace("385", "65")


def test_few_prompts_count_over_a_long_time(life):
    one = life()
    for _ in range(FEW_PROMPTS - 1):
        one.prompts(1)
        one.now += store_watch.LONG_SECONDS / (FEW_PROMPTS - LOOK)
    assert not one.said()
    (line,) = one.prompts(1).said()
    assert "nothing of the last 10 prompts, in 60" in line


def test_ranks_that_answer_no_lookup_are_named(life):
    one = life()
    one.rig.ranks.silent = True
    (line,) = one.prompts(PROMPTS).said()
    assert "ranks gave no answer to 50 lookups" in line


def test_an_empty_store_is_not_said_to_hold_what_failed_after_it_was_counted(life):
    """Ranks count a save when they hand it over, and a failed write when it has failed."""
    one = life()
    one.watch.in_ram = False
    one.prompts(1, saves=SAVED)
    one.prompts(LOOKUPS + PROMPTS, saves={"worker.failed_writes": {"RemoteBackend": 3}})
    assert not [line for line in one.said() if "LMCache holds records" in line]


@pytest.mark.parametrize("in_ram", [True, False])
def test_what_no_backend_took_is_not_stored(life, in_ram):
    """In RAM it is, whatever another backend does."""
    one = life()
    one.watch.in_ram = in_ram
    one.prompts(PROMPTS, saves=SAVED | {"worker.failed_writes": {"RemoteBackend": 4}})
    lines = one.said()
    assert len(lines) == (not in_ram)
    assert in_ram or "RemoteBackend failed to write 196 records" in lines[0]


def test_it_is_said_again_each_hour_and_when_it_is_over(life):
    one = life().prompts(PROMPTS)
    assert len(one.said()) == 1
    one.prompts(5 * PROMPTS)
    assert not one.said()
    one.now += store_watch.REPEAT_SECONDS
    assert len(one.prompts(LOOK).said()) == 1
    one.prompts(2, saves=SAVED)
    assert one.said(logging.INFO) == ["LMCache stores prompts again."]
    one.prompts(3 * PROMPTS)
    assert not one.said(), "a store that comes and goes is not said more often"


@pytest.mark.parametrize(
    "prompts",
    [
        {"saves": SAVED},
        {"tokens": N - 1},
        {"tokens": N - 1, "params": {"lmcache.skip_save": True}},
        {"params": {"lmcache.skip_save": True}},
        {"params": {"lmcache.tag.a": "@"}},
    ],
    ids=str,
)
def test_an_engine_that_stores_is_no_alarm_whatever_comes(life, prompts):
    one = life().prompts(1, saves=SAVED).prompts(3 * PROMPTS, **prompts)
    assert not one.said() and not one.said(logging.INFO)


def test_prompts_that_are_stored_already_are_no_alarm(life):
    one, request = life(), make_request()
    one.rig.holds(request, 3, 3)
    for number in range(3 * LOOKUPS):
        one.one(make_request(f"again{number}"))
        one.one(make_request(f"local{number}"), local=3 * N)
    assert not one.said()


def test_a_consumer_is_no_alarm(life):
    assert not life(save=False).prompts(3 * PROMPTS).said()


def test_a_consumer_that_hits_is_no_alarm(life):
    one = life(save=False)
    for number in range(2 * LOOKUPS):
        request = make_request(str(number), [1000 + number, *range(3 * N)])
        one.rig.holds(request, 3, 3)
        one.one(request)
    assert one.rig.scheduler.counts.hits and not one.said()


def test_a_consumer_that_never_hits_is_told(life):
    """Its prompts have just been computed, and stored, by another engine."""
    one = life(save=False)
    (line,) = one.prompts(LOOKUPS).said()
    assert line.startswith("This engine stores nothing itself, and none of the last 200 lookups")
    assert "of 200 nothing was found: no engine fills this store, or one whose" in line


def test_requests_that_end_before_their_prompt_is_computed_do_not_count(life):
    one = life()
    for number in range(3 * PROMPTS):
        request = make_request(str(number))
        one.rig.match(request)
        one.now += 1
        one.rig.scheduler.request_finished(request)
    assert not one.said()


def test_a_burst_whose_saves_are_reported_later_is_no_alarm(life):
    one = life()
    one.prompts(1)
    for _ in range(3 * PROMPTS):
        one.now -= 1.0
        one.prompts(1)
    assert not one.said()


def test_lookups_without_a_hit_in_a_store_that_holds_records_are_a_warning(life):
    one = life().prompts(LOOKUPS, saves=SAVED)  # before the first, nothing is stored
    assert not one.said()
    one.prompts(1, saves=SAVED)
    (line,) = one.said()
    assert line == (
        "LMCache holds records, and none of the last 200 lookups led to a load, in 195 s: of 200 "
        "nothing was found: no prompt so far began as an earlier one of its cache_salt, LoRA "
        "adapter and tags, or its records were evicted. See docs/troubleshooting.md, "
        "'No hits at all'."
    )
    again = make_request("again")
    one.rig.holds(again, 3, 3)
    one.one(again)
    assert one.said(logging.INFO) == ["LMCache serves hits again."]


def test_pages_without_a_state_are_told_from_nothing(life):
    one = life().prompts(1, saves=SAVED)
    for number in range(LOOKUPS):
        request = make_request(str(number), [7000 + number, *range(3 * N)])
        one.rig.holds(request, 2)
        one.one(request, saves=SAVED)
    (line,) = one.said()
    assert "of 200 there are attention pages, but no state that far" in line


@pytest.mark.parametrize("prompts", [{"tokens": N}, {"local": 3 * N}, {"local": N}], ids=str)
def test_lookups_that_could_not_hit_do_not_count(life, prompts):
    one = life().prompts(1, saves=SAVED).prompts(2 * LOOKUPS, saves=SAVED, **prompts)
    assert not one.said()


def test_an_engine_that_stores_nothing_is_warned_where_vllm_has_the_beginning(life):
    """A chat's turns and a system prompt are in vLLM's own cache; another engine has the rest."""
    one = life(save=False).prompts(LOOKUPS, local=N)
    (line,) = one.said()
    assert line.startswith("This engine stores nothing itself, and none of the last 200 lookups ")
    assert "or prompts come before their records" in line
    again = make_request("again")
    one.rig.holds(again, 3, 3)
    one.one(again)  # from now on this engine's own cache may have what prompts share
    assert not one.prompts(2 * LOOKUPS, local=N).said()
    assert not life(save=False).prompts(LOOKUPS, local=3 * N).said()


def test_hits_too_short_to_be_loaded_are_a_warning(life):
    one = life(min_retrieve_tokens=3 * N).prompts(1, saves=SAVED)
    for number in range(LOOKUPS):
        request = make_request(str(number), [7000 + number, *range(3 * N)])
        one.rig.holds(request, 2, 2)
        one.one(request, saves=SAVED)
    (line,) = one.said()
    assert f": 200 hits had fewer than min_retrieve_tokens={3 * N} to load" in line
    long = make_request("long")
    one.rig.holds(long, 3, 3)
    one.one(long)
    assert one.said(logging.INFO) == ["LMCache serves hits again."]


def test_a_cleared_store_holds_nothing(life):
    one = life().prompts(LOOKUPS, saves=SAVED)
    one.rig.scheduler.begin_reset()
    one.rig.scheduler.end_reset(True)
    one.prompts(LOOKUPS, saves=SAVED)
    assert not one.said()


def test_ranks_counts_are_found_beside_other_connectors():
    mine, other = HybridStats(SAVED), SimpleNamespace(data={"x": 1})
    several = SimpleNamespace(data={"Other": other, "LMCacheConnectorV1": mine})
    assert counts_of(mine) == counts_of(several) == SAVED
    assert counts_of(None) == counts_of(SimpleNamespace(data={"Other": other})) == {}
