# SPDX-License-Identifier: Apache-2.0
"""The ID of a request that ended may be used again, at once."""

import pytest

from .engine import SimEngine, install
from .program import TRUNKS
from .setup import Setup
from .storage import N, Pool, close_storage

PROMPT = TRUNKS[0][: 4 * N + 3]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    install(monkeypatch)
    yield
    close_storage()


@pytest.fixture(params=["", "late"], ids=lambda device: device or "host")
def engine(request):
    """Two ranks whose stores hold the prompt; vLLM's own cache is empty."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sas", ranks=2, answers=0, device=request.param), pool)
    engine.add("first", PROMPT, 2)
    engine.drain()
    engine.reset_prefix_cache(False)
    yield engine
    engine.heal()
    engine.holding = False
    engine.drain()
    engine.check_empty()
    pool.close()


def test_a_load_in_the_step_that_names_the_old_request_as_ended(engine):
    engine.add("again", PROMPT[:3], 1)
    engine.holding = True
    while not engine.requests["again"].is_finished():
        engine.step()
    assert "again" in engine.scheduler.finished_req_ids
    engine.add("again", PROMPT, 2)
    engine.step()
    engine.holding = False
    engine.drain()  # compares every page that a step reads
    assert engine.requests["again"].is_finished()
    assert engine.events["loads"], "nothing was loaded"
