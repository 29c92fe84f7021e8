# SPDX-License-Identifier: Apache-2.0
"""What a step leaves in the store."""

import dataclasses
import threading
import time

import pytest

from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata, SaveSpec
from lmcache_hybrid.storage.record_format import HEADER_BYTES, payload_bytes
from lmcache_hybrid.worker import copies

from .helpers import PLAN, keys_of
from .worker_rig import DEADLINE, PREFIX, raise_in


@pytest.fixture
def rig(worker_rig):
    return worker_rig


def test_save_stores_every_group_under_its_own_key(rig):
    rig = rig().saved()
    expected = {}
    for i in range(3):
        for group, key in zip(PLAN.attention, keys_of(PREFIX, i, ATTENTION)):
            expected[key] = rig.bytes_of(group, 1 + i)
    for i, (group, key) in enumerate(zip(PLAN.states, keys_of(PREFIX, 2, STATE))):
        expected[key] = rig.bytes_of(group, 4 + i)
    payloads = {
        key: bytes(record[HEADER_BYTES : HEADER_BYTES + payload_bytes(len(record))])
        for key, record in rig.store.records.items()
    }
    assert payloads == expected
    counts = rig.worker.counts
    assert (counts.saved_attention, counts.saved_states) == (3, 1)
    assert counts.saved_bytes == sum(map(len, expected.values()))
    rig.assert_clean()


def test_a_save_without_states_and_one_without_attention(rig):
    rig = rig()
    rig.worker.save(ConnectorMetadata(saves=(SaveSpec("w", PREFIX, ((1, (3,)),), ()),)))
    assert list(rig.store.records) == keys_of(PREFIX, 1, ATTENTION)
    rig.worker.save(ConnectorMetadata(saves=(SaveSpec("w", PREFIX, (), ((1, (4, 5, 6)),)),)))
    assert set(list(rig.store.records)[1:]) == set(keys_of(PREFIX, 0, STATE))
    assert (rig.worker.counts.saved_attention, rig.worker.counts.saved_states) == (1, 1)


def test_nothing_to_do_touches_no_store(rig):
    rig = rig()
    rig.worker.saves._store = None  # any use of it raises
    rig.worker.save(NOTHING)
    rig.worker.start_loads(NOTHING)
    assert not rig.worker.results({"x"}, False).finished_recving


def test_an_unwritable_store_skips_saves(rig):
    rig = rig()
    rig.store.writable = lambda: False
    rig.saved()
    assert not rig.store.records and rig.worker.counts.skipped_saves == {"frozen": 1}


def refuse_reserve(store, after: int):
    real, calls = store.reserve, []

    def reserve(size):
        calls.append(size)
        return real(size) if len(calls) <= after else None

    store.reserve = reserve


def raise_in_put(store):
    """Its buffers are the store's from then on, whether it raises or not."""

    def put(records):
        for _, buffer in records:
            buffer.release()
        raise OSError("broken store")

    store.put = put


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda store: refuse_reserve(store, 0), "no_room"),
        (lambda store: refuse_reserve(store, 3), "no_room"),
        (lambda store: raise_in(store, "reserve"), "error"),
        (raise_in_put, "error"),
    ],
    ids=["full", "full midway", "reserve raises", "put raises"],
)
def test_a_failed_save_does_not_raise_and_leaks_nothing(rig, hybrid_log, damage, reason):
    rig = rig()
    damage(rig.store)
    rig.saved().saved()
    assert rig.worker.counts.skipped_saves == {reason: 2}
    assert rig.worker.counts.saved_attention == 0
    warnings = [r.getMessage() for r in hybrid_log.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "Reqid: w" in warnings[0]
    assert not rig.store.records
    rig.assert_clean()


def test_what_breaks_a_save_is_logged_although_the_pool_was_full_before(rig, hybrid_log):
    rig = rig()
    refuse_reserve(rig.store, 0)
    rig.saved().saved()
    raise_in(rig.store, "reserve")
    rig.saved().saved()
    assert rig.worker.counts.skipped_saves == {"no_room": 2, "error": 2}
    full, broken = [r for r in hybrid_log.records if r.levelname == "WARNING"]
    assert not full.exc_info and "broken store" in broken.getMessage()
    assert broken.exc_info, "nobody could find out where"


def test_a_failed_save_does_not_stop_the_others(rig):
    rig = rig()
    bad = SaveSpec("bad", PREFIX, ((0, (0,)),), ())  # the null block
    rig.worker.save(ConnectorMetadata(saves=(bad, *rig.save_metadata().saves)))
    assert rig.worker.counts.skipped_saves.total() == 1 and rig.worker.counts.saved_states == 1
    rig.assert_clean()


class Device(copies.HostCopies):
    """Copies that have been queued by the time the step ends, and arrive when told to."""

    def __init__(self, threads) -> None:
        super().__init__(threads)
        self.arrived = threading.Event()
        self.error: Exception | None = None

    def gather(self, items):
        super().gather(items)  # before the next forward, as on a stream
        digests = [item.buffer.digests for item in items]
        for item in items:
            item.buffer.digests = b""

        def rest() -> None:
            assert self.arrived.wait(DEADLINE)
            if self.error is not None:
                raise self.error
            for item, known in zip(items, digests, strict=True):
                item.buffer.digests = known

        return rest


@pytest.fixture
def device_rig(rig):
    rig = rig()
    rig.device = Device(rig.worker._threads)
    rig.worker.loads._copies = rig.worker.saves._copies = rig.device
    return rig


def test_a_step_does_not_wait_for_the_device(device_rig):
    rig = device_rig.saved()
    assert not rig.store.records and rig.worker.counts.saved_states == 0
    stored = rig.bytes_of(PLAN.attention[0], 1)
    rig.buffer.zero_()  # what the next forwards do
    rig.device.arrived.set()
    rig.worker.saves._finisher.submit(int).result()
    assert rig.worker.counts.saved_states == 1
    rig.run(rig.load())
    assert rig.bytes_of(PLAN.attention[0], 7) == stored
    rig.assert_clean()


def test_save_seconds_is_what_holds_up_the_step(device_rig):
    """One observation a step, made at its end, and none for what the device does afterwards."""
    rig = device_rig
    (save,) = rig.save_metadata().saves
    rig.worker.save(ConnectorMetadata(saves=(save, dataclasses.replace(save, request_id="other"))))
    assert len(rig.worker.counts.save_seconds) == 1 and rig.worker.counts.saved_states == 0
    rig.device.arrived.set()
    rig.worker.saves._finisher.submit(int).result()
    assert len(rig.worker.counts.save_seconds) == 1 and rig.worker.counts.saved_states == 2
    rig.store.reserve = lambda size: None
    rig.saved()  # stores nothing, and has taken its time all the same
    assert len(rig.worker.counts.save_seconds) == 2 and rig.worker.counts.saved_states == 2


def test_what_a_device_still_copies_is_stored_before_the_end(device_rig):
    rig = device_rig.saved()
    threading.Timer(0.05, rig.device.arrived.set).start()
    rig.worker.shutdown()
    assert rig.worker.counts.saved_states == 1 and rig.store.records


def test_what_a_device_still_copies_is_forgotten_too(device_rig):
    """It may have been computed with weights that are no longer there."""
    rig = device_rig.saved()
    threading.Timer(0.05, rig.device.arrived.set).start()
    rig.worker.reset(1)
    assert rig.worker.counts.saved_states == 1 and not rig.store.records


def test_a_step_scheduled_before_a_reset_stores_nothing_after_it(rig):
    """With steps in flight it may come to its saves when the reset is done."""
    rig = rig()
    rig.worker.reset(1)
    rig.saved()
    assert not rig.store.records and rig.worker.counts.skipped_saves == {"reset": 1}
    rig.worker.save(dataclasses.replace(rig.save_metadata(), epoch=1))
    assert rig.store.records and rig.worker.counts.saved_states == 1
    rig.assert_clean()


def test_a_copy_that_fails_is_not_stored(device_rig, hybrid_log):
    rig = device_rig
    rig.device.error = RuntimeError("device lost")
    rig.device.arrived.set()
    rig.saved()
    rig.worker.reset(1)
    assert rig.worker.counts.skipped_saves == {"error": 1} and rig.worker.counts.saved_bytes == 0
    assert [r for r in hybrid_log.records if "device lost" in r.getMessage()]
    rig.assert_clean()


def dropping(step: int = 0, seconds: float = 20.0) -> DropRequest:
    return DropRequest(PREFIX, 0, 3, step, 0, time.monotonic() + seconds)


def test_a_drop_waits_for_steps_that_may_still_save(rig):
    rig = rig().saved()
    assert rig.worker.drop(dropping(step=2)) == DropResult(0, waits=True)
    rig.worker.start_loads(ConnectorMetadata(step=1))
    assert rig.worker.drop(dropping(step=2)).waits and rig.store.records
    rig.worker.start_loads(ConnectorMetadata(step=2))
    rig.worker.start_loads(NOTHING)
    records = len(rig.store.records)
    assert rig.worker.drop(dropping(step=2)) == DropResult(3, {"naive": records})
    assert not rig.store.records
    assert rig.worker.counts.dropped_records == {"naive": records}


def test_a_drop_reaches_what_a_device_still_copies(device_rig):
    rig = device_rig.saved()
    assert rig.worker.drop(dropping(seconds=0.01)) == DropResult(0, waits=True)
    rig.device.arrived.set()
    assert rig.worker.drop(dropping()).block == 3
    assert rig.worker.counts.saved_states == 1 and not rig.store.records
