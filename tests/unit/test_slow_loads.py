# SPDX-License-Identifier: Apache-2.0
"""Loads that have a deadline: when they are given up, and what is said of them."""

import contextlib
import dataclasses
import math
import time
from types import SimpleNamespace

import pytest
import torch

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core import late_loads as paces
from lmcache_hybrid.core.errors import LoadError, SlowError
from lmcache_hybrid.core.late_loads import Pace
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from lmcache_hybrid.worker import copy_threads

from .worker_rig import DEADLINE, assert_failed


@pytest.fixture
def rig(worker_rig):
    return worker_rig


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(paces, "time", SimpleNamespace(monotonic=lambda: self.now))

    def pace(self, seconds: float, size: int = 100) -> Pace:
        return Pace(self.now + seconds, size)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


# Its pace


def test_a_load_is_late_when_the_rest_will_be(clock):
    pace = clock.pace(10.0)
    clock.now += 1.9
    assert not pace.late, "nothing is known so early"
    clock.now += 0.1
    pace.count(20)
    pace.check()  # 10 s in all
    clock.now += 2.0
    with pytest.raises(SlowError) as slow:
        pace.check()
    assert slow.value.seconds == pytest.approx(20.0) and slow.value.reason == "slow"
    pace.count(80)
    assert pace.late, "its reads were told to end"


def test_a_load_that_gets_nothing_is_late(clock):
    pace = clock.pace(10.0)
    clock.now += 2.0
    with pytest.raises(SlowError) as slow:
        pace.check()
    assert 10.0 < slow.value.seconds < math.inf


def test_a_load_that_waited_for_others_is_late_and_says_nothing(clock):
    with pytest.raises(SlowError) as slow:
        clock.pace(-1.0).check()
    assert slow.value.seconds == 0


def test_a_load_without_a_deadline_is_never_late(clock):
    pace = clock.pace(math.inf)
    with pace.reading(100):
        paces.reading().got(50)
        assert paces.reading().pace is not pace
    clock.now += 1e9
    pace.check()
    assert not pace.late and pace.seconds == math.inf


def test_bytes_count_as_they_come_and_once(clock):
    pace = clock.pace(10.0)
    clock.now += 2.5
    pace.count(30)
    with pace.reading(20):
        read = paces.reading()
        read.report()
        for _ in range(3):
            read.got(15)
        assert pace._got == 50
    with pace.reading(40):
        pass  # of a backend that says nothing
    assert pace._got == 90 and paces.reading().pace is not pace
    with pytest.raises(LoadError), pace.reading(10):
        raise LoadError("it failed")
    assert pace._got == 90 and pace._unreported == 0


def test_the_time_to_connect_says_nothing_of_the_rate(clock):
    """Where a store is far away every small load would be given up."""
    pace = clock.pace(10.0)
    with pytest.raises(SlowError) as slow, pace.reading(100):
        clock.now += 3.0
        paces.reading().report(connecting=3.0)
        assert not pace.late
        clock.now += 1.9
        paces.reading().got(30)
        assert not pace.late, "it was read for less than a fifth of its time"
        clock.now += 0.3
        pace.check()
    assert slow.value.seconds == pytest.approx(3.0 + 2.2 / 0.3)


def test_a_load_that_connects_until_its_deadline_is_late(clock):
    pace = clock.pace(10.0)
    with pace.reading(100):
        clock.now += 9.9
        paces.reading().report(connecting=9.9)
        assert not pace.late
        clock.now += 0.2
        assert pace.late


def test_records_that_come_side_by_side_are_no_slow_load(clock):
    """Of a backend that does not say what it has received, when the first of five is here."""
    pace = clock.pace(10.0)
    with contextlib.ExitStack() as others:
        for _ in range(3):
            others.enter_context(pace.reading(20))
        with pace.reading(20):
            clock.now += 4.0
        pace.check()  # 5 s in all
        clock.now += 6.1
        assert pace.late, "its time is over"


# Its end


def late_by(rig, seconds: float, **kwargs):
    return dataclasses.replace(rig.load(**kwargs), deadline=time.monotonic() - seconds)


def test_a_load_is_given_up_at_its_deadline(rig, hybrid_log):
    rig = rig(part_bytes=1).saved()
    before, fetch, read = rig.buffer.clone(), rig.store.fetch, []
    assert_failed(rig, rig.run(late_by(rig, 1)))
    assert torch.equal(rig.buffer, before)

    def slow(claim, keys):
        read.append(keys)
        while time.monotonic() <= load.deadline:
            time.sleep(0.01)
        return fetch(claim, keys)

    rig.store.fetch = slow
    load = late_by(rig, -0.1)
    rig.start(load)
    assert rig.results().failed_recving == {"r"}
    assert 0.1 < rig.worker.failed_loads().seconds["r"] < math.inf
    assert len(read) == 1
    rig.assert_clean()
    assert rig.worker.counts.failed_loads == {"slow,none": 2}
    assert not [record for record in hybrid_log.records if record.levelname == "WARNING"]
    rig.store.fetch = fetch
    assert not rig.run(late_by(rig, -DEADLINE)).failed_recving


@pytest.mark.parametrize("threads", [False, True])
def test_a_load_is_given_up_in_the_middle_of_a_record(rig, monkeypatch, threads):
    monkeypatch.setattr(copy_threads, "WORTH_A_THREAD", 0 if threads else 1 << 30)
    rig = rig().saved()
    before, deadline, fetch = rig.buffer.clone(), time.monotonic() + DEADLINE, rig.store.fetch
    load = dataclasses.replace(rig.load(), deadline=deadline)

    def trickle(claim, keys):
        paces.reading().report()
        for _ in range(10):
            paces.reading().got(1)
            monkeypatch.setattr(paces, "FIRST_LOOK", 0.0)
            time.sleep(0.002 * DEADLINE)
        return fetch(claim, keys)

    rig.store.fetch = trickle
    rig.start(load)
    assert_failed(rig, rig.results())
    assert rig.worker.failed_loads().seconds["r"] > DEADLINE
    assert torch.equal(rig.buffer, before)


def test_what_failed_otherwise_is_told_apart(rig):
    rig = rig(part_bytes=1).saved()
    late, broken, fine = late_by(rig, 1, request_id="late"), rig.load("broken", claim=False), None
    rig.start(late)
    rig.results()
    assert rig.worker.failed_loads().seconds == {"late": 0.0}
    rig.start(broken)
    rig.results()
    assert rig.worker.failed_loads().seconds == {"broken": None}
    fine = dataclasses.replace(rig.load("fine"), deadline=time.monotonic() + DEADLINE)
    rig.start(fine)
    assert rig.results().finished_recving == {"fine"}
    assert rig.worker.failed_loads() is None


@pytest.mark.parametrize("stands", [True, False])
def test_the_scheduler_is_told(rig, monkeypatch, stands):
    """After weights were replaced all loads fail, and not for being slow."""
    rig = rig(part_bytes=1).saved()
    connector = object.__new__(HybridConnector)
    connector.worker, connector._guard = None, WeightsGuard()
    assert connector.build_connector_worker_meta() is None
    connector.worker = rig.worker
    connector.bind_connector_metadata(ConnectorMetadata(loads=(late_by(rig, 1),), idle=True))
    monkeypatch.setattr(connector._guard, "stands", lambda: stands)
    while not (results := connector.get_transfer_results(set())).finished_recving:
        assert connector.build_connector_worker_meta() is None
    assert results.failed_recving == {"r"}
    said = connector.build_connector_worker_meta()
    assert said.seconds == {"r": 0.0 if stands else None}
    connector.get_transfer_results(set())
    assert connector.build_connector_worker_meta() is None
