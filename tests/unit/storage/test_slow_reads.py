# SPDX-License-Identifier: Apache-2.0
"""Reads from Redis that a load's pace ends, in the middle of a value."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmcache_hybrid.core.errors import LoadError, SlowError
from lmcache_hybrid.core.late_loads import Pace
from lmcache_hybrid.storage.record_format import record_bytes

from ..store_box import KEYS, SIZE, Box, until

SECONDS = 2.0


class SlowServer:
    """Stands in for a Redis behind a link that could not be slower.

    Attributes:
        asked: all that it was sent.
        cut: how many clients hung up in the middle of a value.
        greets: seconds after which it answers what clients ask before that.
    """

    def __init__(self, value: bytes, first: int, more: bool) -> None:
        """Send ``first`` bytes of the reply at once, then one now and then or none."""
        self._value, self._first, self._more = value, first, more
        self.asked, self.cut, self.greets = bytearray(), 0, 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(4096):
                self.asked += asked
                if b"GET" not in asked:
                    time.sleep(self.greets)
                    connection.sendall(b"+OK\r\n" * asked.count(b"*"))
                    continue
                reply = b"$%d\r\n%s\r\n" % (len(self._value), self._value)
                connection.sendall(reply[: self._first])
                connection.settimeout(0.01)
                at = self._first
                while True:
                    try:
                        connection.sendall(reply[at : at + self._more])
                        at += self._more
                        if not connection.recv(1):
                            raise ConnectionError
                    except TimeoutError:
                        continue
                    except OSError:
                        self.cut += 1
                        return

    def close(self) -> None:
        self._server.close()


@contextmanager
def slow_box(box: Box, folder, **kwargs) -> Iterator[tuple[Box, SlowServer]]:
    server = SlowServer(box.raw(KEYS[0]), **kwargs)
    other = Box("redis", folder, None, remote_url=f"redis://127.0.0.1:{server.port}")
    try:
        yield other, server
    finally:
        other.close()
        server.close()


@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("first", [0, 500])
def test_a_read_that_comes_too_late_ends_and_says_nothing_of_its_record(box, tmp_path, first, more):
    with slow_box(box("redis").write(), tmp_path, first=first, more=more) as (other, server):
        claim = other.store.claim(dict.fromkeys(KEYS[:1], "RemoteBackend"))
        pace = Pace(time.monotonic() + SECONDS, record_bytes(SIZE))
        with pytest.raises(SlowError) as slow, pace.reading(record_bytes(SIZE)):
            other.store.fetch(claim, KEYS[:1])
        assert first or slow.value.seconds > 2 * SECONDS, "what never came was counted"
        until(lambda: server.cut == 1, "the read went on")
        assert b"DEL" not in server.asked and b"EXISTS" not in server.asked
        assert server.asked.count(b"GET") == 1
        # LMCache switches a store off for failed reads.
        assert other.backend.get_blocking_failed_count == 0
        hidden = other.store._damaged.hidden("RemoteBackend")
        assert other.store.engine_key(KEYS[0]) not in hidden
        assert other.tier._reader._silent < 0, "other loads fail at once"
        other.assert_pool_is_free()


def test_a_load_that_is_late_asks_for_no_more_records(box, tmp_path, monkeypatch):
    with slow_box(box("redis").write(), tmp_path, first=0, more=False) as (other, server):
        asked, get = [], other.backend.get_blocking
        monkeypatch.setattr(other.backend, "get_blocking", lambda k: asked.append(k) or get(k))
        claim = other.store.claim(dict.fromkeys(KEYS, "RemoteBackend"))
        pace = Pace(time.monotonic() - 1, record_bytes(SIZE))
        with pytest.raises(SlowError), pace.reading(record_bytes(SIZE)):
            other.store.fetch(claim, KEYS)
        assert not asked and b"GET" not in server.asked
        other.assert_pool_is_free()


def test_bytes_are_counted_as_they_come(box):
    box = box("redis").write()
    claim = box.store.claim(box.store.locate(KEYS))
    pace = Pace(time.monotonic() + 60, 4 * record_bytes(SIZE))
    with pytest.raises(KeyError), pace.reading(record_bytes(SIZE)):
        for buffer in box.store.fetch(claim, KEYS[:1]):
            buffer.release()
        raise KeyError  # what its end would count is not
    assert 0 < pace._got <= record_bytes(SIZE)
    claim.release()
    box.assert_pool_is_free()


def test_the_time_to_connect_is_told_apart(box, tmp_path, monkeypatch):
    """However long a login takes, it says nothing of how fast a value comes."""
    filled = box("redis").write()
    monkeypatch.setenv("LMCACHE_HYBRID_REDIS_PASSWORD", "secret")
    with slow_box(filled, tmp_path, first=1 << 20, more=False) as (other, server):
        server.greets = 0.2
        claim = other.store.claim(dict.fromkeys(KEYS[:1], "RemoteBackend"))
        pace = Pace(time.monotonic() + 60, record_bytes(SIZE))
        with pace.reading(record_bytes(SIZE)):
            for buffer in other.store.fetch(claim, KEYS[:1]):
                buffer.release()
        assert pace._connecting >= server.greets
        other.assert_pool_is_free()


def test_the_threads_of_reads_end_with_their_worker(box, worker_rig):
    box, worker = box("fs").write(), worker_rig().worker
    before = set(threading.enumerate())
    box.read()
    made = {each for each in threading.enumerate() if each.name.startswith("hybrid-read")} - before
    assert made
    worker.store = box.store
    worker.shutdown()
    until(lambda: not any(each.is_alive() for each in made), "a thread is left")


def test_a_read_that_raises_keeps_no_buffer_of_those_beside_it(box, monkeypatch):
    box = box("fs").write()
    real, broken = box.backend.get_blocking, box.store.engine_key(KEYS[-1])

    def read(key):
        if key == broken:
            raise OSError("from outside")
        return real(key)

    monkeypatch.setattr(box.backend, "get_blocking", read)
    with pytest.raises(LoadError, match="from outside") as failed:
        box.read()
    assert box.used() == box.start, f"kept as long as somebody holds {failed}"
