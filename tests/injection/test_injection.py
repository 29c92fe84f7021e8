# SPDX-License-Identifier: Apache-2.0
"""Whatever call out of this package fails, an engine answers right and goes on loading.

It loads prompts that come later, or a warning says that it is off; it releases claims, memory and
threads. Or its start is refused in one sentence. A sample by default, of seed ``INJECT_SEED``;
``INJECT=all`` raises in every call (:mod:`.injection`), a quarter of an hour on one core. Each
run starts an engine of two ranks twice, see :mod:`.program`; a call of one rank fails on that
rank alone.
"""

import os
import random
from dataclasses import replace

import pytest

from . import forked
from .injection import Call, errors_of

STORES = ("disk", "fs", "redis")
# Runs of each store in a sample.
SAMPLE = 3
EVERYTHING = os.environ.get("INJECT") == "all"
SEED = int(os.environ.get("INJECT_SEED", "1"))


@pytest.fixture(scope="module", autouse=True)
def warm():
    forked.warm_up()


@pytest.fixture(params=STORES)
def store(request) -> str:
    return request.getfixturevalue("redis_url") if request.param == "redis" else request.param


def plans(dry: forked.Outcome, rng: random.Random) -> list[tuple[Call, Exception]]:
    """The first and the last call of each place: of one rank, and late in its life."""
    found = [
        (Call(*site, number), rng.choice(errors_of(site[2])))
        for site, count in dry.calls
        for number in sorted({1, count})
    ]
    return found if EVERYTHING else rng.sample(found, SAMPLE)


def run(store: str, call: Call, error: Exception) -> tuple[Call, forked.Outcome]:
    """Have a call fail, or an earlier one of its place: how often it is reached varies.

    Returns:
        The call, and how the run ended in which it was reached, or the last of four.
    """
    for number in (call.number, (call.number + 1) // 2, 1, 1):
        call = replace(call, number=number)
        ended = forked.run(store, call, error)
        if ended.raised or ended.problem:
            break
    return call, ended


@pytest.mark.timeout(7200)
def test_a_call_that_fails_ends_in_a_miss_or_a_refusal(store, capsys):
    dry = forked.run(store)
    assert not dry.error and not dry.caught, dry.error + dry.output
    assert dry.hits >= 8 and dry.loads, "a program without hits proves nothing"
    wrong = []
    for call, error in plans(dry, random.Random(SEED)):
        call, ended = run(store, call, error)
        problem = ended.problem or ("" if ended.raised else "the call was not reached")
        with capsys.disabled():
            became = ended.refused or ended.caught or f"{ended.hits} hits"
            print(
                f"\n  {call} {error!r}: {problem.splitlines()[-1] if problem else became}", end=""
            )
        if problem:
            wrong.append(f"{call} {error!r}\n{problem}\n{ended.output[-3000:]}")
    assert not wrong, "\n\n".join(wrong)
