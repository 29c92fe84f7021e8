# SPDX-License-Identifier: Apache-2.0
"""A bucket that is away, silent, missing or slow fails loads and holds nobody up."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from awscrt.exceptions import AwsCrtError

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.storage.remote import s3, s3_failures
from tests.bucket import CREDENTIALS, DENIED, EXTRA, UNLISTED, UNREAD, Bucket

from ..helpers import payload_of, put
from ..store_box import KEYS, LARGE, SIZE, Box, N, flip, until

MANY = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(24)]
# LMCache's own bound on a read, short so that no test waits for it long.
SHORT = {"blocking_timeout_secs": 0.5}


def connector_of(box: Box) -> s3.HybridS3Connector:
    return box.backend.connection.getWrappedConnector()


@pytest.fixture
def own_bucket(bucket, tmp_path):
    """A server that may be killed; ``bucket`` sets the credentials."""
    with contextlib.closing(Bucket()) as own:
        yield own


@pytest.fixture
def paused(bucket):
    """Pause the server; it goes on after the test at the latest."""
    yield bucket.pause
    bucket.resume()


def test_an_object_of_several_parts_comes_back(box):
    """AWS' client sends and fetches parts of 8 MiB side by side."""
    size = (20 << 20) + 3
    box = box("s3", max_local_cpu_size=0.1, max_payload=size).write(KEYS[:1], size)
    assert len(box.raw(KEYS[0])) == record_bytes(size)
    assert torch.equal(box.read(KEYS[:1])[0], payload_of(KEYS[0], size))
    box.assert_pool_is_free()


@pytest.mark.slow  # AWS tries again for ten seconds
def test_a_server_that_went_away_is_a_miss_until_it_is_back(own_bucket, tmp_path):
    box = Box("s3", tmp_path, own_bucket, blocking_timeout_secs=2)
    try:
        box.write()
        claim = box.store.claim(box.store.locate(KEYS))
        own_bucket.kill()
        with pytest.raises(LoadError) as caught:
            box.fetch(claim, KEYS)
        assert caught.value.reason == "unreachable"
        assert box.store.locate(KEYS) == {}
        put(box.store, KEYS, SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": len(KEYS)}, "no write failed")
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
        own_bucket.start()
        box.write()
        assert torch.equal(box.read()[3], payload_of(KEYS[3], SIZE))
        box.assert_pool_is_free()
    finally:
        box.close()


def test_a_server_that_stopped_does_not_hold_up_a_load(box, paused, bucket):
    box = box("s3", **SHORT).write()
    claim = box.store.claim(box.store.locate(KEYS))
    paused()
    with pytest.raises(LoadError, match="did not answer within 0.5 s"):
        box.fetch(claim, KEYS)
    bucket.resume()
    until(lambda: len(box.store.locate(KEYS)) == len(KEYS), "lookups do not recover")
    box.read()
    box.assert_pool_is_free()


def test_a_late_answer_is_not_written_into_memory_of_others(box, monkeypatch):
    """Where nobody waits any more AWS' client must have ended before the memory is given back."""
    box = box("s3", **SHORT).write()
    claim = box.store.claim(box.store.locate(KEYS))
    take, coming, go = s3._Read.write, threading.Event(), threading.Event()

    def late(read, chunk, offset, **_):
        """The bytes have come, and are copied once nobody waits for them."""
        coming.set()
        assert go.wait(20)
        take(read, chunk, offset)

    monkeypatch.setattr(s3._Read, "write", late)
    with pytest.raises(LoadError, match="did not answer within 0.5 s"):
        box.fetch(claim, KEYS[:1])
    assert coming.is_set()
    held = list(iter(lambda: box.store.reserve(SIZE), None))  # all that is left of the pool
    for buffer in held:
        buffer.record[:] = bytes(len(buffer.record))
    go.set()
    until(lambda: not connector_of(box)._in_flight, "the request does not end")
    assert not any(map(any, (buffer.record for buffer in held)))
    for buffer in held:
        buffer.release()
    box.assert_pool_is_free()


def test_a_write_keeps_its_memory_until_the_client_has_ended(box, monkeypatch):
    """And one that nobody waits for any more is cancelled."""
    monkeypatch.setattr(s3, "WRITE_SECONDS", 0.5)
    box = box("s3").write(KEYS[:1])
    readinto, going, go = s3._Body.readinto, threading.Event(), threading.Event()

    def late(body, buffer):
        going.set()
        assert go.wait(20)
        return readinto(body, buffer)

    monkeypatch.setattr(s3._Body, "readinto", late)
    put(box.store, KEYS[1:2], SIZE)
    until(lambda: box.store.failed_writes == {"RemoteBackend": 1}, "it is waited for")
    assert going.is_set() and box.used() > box.start
    go.set()
    until(lambda: box.used() == box.start, "its memory is kept")
    assert not connector_of(box)._in_flight


def test_a_read_that_timed_out_is_cancelled(box, paused, caplog):
    box = box("s3", **SHORT).write()
    claim = box.store.claim(box.store.locate(KEYS))
    paused()
    with pytest.raises(LoadError):
        box.fetch(claim, KEYS)
    until(lambda: not connector_of(box)._in_flight, "requests go on that nobody waits for")
    box.assert_pool_is_free()
    assert "never retrieved" not in caplog.text


def test_writes_behind_one_without_an_answer_fail_at_once(box, paused, monkeypatch):
    """They hold the pool's memory, which loads from other stores need."""
    monkeypatch.setattr(s3, "WRITE_SECONDS", 0.5)
    box = box("s3").write(KEYS[:1])
    connector, started = connector_of(box), []
    request = connector._request
    monkeypatch.setattr(
        connector,
        "_request",
        lambda *args, **kw: (started.append(args[0]), request(*args, **kw))[1],
    )
    paused()
    put(box.store, MANY, SIZE)
    until(lambda: box.store.failed_writes == {"RemoteBackend": len(MANY)}, "not all failed")
    assert started == ["PUT"] * s3.WRITERS
    until(lambda: box.used() == box.start, "failed writes keep their buffers")


@pytest.mark.slow
def test_a_server_that_can_never_be_used_is_told_once_with_what_to_write(
    bucket, tmp_path, hybrid_log, monkeypatch
):
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    extra = {**EXTRA, "disable_tls": False}
    box = Box("s3", tmp_path, bucket, extra_config=extra, blocking_timeout_secs=1)

    def said() -> list[str]:
        return [r.getMessage() for r in hybrid_log.records if "refuses records" in r.getMessage()]

    try:
        assert box.store.locate(KEYS) == {}
        until(said, "a lookup does not say it")
        put(box.store, KEYS[:1], SIZE)
        until(lambda: box.store.failed_writes["RemoteBackend"] == 1, "it was not counted")
    finally:
        box.close()
    (line,) = said()
    assert line.startswith(f"{bucket.url} refuses records") and "speaks without TLS" in line


def test_a_write_says_it_too(bucket, tmp_path, hybrid_log, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    box = Box("s3", tmp_path, bucket, extra_config={**EXTRA, "disable_tls": False})
    try:
        put(box.store, KEYS[:1], SIZE)
        until(lambda: "speaks without TLS" in hybrid_log.text, "a write does not say it")
    finally:
        box.close()


def test_objects_are_looked_for_side_by_side(box, paused, bucket):
    box = box("s3").write(MANY)
    connector = connector_of(box)
    paused()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(box.tier.held, [*map(box.store.engine_key, MANY)], 9)
        until(lambda: len(connector._in_flight) == len(MANY), "asked one after the other")
        bucket.resume()
        assert found.result() == [True] * len(MANY)


def test_a_lookup_without_an_answer_cancels_its_questions(box, paused, bucket):
    box = box("s3").write(MANY)
    connector = connector_of(box)
    paused()
    with pytest.raises(TimeoutError):
        box.tier.held([*map(box.store.engine_key, MANY)], 0.2)
    until(lambda: not connector._in_flight, "questions go on that nobody waits for")


def test_a_damaged_object_is_deleted(box, bucket):
    box = box("s3").write(KEYS[:2])
    box.overwrite(KEYS[1], flip(20)(box.raw(KEYS[1])))
    with pytest.raises(Exception, match="header"):
        box.read(KEYS[:2])
    assert bucket.names() == [box.store.engine_key(KEYS[0]).to_string()]


def test_an_object_that_could_not_be_read_stays_for_other_engines(box, bucket):
    box = box("s3").write(KEYS[:1])
    box.store._damaged.unreadable(box.store.engine_key(KEYS[0]), "RemoteBackend")
    assert len(bucket.names()) == 1 and box.store.locate(KEYS[:1]) == {}


@pytest.mark.parametrize("size", [record_bytes(SIZE) - 1, record_bytes(SIZE) + 1, 1 << 16])
def test_an_object_of_another_size_is_no_record(box, size):
    """The largest is larger than any record, so there is no memory for it."""
    box = box("s3").write(KEYS[:1])
    box.overwrite(KEYS[0], box.raw(KEYS[0])[:size].ljust(size, b"\0"))
    box.scrub()
    with pytest.raises(Exception, match="length|checksum|cannot be read"):
        box.read(KEYS[:1])
    assert box.store.locate(KEYS[:1]) == {}
    box.assert_pool_is_free()


def test_an_object_of_which_a_part_is_missing_is_not_used_and_stays(box, monkeypatch):
    """It is not looked at what was in the memory before."""
    monkeypatch.setattr(s3._Read, "write", lambda read, **part: None)
    box = box("s3").write(KEYS[:1])
    with pytest.raises(LoadError, match="cannot be read from"):
        box.read(KEYS[:1])
    box.assert_pool_is_free()


def test_an_error_takes_no_memory(box):
    box = box("s3")
    read = s3._Read(box.manager.local_cpu_backend)
    read.reserve(404, [("Content-Length", "300")])
    assert box.used() == box.start
    read.release()


def test_a_bucket_that_is_missing_takes_nothing_and_is_named(box, bucket, caplog):
    box = box("s3").write(KEYS[:1])
    bucket.drop()
    try:
        assert box.store.locate(KEYS[:1]) == {}
        put(box.store, KEYS[1:], SIZE)
        until(lambda: box.store.failed_writes == {"RemoteBackend": 3}, "nothing was counted")
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
    finally:
        bucket.make()
    assert "S3 answered 404 NoSuchBucket to " in caplog.text
    assert ": there is no such bucket" in caplog.text
    box.write()


def test_a_bucket_that_does_not_let_us_in_is_no_empty_bucket(box, bucket, caplog):
    box = box("s3", model=DENIED)
    with pytest.raises(s3.S3Error, match="S3 answered 403 to HeadObject: its keys may not"):
        box.tier.held([box.store.engine_key(KEYS[0])], 9)
    assert box.store.locate(KEYS) == {} and "count as misses" in caplog.text
    put(box.store, KEYS[:1], SIZE)
    until(lambda: box.store.failed_writes == {"RemoteBackend": 1}, "nothing was counted")


def test_an_object_that_is_missing_is_a_miss_to_who_may_not_list_the_bucket(box, monkeypatch):
    """S3 says 403 in place of 404 then, as with wrong keys: another object tells the two apart."""
    box = box("s3", model=UNLISTED)
    names = [*map(box.store.engine_key, KEYS)]
    with pytest.raises(s3.S3Error, match="without s3:ListBucket S3 says so of each object that"):
        box.tier.held(names, 9)
    box.write(KEYS[:2])
    connector_of(box)._let_in = float("-inf")
    assert box.tier.held(names, 9) == [True, True, False, False]
    assert box.tier.held(names[2:], 9) == [False, False]
    monkeypatch.setattr(s3, "TRUSTED_SECONDS", 0.0)
    with pytest.raises(s3.S3Error, match="S3 answered 403 to HeadObject"):
        box.tier.held(names[2:], 9)


def test_objects_that_may_be_written_and_not_read_are_no_misses(box, bucket):
    box = box("s3", model=UNREAD)
    put(box.store, KEYS[:1], SIZE)
    until(bucket.names, "nothing was written")
    with pytest.raises(s3.S3Error, match="S3 answered 403 to HeadObject"):
        box.tier.held([box.store.engine_key(KEYS[0])], 9)


@pytest.fixture
def no_credentials(bucket, monkeypatch, tmp_path):
    """None in the environment, in the home folder, and of this machine."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def where(home) -> str:
    return (
        "AWS' client finds no credentials for it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        f"write them to {home}/.aws/credentials, or give this pod or machine a role"
    )


def test_a_write_without_credentials_says_where_they_are_looked_for(
    box, no_credentials, hybrid_log, tmp_path
):
    box = box("s3")
    put(box.store, KEYS[:1], SIZE)
    until(lambda: where(tmp_path) in hybrid_log.text, "a write does not say it")


def test_a_lookup_that_waits_for_credentials_says_where_they_are_looked_for(
    box, no_credentials, hybrid_log, tmp_path, monkeypatch
):
    """The client asks the machine last, which does not answer: as from a pod, or outside of AWS."""
    monkeypatch.setattr(s3_failures, "CREDENTIALS_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", place)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        box = box("s3", **SHORT)
        assert box.store.locate(KEYS) == {}
        until(lambda: where(tmp_path) in hybrid_log.text, "a lookup does not say it")


def test_credentials_are_blamed_for_their_own_errors_alone(box, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    connector = connector_of(box("s3"))
    assert connector.cause(TimeoutError()) == ""
    error = AwsCrtError(6147, "AWS_AUTH_SIGNING_NO_CREDENTIALS", "Attempt to sign a request")
    assert connector.cause(error) == where(tmp_path)


def test_closing_writes_what_is_queued(box, bucket):
    """AWS' client would read memory that is unmapped by then, and end the process."""
    box = box("s3", max_payload=LARGE, max_local_cpu_size=0.25)
    put(box.store, MANY, LARGE)
    box.close()
    assert len(bucket.names()) == len(MANY) and not box.store.failed_writes


def test_closing_with_a_silent_server_ends(box, paused, bucket, monkeypatch):
    monkeypatch.setattr(s3, "FLUSH_SECONDS", 0.2)
    box = box("s3").write(KEYS[:1])
    connector = connector_of(box)
    paused()
    put(box.store, MANY, SIZE)
    until(lambda: len(connector._in_flight) == s3.WRITERS, "nothing was sent")
    box.close()
    assert not connector._in_flight
