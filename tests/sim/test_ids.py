# SPDX-License-Identifier: Apache-2.0
"""The ID of a request that ended may be used again, at once."""

import pytest

from .warm import PROMPT

pytestmark = pytest.mark.parametrize("engine", ["", "late"], indirect=True, ids=["host", "late"])


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
