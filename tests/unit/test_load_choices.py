# SPDX-License-Identifier: Apache-2.0
"""What the scheduler makes of a load policy's verdicts, and of loads that were given up."""

import math
import pickle
import time

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_hybrid.protocol.failed_loads import SlowLoads

from .helpers import N, make_request
from .scheduler_rig import Rig, all_offers, table


class Given:
    """A policy that gives a load so many seconds, and is asked once."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = [seconds]

    def judge(self, request, result, start) -> float | None:
        return self.seconds.pop()

    def __getattr__(self, name):
        return lambda *args: None


def test_a_hit_that_is_not_loaded_is_judged_and_counted_once():
    policy = Given(None)
    request = make_request(tokens=5 * N + 1)
    rig = Rig(policy=policy).holds(request, 5, 5)
    assert rig.match(request) == rig.match(request) == (0, False)
    assert rig.scheduler.counts.skipped_loads == {"naive": 1}
    assert rig.scheduler.counts.skipped_load_tokens == {"naive": 5 * N}
    rig.step()
    assert all(not lookup._claims for lookup in rig.ranks.lookups)


def test_a_hit_that_is_not_loaded_is_not_stored_again():
    request = make_request(tokens=5 * N + 1)
    rig = Rig(policy=Given(None)).holds(request, 5, 5)
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    assert rig.forward(request, 5 * N + 1, all_offers(5)) is None


def test_a_request_that_waits_for_anothers_prefix_is_judged_once(monkeypatch):
    """It waits with a hit that is not loaded, and asks again in the next pass."""
    request = make_request(tokens=5 * N + 1)
    rig = Rig(policy=Given(None)).holds(request, 5, 5)
    monkeypatch.setattr(rig.scheduler.prefills, "wait", lambda *args: True)
    assert rig.match(request) == rig.match(request) == (None, False)
    assert rig.scheduler.counts.skipped_loads == {"naive": 1}


def test_a_load_has_as_long_as_was_chosen():
    request = make_request(tokens=5 * N + 1)
    rig = Rig(policy=Given(7.0)).holds(request, 5, 5)
    rig.match(request)  # and vLLM has no blocks yet
    assert rig.admit(request).deadline == pytest.approx(time.monotonic() + 7, abs=1)
    other = make_request(tokens=5 * N + 1)
    assert Rig().holds(other, 5, 5).admit(other).deadline == math.inf


@pytest.mark.parametrize("said", [(9.0,), (9.0, 20.0), (0.0,)])
def test_what_came_too_late_is_not_stored_again(said):
    assert not stored_again(*said)


@pytest.mark.parametrize("said", [(), (None,), (None, 9.0), (9.0, None)])
def test_a_load_that_failed_on_one_rank_for_another_reason_is_stored_again(said):
    """Ranks may say so in steps of their own, or not at all."""
    assert stored_again(*said)


def stored_again(*said: float | None) -> bool:
    """Whether a request stores what it could not load.

    Args:
        said: by the ranks, one after the other, of the load: see SlowLoads.
    """
    request = make_request(tokens=5 * N + 1)
    rig = Rig(policy=Given(9.0)).holds(request, 5, 5)
    rig.admit(request)
    for seconds in said:
        failed = SlowLoads({request.request_id: seconds, "of another connector": 1.0})
        rig.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=failed))
    rig.loaded(request, failed=True)
    assert rig.scheduler._failures == SlowLoads({})
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    return rig.forward(request, 5 * N + 1) is not None


def test_ranks_that_report_in_one_step_are_heard_all(rank_outputs):
    def of(**seconds):
        return rank_outputs({"r", "s"}, SlowLoads(seconds))

    output = KVOutputAggregator(2).aggregate([of(r=2.0, s=None), of(r=3.0, s=4.0)])
    assert output.kv_connector_output.failed_recving == {"r", "s"}
    meta = output.kv_connector_output.kv_connector_worker_meta
    assert meta == pickle.loads(pickle.dumps(meta)) == SlowLoads({"r": 3.0, "s": None})


@pytest.fixture
def rank_outputs():
    def output(failed, meta):
        done = KVConnectorOutput(
            finished_recving=failed, failed_recving=failed, kv_connector_worker_meta=meta
        )
        return ModelRunnerOutput([], {}, kv_connector_output=done)

    return output
