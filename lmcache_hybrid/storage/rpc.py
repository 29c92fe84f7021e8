# SPDX-License-Identifier: Apache-2.0
"""Sends lookups from the scheduler to every rank, over LMCache's ZMQ transports."""

import hashlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm import envs
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from lmcache_hybrid.config.parallel import spans_hosts
from lmcache_hybrid.core.backoff import Backoff
from lmcache_hybrid.core.by_ray import named_scheduler
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.identity.adapters import ADAPTERS
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import UNAVAILABLE, LookupRequest, LookupResult
from lmcache_hybrid.storage import engine_address, hosts
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.weights_guard import GuardedLookup
from lmcache_hybrid.upstream.lmcache_home import (
    SocketParams,
    ZmqReqRepClientTransport,
    ZmqRouterServerTransport,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lmcache_hybrid.core.counts import Ledger

logger = init_logger("vllm.lmcache_hybrid.storage.rpc")

# Seconds for which lookups miss at once after a rank did not answer in time; doubled with each
# further silence, up to the second.
FIRST_PAUSE_SECONDS = 1.0
PAUSE_SECONDS = 10.0
# Share of lookup_timeout_ms after which a rank ends its lookup, so that its answer arrives in time.
ANSWER_WITHIN = 0.8
# How often a rank looks whether it has ended.
RECEIVE_MS = 200
# Pause of a rank after its socket failed.
RETRY_SECONDS = 0.1
# Errors on a message that is not from our scheduler.
NO_LOOKUP = (ValueError, TypeError, RecursionError, msgspec.MsgspecError)

T = TypeVar("T", LookupResult, DropResult, KeepResult)
Request = LookupRequest | DropRequest | KeepRequest


def _socket_path(vllm_config: "VllmConfig", rank: int) -> str:
    """Return the path of a rank's socket, no longer than vLLM's own there.

    A socket's path has at most 107 characters. LMCache's name takes 77 without the folder, which
    is ``TMPDIR`` by default and may be long.
    """
    transfer = vllm_config.kv_transfer_config
    engine = transfer.engine_id, transfer.get_from_extra_config("lmcache_rpc_port", 0)
    name = hashlib.blake2b(repr(engine).encode(), digest_size=8).hexdigest()
    return f"{envs.VLLM_RPC_BASE_PATH}/lmcache-hybrid-{name}-{rank}"


class LookupClient:
    """Asks all ranks. Used by one thread at a time: that of the scheduler's lookup queue."""

    def __init__(self, vllm_config: "VllmConfig", timeout_ms: int) -> None:
        # None while it is not known where ranks on several hosts listen.
        self._transport: ZmqReqRepClientTransport | hosts.ClientTransport | None = None
        if not spans_hosts(vllm_config.parallel_config):
            ranks = range(vllm_config.parallel_config.world_size)
            self._transport = ZmqReqRepClientTransport(
                [SocketParams(_socket_path(vllm_config, rank), rank) for rank in ranks], timeout_ms
            )
        self._timeout_ms = timeout_ms
        self._pause = Backoff(FIRST_PAUSE_SECONDS, PAUSE_SECONDS)

    def connect(self, introduction: hosts.Introduction) -> None:
        """Connect to ranks on several hosts. Called once, before any lookup."""
        self._transport = hosts.ClientTransport(introduction, self._timeout_ms)

    def ask(self, request: LookupRequest) -> list[LookupResult]:
        """Send a lookup to all ranks; [] when one does not answer in time."""
        return self._ask("ask", request, LookupResult)

    def drop(self, request: DropRequest) -> list[DropResult]:
        """Let all ranks remove records of a prompt; [] when one does not answer in time."""
        return self._ask("drop", request, DropResult)

    def keep(self, request: KeepRequest) -> list[KeepResult]:
        """Let all ranks keep records of a prompt; [] when one does not answer in time."""
        return self._ask("keep", request, KeepResult)

    def _ask(self, verb: str, request: Request, answer: type[T]) -> list[T]:
        if self._pause.lasts:
            return []
        deadline = time.monotonic() + ANSWER_WITHIN * self._timeout_ms / 1000
        raw = self._send(verb, request, deadline)
        return [msgspec.msgpack.decode(each, type=answer) for each in raw]

    def clear(self, epoch: int) -> bool:
        """Make every rank forget its records; False when one did not confirm it.

        Args:
            epoch: number of this reset, see :class:`~.protocol.metadata.ConnectorMetadata`.
        """
        if self._transport is None:
            return True  # no rank could be reached so far, and each has nothing stored
        done = [msgspec.msgpack.decode(raw, type=bool) for raw in self._send("clear", epoch)]
        return len(done) == len(self._transport.sockets) and all(done)

    def contents(self, lora: LoRARequest) -> tuple[bytes, ...]:
        """Ask each rank for the content of an adapter; UNKNOWN where it does not know.

        Returns:
            By rank; empty when one does not answer.
        """
        if self._pause.lasts:
            return ()
        raw = self._send("adapter", lora)
        return tuple(msgspec.msgpack.decode(content, type=bytes) for content in raw)

    def _send(
        self, verb: str, body: Request | LoRARequest | int, deadline: float = math.inf
    ) -> list[bytes]:
        if self._transport is None:
            logger.warning_once(
                "The ranks on other hosts have not told the scheduler where they are, so nothing "
                "is looked up; their logs say why LMCache is off."
            )
            return []
        # LMCache's transport needs three frames, each packed by itself.
        raw = self._transport.send_and_recv_all([verb, msgspec.msgpack.encode(body), deadline])
        if raw:
            self._pause.succeed()
            return raw
        logger.warning(
            "A rank did not answer within %d ms (lookup_timeout_ms): "
            "computing without the cache for %.0f s.",
            self._timeout_ms,
            self._pause.fail(),
        )
        return raw

    def close(self) -> None:
        # Not transport.close(), which ends the process-wide ZMQ context.
        for socket in self._transport.sockets if self._transport is not None else ():
            socket.close(linger=0)


class LookupServer:
    """Answers the scheduler on a thread of its own until :meth:`close`.

    Starts before the store exists and answers UNAVAILABLE until :meth:`serve`, so a rank whose
    store failed never blocks the scheduler. The engine's main thread calls its methods.

    Where the ranks are on several hosts, nobody is answered before :meth:`introduce`.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Listen at this rank's address.

        Raises:
            ConfigError: another engine does, or this host has none that other hosts know.
        """
        parallel = vllm_config.parallel_config
        self._transport: ZmqRouterServerTransport | hosts.ServerTransport
        self._path = _socket_path(vllm_config, parallel.rank)
        self._address: int | None = None
        if spans_hosts(parallel):
            self._transport = hosts.ServerTransport(
                parallel.rank, RECEIVE_MS, named_scheduler(vllm_config)
            )
        else:
            self._address = engine_address.hold(
                self._path, vllm_config.kv_transfer_config.engine_id
            )
            try:
                self._transport = ZmqRouterServerTransport(self._path, recv_timeout_ms=RECEIVE_MS)
            except BaseException:
                engine_address.release(self._path, self._address)
                raise
        self._lookup: RankLookup | GuardedLookup | None = None
        self._clear: Callable[[int], None] | None = None
        self._drop: Callable[[DropRequest], DropResult] | None = None
        self._keep: Callable[[KeepRequest], KeepResult] | None = None
        self._ledger: Ledger[Any] | None = None
        # Of the newest reset, and of one that came before there was a store.
        self._epoch = self._unserved_epoch = 0
        self._lock = threading.Lock()  # serving thread, main thread
        self._verbs: dict[str, Callable[[bytes, float], Any]] = {
            "clear": self._reset,
            "adapter": self._content,
            "drop": self._remove,
            "keep": self._evict_last,
            hosts.CLOCK: lambda body, deadline: True,
        }
        self._running = True
        self._thread = threading.Thread(target=self._loop, name="hybrid-lookup", daemon=True)
        self._thread.start()

    def introduce(self) -> hosts.Introduction | None:
        """Make ranks on several hosts known to each other; a collective call of theirs.

        Returns:
            For the scheduler, on rank 0.
        """
        if not isinstance(self._transport, hosts.ServerTransport):
            return None
        self._transport.introduce()
        return self._transport.introduction

    def serve(
        self,
        lookup: RankLookup | GuardedLookup,
        clear: Callable[[int], None],
        ledger: "Ledger[Any]",
        drop: Callable[[DropRequest], DropResult] | None = None,
        keep: Callable[[KeepRequest], KeepResult] | None = None,
    ) -> None:
        """Answer from ``lookup`` from now on.

        Args:
            clear: clears the store for a reset.
            ledger: of this rank; counts errors from now on.
            drop: removes the records of a prompt.
            keep: lets them be evicted last.
        """
        with self._lock:
            self._ledger = ledger
            if self._unserved_epoch:
                clear(self._unserved_epoch)
            self._clear, self._lookup, self._drop, self._keep = clear, lookup, drop, keep

    def _loop(self) -> None:
        try:
            while self._running:
                self._serve_next()
        finally:
            self._transport.close()  # here: no other thread may touch a socket that is in use

    def _serve_next(self) -> None:
        try:
            self._serve_one()
        except NO_LOOKUP as error:
            # Without this thread every lookup would miss until the engine is restarted.
            logger.warning("A message that is not a lookup was dropped: %r", error)
        except Exception as error:
            lost = "a lookup may get no answer, which is a miss"
            caught("serve_lookup", error, lost, self._ledger)
            time.sleep(RETRY_SECONDS)

    def _serve_one(self) -> None:
        request = self._transport.recv_request()
        if request is None:
            return
        sender, (verb, body, deadline) = request
        answer = self._verbs.get(verb, self._answer)(body, float(deadline))
        self._transport.send_response(sender, msgspec.msgpack.encode(answer))
        self._refresh()

    def _answer(self, body: bytes, deadline: float) -> LookupResult:
        request = msgspec.msgpack.decode(body, type=LookupRequest)
        request = msgspec.structs.replace(request, deadline=deadline)
        try:
            if self._lookup is not None:
                return self._lookup.answer(request)
        except Exception as error:
            caught("answer_lookup", error, "it is a miss and its prompt is computed", self._ledger)
        return UNAVAILABLE

    def _refresh(self) -> None:
        try:
            if self._lookup is not None:
                self._lookup.refresh()
        except Exception as error:
            late = "what a lookup found is evicted as if it had not been used"
            caught("refresh_records", error, late, self._ledger)

    def _content(self, body: bytes, deadline: float) -> bytes:
        return ADAPTERS.content(msgspec.msgpack.decode(body, type=LoRARequest))

    def _remove(self, body: bytes, deadline: float) -> DropResult:
        request = msgspec.msgpack.decode(body, type=DropRequest)
        request = msgspec.structs.replace(request, deadline=deadline)
        if time.monotonic() > deadline:  # its caller has given up, and others may load since
            return DropResult(request.block or 0, waits=True)
        try:
            if self._drop is not None:
                return self._drop(request)
        except Exception as error:
            caught("drop_records", error, "records that a request drops may stay", self._ledger)
            return DropResult(failure="A rank met an unexpected error. Some records may be gone.")
        return DropResult(refusal="A rank has no store.")

    def _evict_last(self, body: bytes, deadline: float) -> KeepResult:
        request = msgspec.msgpack.decode(body, type=KeepRequest)
        if time.monotonic() > deadline:  # its caller has given up, and may have ended it since
            return KeepResult(failure="A rank was too busy. Some may keep their part: repeat it.")
        try:
            if self._keep is not None:
                return self._keep(request)
        except Exception as error:
            caught("keep_records", error, "a prompt may not be kept", self._ledger)
            return KeepResult(failure="A rank met an unexpected error. Nothing is kept: repeat it.")
        return KeepResult(failure="A rank has no store.")

    def _reset(self, body: bytes, deadline: float) -> bool:
        """Clear the store; True once this rank cannot serve anything stored before."""
        epoch = msgspec.msgpack.decode(body, type=int)
        try:
            with self._lock:
                if epoch < self._epoch:  # it was given up, and another one came before it
                    return False
                self._epoch = epoch
                if self._clear is None:  # no store yet, or none at all
                    self._unserved_epoch = epoch
                else:
                    self._clear(epoch)
            return True
        except Exception as error:
            what = "the reset fails: repeat it, or restart the engine"
            caught("reset_store", error, what, self._ledger)
            return False

    def close(self) -> None:
        self._running = False
        self._thread.join(timeout=5.0)
        address, self._address = self._address, None
        engine_address.release(self._path, address)
