# SPDX-License-Identifier: Apache-2.0
"""Random programs of requests and faults; after every step each page must be right.

    pytest tests/sim                                  what CI runs
    SIM_STEPS=1000000 SIM_SEED=random pytest tests/sim       the long run

A failing program is shrunk to a short one, which is printed together with the
seed; ``SIM_SEED=<seed>`` runs it again.
"""

import logging
import os
import random

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from .engine import close_storage
from .program import Run, Tally, programs

STEPS = int(os.environ.get("SIM_STEPS", 200_000))
PROGRAMS_PER_SEED = 200
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
    "loads of aborted requests",
    "loads after preemption",
    "preempted",
    "ranks disagree",
    "accepted drafts",
    "aborted WAITING_FOR_REMOTE_KVS",
    "aborted RUNNING",
    "reset",
    "restarts",
)


@pytest.fixture(autouse=True)
def quiet():
    """Failed loads are part of the programs; a warning for each would be a flood."""
    logging.disable(logging.CRITICAL)
    yield
    close_storage()
    logging.disable(logging.NOTSET)


def test_no_step_sees_wrong_bytes(capsys):
    seed = os.environ.get("SIM_SEED", "1")
    seed = random.SystemRandom().randrange(1 << 32) if seed == "random" else int(seed)
    tally = Tally()

    while tally.steps < STEPS:

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
    with capsys.disabled():
        print(f"\n{tally.steps} steps of {tally.programs} programs:")
        for name, count in sorted(tally.events.items()):
            print(f"  {name:<32} {count}")
    if tally.steps >= 100_000:
        assert [name for name in MET if not tally.events[name]] == []
