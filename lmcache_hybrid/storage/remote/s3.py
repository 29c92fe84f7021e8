# SPDX-License-Identifier: Apache-2.0
"""Records as objects of an S3 bucket, through AWS' own client.

LMCache's connector makes the client from its options: endpoint, region, threads, HTTP/2, TLS, S3
Express, credentials. Nothing else of it is used: it writes and reads values of one chunk's size
only, blocks its event loop for each lookup, never notices that an object it saw once is gone, and
stops using the store after the third failed connection.
"""

import asyncio
import io
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy
import torch
from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.s3 import S3Request, S3RequestType, S3ResponseError
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.s3_adapter import S3ConnectorAdapter
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_hybrid.config.stores.base import Place
from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.remote import s3_failures
from lmcache_hybrid.storage.remote.record_connector import BatchConnector, awaited
from lmcache_hybrid.storage.remote.refusals import Refusals

# Writes in flight at once, and the seconds that one may take.
WRITERS = 4
WRITE_SECONDS = 20.0
# Max seconds to wait at shutdown for queued writes, and for cancelled requests.
FLUSH_SECONDS, CANCEL_SECONDS = 8.0, 2.0
# HEAD requests in flight at once. A LIST would return the records of all prompts of a model.
SIDE_BY_SIDE = 64
# Max seconds since S3 showed an object to our keys, for its 403 of another one to mean "not there".
TRUSTED_SECONDS = 600.0

T = TypeVar("T")
_CODE = re.compile(rb"<Code>(\w{1,64})</Code>")
# What to look at, by code, or by status where an answer has no body, as one to HEAD.
_REST = "their session, extra_config.s3_region and this machine's clock"
_MEANINGS = {
    "400": f": look at its keys, {_REST}",
    "403": (
        ": its keys may not do this; without s3:ListBucket S3 says so of each object that is not "
        f"there; else look at {_REST}"
    ),
    "AuthorizationHeaderMalformed": ": extra_config.s3_region is not the bucket's",
    "ExpiredToken": ": the session of its keys has ended",
    "InvalidAccessKeyId": ": it knows no such key, or its session token is missing",
    "InvalidToken": ": its session token is wrong",
    "NoSuchBucket": ": there is no such bucket",
    "RequestTimeTooSkewed": ": this machine's clock is wrong",
    "SignatureDoesNotMatch": ": its secret key is wrong",
}


class S3Error(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status code.
        code: S3's own word for it, "" without one.
    """

    def __init__(self, error: S3ResponseError) -> None:
        self.status = error.status_code
        found = _CODE.search(error.body or b"")
        self.code = found[1].decode() if found else ""
        why = f" {self.code}" if self.code else ""
        meaning = _MEANINGS.get(self.code or str(self.status), "")
        super().__init__(f"S3 answered {self.status}{why} to {error.operation_name}{meaning}")


class HybridS3Connector(BatchConnector):
    """One object per record. Its coroutines run on LMCache's event loop.

    AWS' client reads and writes the pool's memory on threads of its own. So each request holds a
    reference to its memory until the client has ended it, even if nobody waits any more.
    """

    def __init__(self, theirs: S3Connector, context: ConnectorContext) -> None:
        """Take over a connector's client. Nothing is sent yet.

        Args:
            theirs: LMCache's connector; closed with this one.
        """
        super().__init__(context)
        self._theirs = theirs
        self._writers = asyncio.Semaphore(WRITERS)
        self._writing: set[asyncio.Task] = set()
        self._in_flight: set[S3Request] = set()
        self._batches: set[asyncio.Future[list[BaseException | None]]] = set()
        self._closed = False
        self._unreachable = -math.inf  # time.monotonic of the last write that got no answer
        self._let_in = -math.inf  # time.monotonic of the last object that we were shown
        self._tls = not (context.config.extra_config or {}).get("disable_tls")
        self.shown = f"s3://{theirs.s3_endpoint}"
        self._refusals = Refusals(self.shown, self.cause)

    def cause(self, error: Exception) -> str:
        if _is_s3(error):
            return ""
        if isinstance(error, AwsCrtError) and "CREDENTIALS" in error.name:
            return s3_failures.no_credentials()
        theirs = self._theirs
        silence = s3_failures.cause_of_silence(theirs.s3_endpoint, self._tls)
        return silence or s3_failures.lack_of_credentials(theirs.credentials_provider)

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the object exists. Raises S3Error or AwsCrtError if the server cannot tell."""
        return (await self._existing([key]))[0]

    async def _existing(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        """Ask for each object; see :meth:`exists`.

        Keys that may not list the bucket are answered 403 in place of 404. So are keys that may
        not read, though they may write: only an object that we were shown tells the two apart.
        """
        found = await self._each(self._head, keys)
        refusal = next((each for each in found if isinstance(each, S3Error)), None)
        if refusal is not None and time.monotonic() - self._let_in >= TRUSTED_SECONDS:
            raise refusal
        return [each is True for each in found]

    async def _head(self, key: CacheEngineKey) -> bool | S3Error:
        """Whether an object exists; a 403 is returned, too, see :meth:`_existing`."""
        try:
            await self._answer(self._request("HEAD", key, S3RequestType.DEFAULT, "HeadObject"))
        except S3Error as error:
            if error.status == 404:
                return False
            if error.status == 403 and not error.code:
                return error
            raise
        self._let_in = time.monotonic()
        return True

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self._wait(self.exists(key), self._seconds)

    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> list[bool]:
        """Ask for up to SIDE_BY_SIDE objects at once; S3 has no request for several."""
        try:
            return self._wait(self._existing(keys), seconds)
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Have the log say why the server does not answer. Never blocks."""
        if not _is_s3(error):
            self._refusals.explain_aside(error)

    async def _each(
        self, ask: Callable[[CacheEngineKey], Awaitable[T]], keys: Sequence[CacheEngineKey]
    ) -> list[T]:
        turns = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(key: CacheEngineKey) -> T:
            async with turns:
                return await ask(key)

        return await asyncio.gather(*map(one, keys))

    def _wait(self, job: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run on LMCache's loop; cancel after ``seconds``."""
        answer = asyncio.run_coroutine_threadsafe(job, self._theirs.loop)
        try:
            return answer.result(seconds)
        finally:
            answer.cancel()

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Read an object into memory of its size, which the caller then owns.

        Returns:
            None if there is no such object.

        Raises:
            Exception: no memory of this size, or the server did not send all of it.
        """
        read = _Read(self._theirs.local_cpu_backend)
        request = self._request(
            "GET",
            key,
            S3RequestType.GET_OBJECT,
            on_headers=read.reserve,
            on_body=read.write,
        )
        try:
            await self._answer(request)
            return read.whole()
        except BaseException as error:
            request.finished_future.add_done_callback(lambda _: read.release())
            if isinstance(error, S3Error) and error.status == 404:
                return None
            raise

    def has_told(self, error: Exception) -> bool:
        return False

    async def write(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """See :meth:`.BatchConnector.write`; the caller keeps its references.

        If one gets no answer, those queued behind it fail at once: they would hold the pool's
        memory, one after the other, for as long as the server is away.
        """
        batch = asyncio.gather(*map(self._put, keys, memory_objs), return_exceptions=True)
        self._batches.add(batch)  # its tasks begin later than a close that follows at once
        batch.add_done_callback(self._batches.discard)
        for outcome in await batch:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        task, asked = asyncio.current_task(), time.monotonic()
        assert task is not None
        self._writing.add(task)
        self.in_flight.begin(key)
        try:
            async with self._writers:
                if self._unreachable >= asked:
                    raise ConnectionError("S3 did not take a record before this one")
                await self._write(key, memory_obj)
            self.written(key)
        except ConnectionError:
            self.failed(1)
            raise
        except Exception as error:
            if not isinstance(error, S3Error):
                self._unreachable = time.monotonic()
            self.failed(1)
            self._explain(error)
            raise
        finally:
            self.in_flight.end(key)
            self._writing.discard(task)

    async def _write(self, key: CacheEngineKey, memory: MemoryObj) -> None:
        body = _Body(memory.byte_array)
        memory.ref_count_up()
        try:
            request = self._request("PUT", key, S3RequestType.PUT_OBJECT, body=body)
        except BaseException:
            memory.ref_count_down()
            raise
        request.finished_future.add_done_callback(lambda _: memory.ref_count_down())
        await self._answer(request, WRITE_SECONDS)

    @property
    def writing(self) -> int:
        return len(self._writing)

    @property
    def uses_memory(self) -> bool:
        return bool(self._in_flight)

    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        self._wait(self._delete(key), seconds)

    async def _delete(self, key: CacheEngineKey) -> None:
        try:
            await self._answer(self._request("DELETE", key, S3RequestType.DEFAULT, "DeleteObject"))
        except S3Error as error:
            if error.status != 404:
                raise

    def delete_all(self, keys: Sequence[CacheEngineKey], seconds: float) -> int:
        """Delete up to SIDE_BY_SIDE objects at once; S3's request for several needs a digest."""
        return sum(self._wait(self._each(self._delete_held, keys), seconds))

    async def _delete_held(self, key: CacheEngineKey) -> bool:
        held = await self.exists(key)
        if held:
            await self._delete(key)
        return held

    def _request(
        self,
        method: str,
        key: CacheEngineKey,
        kind: S3RequestType,
        operation: str | None = None,
        body: "_Body | None" = None,
        **callbacks: Callable[..., None],
    ) -> S3Request:
        theirs = self._theirs
        headers = HttpHeaders([("Host", theirs.s3_endpoint)])
        if body is not None:
            headers.add("Content-Length", str(len(body)))
            headers.add("Content-Type", "application/octet-stream")
        request = S3Request(
            client=theirs.s3_client,
            type=kind,
            request=HttpRequest(method, theirs._format_safe_path(key.to_string()), headers, body),
            operation_name=operation,
            credential_provider=theirs.credentials_provider,
            region=theirs.s3_region,
            **callbacks,
        )
        self._in_flight.add(request)
        request.finished_future.add_done_callback(lambda _: self._in_flight.discard(request))
        return request

    async def _answer(self, request: S3Request, seconds: float | None = None) -> None:
        """Wait for the end of a request; cancel it after ``seconds``, or if cancelled.

        Raises:
            S3Error: the server answered with an error.
            Exception: no answer within ``seconds``, or an error of a callback.
        """
        ended = awaited(request.finished_future)
        try:
            await asyncio.wait_for(asyncio.shield(ended), seconds)
        except S3ResponseError as error:
            raise S3Error(error) from None
        except (asyncio.CancelledError, TimeoutError):
            request.cancel()
            raise

    async def list(self) -> list[str]:
        raise NotImplementedError

    async def close(self) -> None:
        """Wait for queued writes, FLUSH_SECONDS at most, and cancel the rest. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._batches:
            await asyncio.wait(self._batches, timeout=FLUSH_SECONDS)
        self._refusals.close()
        rest = list(self._in_flight)
        for request in rest:
            request.cancel()
        if rest:
            ends = [awaited(request.finished_future) for request in rest]
            await asyncio.wait(ends, timeout=CANCEL_SECONDS)
        await self._theirs.pq_executor.shutdown_async(False)


def connect(place: Place, context: ConnectorContext) -> HybridS3Connector:
    """Make the connector to a bucket; LMCache's own adapter reads the options."""
    return HybridS3Connector(S3ConnectorAdapter().create_connector(context), context)


def _is_s3(error: Exception) -> bool:
    """Whether an S3 server said so; a plain client is told 400 by one that speaks TLS only."""
    return isinstance(error, S3Error) and (error.status != 400 or bool(error.code))


class _Read:
    """Reads one object into the pool's memory. AWS' client calls it, on one thread."""

    def __init__(self, pool: LocalCPUBackend) -> None:
        self._pool = pool
        self._memory: MemoryObj | None = None
        self._target: numpy.ndarray = numpy.empty(0, numpy.uint8)
        self._received = 0

    def reserve(self, status_code: int, headers: Sequence[tuple[str, str]], **_: Any) -> None:
        """Allocate memory of the object's size. Raises MemoryError if the pool has none."""
        if status_code not in (200, 206) or self._memory is not None:
            return
        length = next((value for name, value in headers if name.lower() == "content-length"), "")
        size = int(length) if length.isdigit() else 0
        memory = self._pool.allocate(record_shape(size), torch.uint8, MemoryFormat.KV_2LTD)
        if memory is None:
            raise MemoryError(f"no memory for an object of {length or 'unknown'} bytes")
        self._memory = memory
        self._target = numpy.frombuffer(memory.byte_array, numpy.uint8)[:size]

    def write(self, chunk: bytes, offset: int, **_: Any) -> None:
        """Copy a part, without the GIL. Raises ValueError if it lies past the object's end."""
        numpy.copyto(
            self._target[offset : offset + len(chunk)], numpy.frombuffer(chunk, numpy.uint8)
        )
        self._received += len(chunk)

    def whole(self) -> MemoryObj:
        """Return the memory. Raises EOFError if a part of the object is missing."""
        if self._memory is None or self._received != len(self._target):
            raise EOFError(f"S3 sent {self._received} of {len(self._target)} bytes of an object")
        return self._memory

    def release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.ref_count_down()


class _Body(io.RawIOBase):
    """A record as a stream that AWS' client reads parts from, without the GIL."""

    def __init__(self, record: memoryview | bytes) -> None:
        self._record = numpy.frombuffer(record, numpy.uint8)
        self._at = 0

    def __len__(self) -> int:
        return len(self._record)

    def readinto(self, buffer: Any) -> int:
        part = self._record[self._at : self._at + len(buffer)]
        numpy.copyto(numpy.frombuffer(buffer, numpy.uint8)[: len(part)], part)
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
