# SPDX-License-Identifier: Apache-2.0
"""Random programs of requests and faults; after every step each page must be right.

    make test               50,000 steps
    make test-all           200,000 steps
    make sim                the long run: a million steps from a random seed

A failing program is shrunk to a short one, which is printed together with the
seed; ``SIM_SEED=<seed>`` runs it again. ``SIM_OUT`` names a JSON file for the counts.
"""

import json
import logging
import os
import random
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from .offers import CHUNKS, JUNCTION, LOADS, MIXED, SHORT
from .program import SPREAD, Run, Tally, programs
from .sessions import CUT_SHORT, NEXT
from .setup import Setup
from .shrunk import SHRUNK

STEPS = int(os.environ.get("SIM_STEPS", 50_000))
# Each from a seed of its own, and with steps enough to meet all of MET.
PARTS = min(max(STEPS // 50_000, 1), 4)
PROGRAMS_PER_SEED = 50
# Shrinking takes minutes; SIM_SHRINK=0 where it is enough to know that a program fails.
PHASES = (
    (Phase.generate, Phase.shrink)
    if os.environ.get("SIM_SHRINK", "1") == "1"
    else (Phase.generate,)
)
# What the programs of a whole run must have met; without it they prove nothing.
MET = (
    "hits",
    "states saved",
    "states loaded",
    "records rejected",
    "saves skipped",
    "failed loads",
    "loads after preemption",
    "preempted",
    "ranks disagree",
    "pages of another rank",
    "accepted drafts",
    "accepted drafts of steps ahead",
    "aborted RUNNING",
    "reset",
    "weights replaced",
    "slept",
    "restarts",
    "checkpoints inside a chunk",
    "resumed as new requests",
    "steps of pipelines",
    "lookups that waited for others",
    "shared prefills",
    "records dropped",
    "drops done",
    "drops refused",
    "keeps done",
    "keeps refused",
    "evictions beside kept records",
    "device: loads",
    "device: pages saved",
    "device: loads beside a forward",
    "device: loads of blocks that were saved",
    "device: parts side by side",
    LOADS,
    CHUNKS,
    NEXT,
    CUT_SHORT,
    SPREAD,
)
# Too rare for 50,000 steps; what a request hands off at its end is too rare for long runs, too, see
# test_ends.py.
MET_IN_LONG_RUNS = (
    "loads of aborted requests",
    "aborted WAITING_FOR_REMOTE_KVS",
    "device: failed loads",
    JUNCTION,
    MIXED,
    SHORT,
)


@pytest.fixture(autouse=True)
def quiet():
    """Failed loads are part of the programs; a warning for each would be a flood."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def first_seed() -> int:
    given = os.environ.get("SIM_SEED", "1")
    return random.SystemRandom().randrange(1 << 32) if given == "random" else int(given)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_step_sees_wrong_bytes(part, capsys):
    tally = Tally()
    seed = start = first_seed() + 10_000 * part
    began = time.process_time()
    while tally.steps < STEPS / PARTS:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=PROGRAMS_PER_SEED,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
            print_blob=False,
        )
        @hypothesis.given(programs)
        def play(program):
            setup, operations = program
            Run(setup, tally).play(operations)

        try:
            play()
        except BaseException:
            print(f"SIM_SEED={seed}")
            raise
        seed += 1
    report(tally, start, time.process_time() - began, part, capsys)
    needed = (40_000, MET), (200_000, MET_IN_LONG_RUNS)
    names = [name for steps, names in needed if tally.steps >= steps for name in names]
    assert [name for name in names if not tally.events[name]] == []


@pytest.mark.parametrize("program", SHRUNK, ids=str)
def test_programs_that_once_failed_pass(program):
    program.play()


def test_a_failed_load_reserves_nothing():
    """A request of higher priority gets in, see ``free_failed_loads``."""
    setup = Setup(groups="as", blocks=13, seqs=2, priority=True)
    step, low, high = ("step", 0, 15, 0), 2 << 10, 1
    operations = [("add", 0, 6, 0), step, ("add", 0, 7, 0), step, ("reset", 0, 0, 0)]
    operations += [("hold", 0, 0, 0), ("again", 0, 0, low), step, ("again", 0, 1, high), step]
    operations += [("flip", 0, 0, 0), ("hold", 0, 0, 0)]
    tally = Tally()
    Run(setup, tally).play(operations)
    assert tally.events["failed loads"] == 1 and tally.events["hits"] == 2


def test_a_request_is_aborted_while_it_loads():
    """Random programs do so too seldom to rely on it."""
    step, hold = ("step", 0, 15, 0), ("hold", 0, 0, 0)
    operations = [("add", 0, 6, 0), step, ("reset", 0, 0, 0), hold, ("again", 0, 0, 0)]
    operations += [("step", 0, 0, 0), ("abort", 0, 0, 1), hold, step]
    tally = Tally()
    Run(Setup(groups="as", blocks=40), tally).play(operations)
    assert tally.events["aborted WAITING_FOR_REMOTE_KVS"] == 1
    assert tally.events["loads of aborted requests"] == 1


def report(tally: Tally, seed: int, seconds: float, part: int, capsys) -> None:
    figures = {
        "seed": seed,
        "programs": tally.programs,
        "steps": tally.steps,
        "steps on devices": tally.steps_on_devices,
        "steps per CPU second": round(tally.steps / seconds),
        **dict(sorted(tally.events.items())),
    }
    if path := os.environ.get("SIM_OUT"):
        Path(f"{path}.{part}").write_text(json.dumps(figures, indent=1) + "\n")
    with capsys.disabled():
        print()
        for name, count in figures.items():
            print(f"  {name:<32} {count}")
