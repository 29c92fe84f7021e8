# SPDX-License-Identifier: Apache-2.0
"""Carries lookups between hosts: LMCache's ZMQ transports over TCP, encrypted by CURVE.

vLLM's ranks tell each other where they listen and their public keys, over the process group that
vLLM has made (:meth:`ServerTransport.introduce`). Rank 0, on the scheduler's host, hands this and
the scheduler's secret key to the scheduler with vLLM's handshake metadata, in that host's memory.
So only public keys and encrypted messages cross hosts. A rank answers nobody but the scheduler.

Where Ray places the ranks, the scheduler's process makes its keys (:mod:`..core.by_ray`).
"""

import math
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip, get_tcp_uri, is_valid_ipv6_address
from zmq.utils import z85

from lmcache_hybrid.core.by_ray import node_address, scheduler_keys
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.upstream.lmcache_home import (
    SocketParams,
    ZmqReqRepClientTransport,
    ZmqRouterServerTransport,
)

logger = init_logger("vllm.lmcache_hybrid.storage.hosts")

# A host that is gone for so long loses its connections; a new one is made when it is back.
HEARTBEAT_MS, GONE_MS = 5_000, 15_000
# No lookup is larger: one of a million tokens has 130 kB.
MOST_BYTES = 1 << 26
# Seconds after which a rank's clock is asked for again: clocks run apart, by 0.5 ms a second at
# most while they are being corrected.
CLOCK_SECONDS = 60.0
# A verb that no rank knows would be a lookup; see :meth:`.rpc.LookupServer`.
CLOCK = "clock"
# How often the authenticator looks whether it has ended.
_LOOK_MS = 200
_STAMP = struct.Struct("!d")
_DOMAIN = b"lmcache-hybrid"


@dataclass(frozen=True)
class Introduction(KVConnectorHandshakeMetadata):
    """What the scheduler needs to ask the ranks, from rank 0.

    Attributes:
        addresses: by rank, as ``tcp://10.0.0.1:40123``.
        rank_keys: their public keys, likewise.
        public_key: of the scheduler; no rank answers another one's.
        secret_key: likewise. It stays on the scheduler's host; empty where the scheduler's
            process has made it.
    """

    addresses: tuple[str, ...]
    rank_keys: tuple[bytes, ...]
    public_key: bytes
    secret_key: bytes = field(repr=False)


def own_address() -> str:
    """Return this host's address for vLLM on other hosts.

    Raises:
        ConfigError: vLLM finds none.
    """
    host: str = get_ip()
    if host == "0.0.0.0":
        raise ConfigError(
            "vLLM finds no address of this host at which other hosts could ask its ranks; set "
            "VLLM_HOST_IP."
        )
    return host


class _Authenticator:
    """Tells libzmq whom to let in, by its authentication protocol, on a thread of its own.

    Not pyzmq's, which writes to its thread also when it is collected in a forked process.
    """

    def __init__(self, context: zmq.Context, admits: Callable[[bytes], bool]) -> None:
        """
        Args:
            context: of the sockets whose peers are let in or not.
            admits: whether a peer with this public key is let in; this thread calls it.
        """
        self._admits, self._running = admits, True
        self._socket = context.socket(zmq.ROUTER)  # the thread's, once it runs
        self._socket.setsockopt(zmq.RCVTIMEO, _LOOK_MS)
        self._socket.bind("inproc://zeromq.zap.01")
        self._thread = threading.Thread(target=self._loop, name="hybrid-admit", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        try:
            while self._running:
                try:
                    self._answer_one()
                except zmq.Again:
                    continue
                except Exception as error:
                    caught("serve_lookup", error, "somebody is not let in")
                    time.sleep(_LOOK_MS / 1000)
        finally:
            self._socket.close(linger=0)

    def _answer_one(self) -> None:
        peer, _, version, number, domain, _, _, *proof = self._socket.recv_multipart()
        admitted = len(proof) == 2 and (domain, proof[0]) == (_DOMAIN, b"CURVE")
        admitted = admitted and self._admits(z85.encode(proof[1]))
        code = b"200" if admitted else b"400"
        self._socket.send_multipart([peer, b"", version, number, code, b"", b"", b""])

    def close(self) -> bool:
        """End the thread; whether it has ended."""
        self._running = False
        self._thread.join(timeout=5.0)
        return not self._thread.is_alive()


class ServerTransport(ZmqRouterServerTransport):
    """A rank's socket. Nobody is let in before :meth:`introduce`.

    Owned by one thread, but for :meth:`introduce`, which the main thread calls once.

    Attributes:
        address: where it listens.
        introduction: for the scheduler; rank 0 has it after :meth:`introduce`.
    """

    def __init__(self, rank: int, recv_timeout_ms: int, scheduler: bytes | None = None) -> None:
        """Listen at the address that vLLM's ranks use between hosts.

        Args:
            scheduler: its public key where Ray has placed this rank; None where rank 0 makes it.

        Raises:
            ConfigError: vLLM does not know this host's address, or it is not of this host.
        """
        # Not LMCache's constructor, which makes a local socket.
        self.decoder = msgspec.msgpack.Decoder()
        self.introduction: Introduction | None = None
        self._rank, self._admitted, self._warned = rank, b"", False
        self._public_key, secret_key = zmq.curve_keypair()
        self._scheduler = scheduler
        host = own_address() if scheduler is None else node_address()
        self.ctx = zmq.Context()
        self._authenticator = _Authenticator(self.ctx, self._admits)
        self.socket = self.ctx.socket(zmq.ROUTER)
        try:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            # Without the authenticator's thread, let nobody in.
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self.socket.setsockopt(zmq.RCVTIMEO, recv_timeout_ms)
            _limit(self.socket, host)
            self.socket.bind(get_tcp_uri(host, 0))
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                remedy = "set VLLM_HOST_IP" if scheduler is None else "ray start --node-ip-address"
                raise ConfigError(
                    f"no socket can listen at {host}, this host's address for vLLM "
                    f"({error.strerror}); {remedy}."
                ) from error
            raise
        self.socket_path = self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        logger.info("Lookups of rank %d are answered at %s, encrypted.", rank, self.address)

    def _admits(self, key: bytes) -> bool:
        """Whether a peer with this public key is let in. The authenticator's thread calls it."""
        if self._admitted and key == self._admitted:
            return True
        if not self._warned:
            self._warned = True
            logger.warning(
                "Somebody who is not this engine's scheduler was turned away at %s, and so will be "
                "others.",
                self.address,
            )
        return False

    def introduce(self) -> None:
        """Exchange addresses and public keys; from now on the scheduler is let in.

        A collective call: every rank makes it once, on the main thread.

        Raises:
            RuntimeError: on all ranks; vLLM's process group has another order than its ranks.
        """
        from vllm.distributed.parallel_state import get_world_group

        public_key, secret_key = self._scheduler or b"", b""
        if self._rank == 0 and self._scheduler is None:
            public_key, secret_key = zmq.curve_keypair()
        group = get_world_group()
        own = self._rank, self.address, self._public_key, public_key
        ranks: list[tuple[int, str, bytes, bytes]] = [own] * group.world_size
        torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
        numbers, addresses, keys, (admitted, *_) = zip(*ranks, strict=True)
        if numbers != tuple(range(len(numbers))):
            raise RuntimeError(f"vLLM's process group has its ranks in this order: {numbers}")
        if self._rank == 0:
            self.introduction = Introduction(addresses, keys, public_key, secret_key)
        self._admitted = admitted

    def send_response(self, identity: bytes, response: bytes) -> None:
        """Answer, with the time on this rank's clock behind it."""
        super().send_response(identity, response + _STAMP.pack(time.monotonic()))

    def close(self) -> None:
        super().close()
        if self._authenticator.close():
            self.ctx.term()


class ClientTransport(ZmqReqRepClientTransport):
    """The scheduler's sockets, one per rank. Used by one thread at a time.

    Clocks of two hosts have nothing in common. Each answer tells the time on the rank's, which
    bounds how far the two are apart: a deadline is sent in the rank's time, and never too late.
    """

    def __init__(self, introduction: Introduction, timeout_ms: int) -> None:
        if not introduction.secret_key:
            public_key, secret_key = scheduler_keys()
            if public_key != introduction.public_key:
                raise RuntimeError("the ranks know another scheduler than this one")
            introduction = replace(introduction, secret_key=secret_key)
        self._introduction = introduction
        # By rank: its clock less ours, at least; and ours when that was last asked for.
        self._ahead = [-math.inf] * len(introduction.addresses)
        self._learned = -math.inf
        super().__init__(
            [SocketParams(each, rank) for rank, each in enumerate(introduction.addresses)],
            timeout_ms,
        )

    def _create_socket(self, params: Any) -> zmq.Socket:
        known = self._introduction
        socket = self.ctx.socket(zmq.REQ)
        socket.setsockopt(zmq.CURVE_SERVERKEY, known.rank_keys[params.rank])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, known.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, known.secret_key)
        socket.setsockopt(zmq.RCVTIMEO, self.timeout_ms)
        socket.setsockopt(zmq.SNDTIMEO, self.timeout_ms)
        _limit(socket, params.socket_path.removeprefix("tcp://[").partition("]")[0])
        socket.connect(params.socket_path)
        return socket

    def send_and_recv_all(self, msg: list[Any]) -> list[bytes]:
        """Send a verb, its body, and the deadline on this clock to all ranks.

        Returns:
            By rank; empty when one does not answer in time.
        """
        began = time.monotonic()
        if began > self._learned + CLOCK_SECONDS:
            self._ahead = [-math.inf] * len(self._ahead)
            if not self._ask([CLOCK, b"", 0.0]):
                return []
            self._learned = time.monotonic()
            verb, body, deadline = msg
            msg = [verb, body, deadline + self._learned - began]
        return self._ask(msg)

    def _ask(self, message: list[Any]) -> list[bytes]:
        verb, body, deadline = message
        head = [self.encoder.encode(verb), self.encoder.encode(body)]
        answers = []
        rank = 0
        sent = []
        try:
            for rank, socket in enumerate(self.sockets):
                until = self.encoder.encode(deadline + self._ahead[rank])
                sent.append(time.monotonic())
                socket.send_multipart([*head, until])
            for rank, socket in enumerate(self.sockets):
                answer = socket.recv()
                answers.append(answer[: -_STAMP.size])
                (then,) = _STAMP.unpack(answer[-_STAMP.size :])
                if self._ahead[rank] > then - sent[rank]:  # it has lost time, as a paused host does
                    self._ahead[rank] = -math.inf
                self._ahead[rank] = max(self._ahead[rank], then - time.monotonic())
        except zmq.ZMQError as error:
            logger.debug("Rank %d at %s: %s", rank, self.socket_params[rank].socket_path, error)
            self._recreate_all_sockets()
            self._learned = -math.inf  # a host that was suspended has a clock that is behind
            return []
        return answers


def _limit(socket: zmq.Socket, host: str) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, GONE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.IPV6, is_valid_ipv6_address(host))
