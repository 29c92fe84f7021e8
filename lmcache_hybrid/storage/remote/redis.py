# SPDX-License-Identifier: Apache-2.0
"""A connector to Redis and Valkey: one server, a cluster, a primary behind sentinels.

A record is one value, ``KEYkv_bytes``. (LMCache's own connectors keep size and shape in a second
value; a record contains both.) Values go between sockets and LMCache's pool without a copy, on
threads, off the event loop.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from socket import socket
from typing import Any, TypeVar

import redis
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from redis.exceptions import AskError
from vllm.logger import init_logger

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.config.stores.base import Place
from lmcache_hybrid.config.stores.redis import sentinel_seconds
from lmcache_hybrid.core.backoff import LessOften
from lmcache_hybrid.core.errors import SlowError
from lmcache_hybrid.core.late_loads import Reading, reading
from lmcache_hybrid.core.threads import anywhere, cores, started
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.key_names import VALUE, printable
from lmcache_hybrid.storage.remote import clients, redis_failures, sockets
from lmcache_hybrid.storage.remote.record_connector import (
    BatchConnector,
    awaited,
    bytes_of,
    release_unread,
)
from lmcache_hybrid.storage.remote.refusals import Refusals
from lmcache_hybrid.storage.remote.servers import CLOSED, TRY_AGAIN, Server, servers_at

READERS = 4
WRITERS = 2
# Threads for short calls: lookups, and removals of damaged records.
ASKERS = 2
# Max seconds for one write.
WRITE_SECONDS = 20.0
# A write that failed after this long shows that the server is silent.
SILENT_SECONDS = 1.0
# Max seconds to wait for queued writes at shutdown.
FLUSH_SECONDS = 8.0
# Max seconds to wait for the ends of calls once their connections are shut down.
END_SECONDS = 1.0

T = TypeVar("T")
# What a server says to one command; for a connection that ended, its error.
Answer = bytes | Exception
logger = init_logger("vllm.lmcache_hybrid.storage.remote.redis")


class HybridRedisConnector(BatchConnector):
    """Reads, writes and looks up records. Made on any thread; its coroutines run on LMCache's loop.

    Connects when first used, and again after a failure: an idle connection that the server has
    closed, a node that left and a primary that was replaced cost one retry each.
    """

    def __init__(self, url: str, context: ConnectorContext) -> None:
        """
        Args:
            url: of a server, a cluster or sentinels, without a password.

        Raises:
            ConfigError: a file that the environment names cannot be read.
            ValueError: the URL cannot be read.
        """
        super().__init__(context)
        self._url = url
        self._pool = context.local_cpu_backend
        if url.lower().startswith(clients.SENTINEL):
            self._seconds = sentinel_seconds(self._seconds)
        self._servers = servers_at(
            url,
            {
                "socket_timeout": self._seconds,
                "socket_connect_timeout": self._seconds,
                "protocol": 2,  # no push messages
            },
        )
        unbound = anywhere(cores())
        with ExitStack() as stack:  # LMCache retries: if one pool fails, the others must end
            stack.callback(self._servers.close)
            self._readers = started(READERS, "hybrid-redis-read", unbound)
            stack.callback(self._readers.shutdown)
            self._writers = started(WRITERS, "hybrid-redis-write", unbound)
            stack.callback(self._writers.shutdown)
            self._askers = started(ASKERS, "hybrid-redis-ask", unbound)
            stack.pop_all()
        # Coroutines that wait for a thread; used on LMCache's loop only.
        self._calls: set[asyncio.Task[Any]] = set()
        self.shown = printable(without_password(url))
        self._refusals, self._lost = Refusals(self.shown, self.cause), LessOften()
        self._silent = -math.inf  # time.monotonic of the last write that timed out

    # Reading

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        job = self._readers.submit(self._read, key, reading())
        try:
            return await self._awaited(job)
        except asyncio.CancelledError:
            job.add_done_callback(release_unread)
            raise

    def _read(self, key: CacheEngineKey, part: Reading) -> MemoryObj | None:
        taken: list[MemoryObj] = []
        begun = time.monotonic()

        def reserve(size: int) -> memoryview | None:
            while taken:  # called again, on a new connection
                taken.pop().ref_count_down()
            memory = self._pool.allocate(record_shape(size), torch.uint8, MemoryFormat.KV_2LTD)
            if memory is None:
                return None
            taken.append(memory)
            return bytes_of(memory)[:size]

        name = key.to_string() + VALUE
        get = sockets.command(b"GET", _encoded(name))

        def read(sock: socket, deadline: float) -> bool:
            part.report(time.monotonic() - begun)
            sockets.send(sock, get, deadline)
            return sockets.receive(sock, reserve, deadline, part.got)

        found = False
        try:
            found = self._twice(name, read, min(self._seconds, part.pace.seconds))
        except (SlowError, TimeoutError):
            # A failed read would mark the store as broken in LMCache; RemoteReader drops this one.
            if not part.pace.late or not (taken or reserve(1)):
                raise
            found = True
        finally:
            if not found and taken:
                taken.pop().ref_count_down()
        return taken[0] if found else None

    # Writing

    def has_told(self, error: Exception) -> bool:
        refused = isinstance(error, (redis.ResponseError, redis.AuthenticationError))
        return refused and not isinstance(error, AskError)

    async def write(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """See :meth:`BatchConnector.write`.

        If one finds the server silent, those queued behind it fail at once: they would hold the
        pool's memory, one after the other, for as long as it is silent.
        """
        jobs = [self._submit(*each) for each in zip(keys, memory_objs, strict=True)]
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(outcome, asyncio.CancelledError):
                raise ConnectionError("closed before all was written")
            if isinstance(outcome, BaseException):
                raise outcome

    def _submit(self, key: CacheEngineKey, memory: MemoryObj) -> asyncio.Future[None]:
        job = self._writers.submit(self._write, key, memory, time.monotonic())
        self.follow(job, key, memory)
        return self._awaited(job)

    def _write(self, key: CacheEngineKey, memory: MemoryObj, asked: float) -> None:
        if self._silent >= asked:
            raise ConnectionError("Redis did not take a record before this one")
        name, value, begun = key.to_string() + VALUE, bytes_of(memory), time.monotonic()

        tries = itertools.count()

        def write(sock: socket, deadline: float) -> bool:
            # Not in the second try: the first may have written it, and ASKING is for one command.
            asks = next(tries) == 0
            if asks:
                sockets.send(sock, sockets.command(b"EXISTS", _encoded(name)), deadline)
            sockets.send_value(sock, _encoded(name), value, deadline)
            *held, answer = sockets.replies(sock, 1 + asks, deadline)
            _checked(answer)
            return held == [b"1"]

        try:
            if self._twice(name, write, WRITE_SECONDS):
                self.rewritten(value.nbytes)
        except AskError as error:  # the slot has moved twice, or its node is none of the URL's
            self._refusals.explain(error)
            raise
        except (redis.ResponseError, redis.AuthenticationError) as error:  # an answer, however late
            self._refusals.say(error, self.cause(error))
            raise
        except Exception as error:
            if time.monotonic() - begun >= SILENT_SECONDS:
                self._silent = time.monotonic()
            ask = partial(self._refused_size, name, value.nbytes)
            self._refusals.explain(error, ask if isinstance(error, CLOSED) else None)
            raise

    def _refused_size(self, name: str, size: int) -> Exception | None:
        """Ask the server of a key whether it refuses values of a size; None if it does not."""
        refused, deadline = None, time.monotonic() + redis_failures.CAUSE_SECONDS
        with suppress(redis.RedisError, OSError), self._servers.of(name).connection() as sock:
            refused = sockets.refused_size(sock, _encoded(name), size, deadline)
            raise redis.RedisError("half a command was sent")  # so the connection is closed
        return refused

    def cause(self, error: Exception) -> str:
        return redis_failures.cause_of_failure(self._url, error)

    # Short calls

    async def exists(self, key: CacheEngineKey) -> bool:
        job = self._askers.submit(self._existing, [key], self._seconds)
        return (await self._awaited(job))[0]

    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> list[bool]:
        return self._ask(self._existing, keys, seconds)

    def _existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> list[bool]:
        try:
            return self._existing_by(keys, time.monotonic() + seconds)
        except Exception as error:
            self._refusals.explain(error)
            raise

    def _existing_by(self, keys: Sequence[CacheEngineKey], deadline: float) -> list[bool]:
        """Look up keys; those of a node that is lost are misses, unless all are."""
        names = [key.to_string() + VALUE for key in keys]
        answers = self._each(b"EXISTS", names, deadline)
        errors = [each for each in answers if isinstance(each, TRY_AGAIN)]
        if errors:
            # AskError alone changes no slots.
            moved = [each for each in errors if type(each) is not AskError]
            self._servers.refresh((moved or errors)[0])
            answers = self._each(b"EXISTS", names, deadline)
        lost = [each for each in answers if isinstance(each, CLOSED)]
        if lost and len(lost) == len(answers):
            raise lost[0]
        if lost and self._lost.is_news():
            logger.warning(
                "A node of %s does not answer (%s): what it holds is a miss.",
                self.shown,
                printable(str(lost[0])),
            )
        return [self._held(*each, deadline) for each in zip(names, answers, strict=True)]

    def _held(self, name: str, answer: Answer, deadline: float) -> bool:
        if type(answer) is AskError:  # the slot is moving to another node
            return self._exists_at(answer, name, deadline)
        return not isinstance(answer, CLOSED) and _is_one(answer)

    def _each(self, verb: bytes, names: list[str], deadline: float) -> list[Answer]:
        """Send a command for each name, all at once to each server; return the answers by name.

        An error of TRY_AGAIN is the answer for the names of its server.
        """
        asked: dict[Server, list[int]] = defaultdict(list)
        answers: list[Answer] = [b""] * len(names)
        self._servers.reach()
        for at, name in enumerate(names):
            try:
                asked[self._servers.of(name)].append(at)
            except TRY_AGAIN as error:
                answers[at] = error
        talks = {
            server: _talk(server, verb, [names[at] for at in places], deadline)
            for server, places in asked.items()
        }
        try:
            for _ in range(2):  # all are asked before one is waited for
                for server, talk in talks.items():
                    try:
                        for at, answer in zip(asked[server], next(talk, ())):
                            answers[at] = answer
                    except TRY_AGAIN as error:
                        for at in asked[server]:
                            answers[at] = error
        finally:
            for talk in talks.values():
                talk.close()
        return answers

    def _exists_at(self, where: AskError, name: str, deadline: float) -> bool:
        with self._servers.after(where, name).connection() as sock:
            _ask_anyway(sock, deadline)
            sockets.send(sock, sockets.command(b"EXISTS", _encoded(name)), deadline)
            return _is_one(sockets.replies(sock, 1, deadline)[0])

    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        self._ask(self._delete, key, seconds)

    def _delete(self, key: CacheEngineKey, seconds: float) -> bool:
        name = key.to_string() + VALUE

        def delete(sock: socket, deadline: float) -> bool:
            sockets.send(sock, sockets.command(b"DEL", _encoded(name)), deadline)
            return _is_one(sockets.replies(sock, 1, deadline)[0])

        return self._twice(name, delete, seconds)

    def delete_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        return self._ask(self._delete_all, keys, seconds)

    def _delete_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        deadline = time.monotonic() + seconds
        answers = self._each(b"DEL", [key.to_string() + VALUE for key in keys], deadline)
        # One after the other where a connection has ended, or a slot has moved to another node.
        again = [key for key, each in zip(keys, answers) if isinstance(each, TRY_AGAIN)]
        found = sum(_is_one(each) for each in answers if not isinstance(each, TRY_AGAIN))
        return found + sum(self._delete(key, deadline - time.monotonic()) for key in again)

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._ask(self._delete, key, self._seconds)

    def _ask(self, function: Callable[..., T], what: object, seconds: float) -> T:
        """Call on a thread, since resolving a host name has no deadline."""
        job = self._askers.submit(function, what, seconds)
        try:
            return job.result(seconds)
        finally:
            job.cancel()

    def _twice(self, name: str, job: Callable[[socket, float], T], seconds: float) -> T:
        """Run ``job`` on a connection to the server of a key; retry once after TRY_AGAIN."""
        deadline = time.monotonic() + seconds
        try:
            with self._servers.of(name).connection() as sock:
                return job(sock, deadline)
        except TRY_AGAIN as failure:
            error = failure
        with self._servers.after(error, name).connection() as sock:
            if type(error) is AskError:
                _ask_anyway(sock, deadline)
            return job(sock, deadline)

    async def list(self) -> list[str]:
        raise NotImplementedError("lmcache-hybrid inspect lists what a Redis holds")

    def _awaited(self, job: Future[T]) -> asyncio.Future[T]:
        """Wrap a job for the calling coroutine, whose end :meth:`close` waits for."""
        call = asyncio.current_task()
        if call is not None:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return awaited(job)

    async def close(self) -> None:
        """Wait for queued writes, then end threads, connections and who waits. Idempotent."""
        await self.flush(FLUSH_SECONDS)
        self._refusals.close()
        for threads in (self._readers, self._writers, self._askers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._servers.close()
        if self._calls:  # LMCache stops the loop next, and a call cut off then is logged
            await asyncio.wait(self._calls, timeout=END_SECONDS)


def connect(place: Place, context: ConnectorContext) -> HybridRedisConnector:
    """Make the connector to a place: server, cluster or primary. Nothing is sent yet."""
    return HybridRedisConnector(place.url, context)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _talk(
    server: Server, verb: bytes, names: Sequence[str], deadline: float
) -> Generator[Sequence[Answer], None, None]:
    """Send a command for each name at the first ``next``; receive the answers at the second."""
    with server.connection() as sock:
        commands = (sockets.command(verb, _encoded(name)) for name in names)
        sockets.send(sock, b"".join(commands), deadline)
        yield ()
        answers = sockets.replies(sock, len(names), deadline)
    yield answers


def _checked(answer: Answer) -> bytes:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _is_one(answer: Answer) -> bool:
    return _checked(answer) == b"1"


def _ask_anyway(sock: socket, deadline: float) -> None:
    """Make the node answer the next command although it does not own the slot yet."""
    sockets.send(sock, sockets.command(b"ASKING"), deadline)
    _checked(sockets.replies(sock, 1, deadline)[0])
