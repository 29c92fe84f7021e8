# SPDX-License-Identifier: Apache-2.0
"""A consumer of an engine's KV cache events: knows nothing but what comes over ZMQ."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

STATE, ATTENTION = "mamba", "full_attention"


class Index:
    """What an engine can load, from its events alone, see docs/events.md.

    Attributes:
        held: by block hash and group, where it is announced: (medium, locality, ownership).
        kinds: of each group.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.seen: list = []
        self.clear()

    def clear(self) -> None:
        self.held: dict = defaultdict(lambda: defaultdict(set))
        # By hash of the block before: {tokens: hash}.
        self.next: dict = defaultdict(dict)

    def take(self, event) -> None:
        self.seen.append(event)
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif event.medium == "GPU":
            return
        elif isinstance(event, BlockStored):
            (block_hash,) = event.block_hashes
            assert len(event.token_ids) == event.block_size > 0
            self.kinds[event.group_idx] = event.kv_cache_spec_kind
            self.next[event.parent_block_hash][tuple(event.token_ids)] = block_hash
            self.held[block_hash][event.group_idx].add(where(event))
        else:
            assert isinstance(event, BlockRemoved)
            for block_hash in event.block_hashes:
                self.held[block_hash][event.group_idx].remove(where(event))

    def groups(self, kind: str) -> list[int]:
        return [group for group, each in self.kinds.items() if each == kind]

    def holds(self, block_hash, kind: str) -> bool:
        groups = self.groups(kind)
        return bool(groups) and all(self.held[block_hash][group] for group in groups)

    def deepest(self, prompt: Sequence[int], kind: str = STATE) -> int:
        """Tokens of ``prompt`` up to its deepest boundary with all groups of ``kind``."""
        deepest, waiting = 0, [(None, 0)]
        while waiting:
            parent, start = waiting.pop()
            for tokens, block_hash in self.next[parent].items():
                end = start + len(tokens)
                # The last token is always computed.
                if end < len(prompt) and tuple(prompt[start:end]) == tokens:
                    if not self.holds(block_hash, ATTENTION):
                        continue
                    if self.holds(block_hash, kind):
                        deepest = max(deepest, end)
                    waiting.append((block_hash, end))
        return deepest

    def media(self) -> dict[str, int]:
        """Announced records by medium."""
        counts: dict[str, int] = defaultdict(int)
        for groups in self.held.values():
            for places in groups.values():
                for medium, *_ in places:
                    counts[medium] += 1
        return dict(counts)


def where(event) -> tuple:
    return event.medium, event.locality, event.ownership


class Subscriber:
    """Follows a publisher on a thread of its own; asks for what it missed.

    Attributes:
        index: of the engine. Take ``lock`` to read it.
        lose: whether to drop the batch of this number, as a network may.
        replayed: batches that came by the replay socket.
    """

    def __init__(self, port: int, replay_port: int) -> None:
        context = zmq.Context.instance()
        self.socket = context.socket(zmq.SUB)
        # As soon as a new engine listens: what is published before is lost, and nothing may follow.
        self.socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.index, self.lock = Index(), threading.Lock()
        self.lose: Callable[[int], bool] = lambda number: False
        self.number, self.replayed, self.last = -1, 0, time.monotonic()
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            if not self.socket.poll(50):
                continue
            _, number, batch = self.socket.recv_multipart()
            at = int.from_bytes(number, "big")
            if self.lose(at):
                continue
            with self.lock:
                if at <= self.number:  # a new engine counts from 0
                    self.index, self.number = Index(), -1
                if at > self.number + 1:
                    self._catch_up()
                if at == self.number + 1:
                    self._take(at, batch)

    def _catch_up(self) -> None:
        self.replay.send_multipart([b"", (self.number + 1).to_bytes(8, "big")])
        while self.replay.poll(10_000):
            _, _, number, batch = self.replay.recv_multipart()
            at = int.from_bytes(number, "big", signed=True)
            if at < 0:
                return
            if at == self.number + 1:
                self.replayed += 1
                self._take(at, batch)
        raise TimeoutError("no replay")

    def _take(self, at: int, batch: bytes) -> None:
        self.number, self.last = at, time.monotonic()
        for event in self._decode(batch).events:
            self.index.take(event)

    def settled(self, quiet: float = 0.3, seconds: float = 20.0) -> Index:
        """The index, once no event has come for ``quiet`` seconds."""
        deadline = time.monotonic() + seconds
        start = time.monotonic()
        while time.monotonic() - max(self.last, start) < quiet:
            assert time.monotonic() < deadline, "events do not end"
            time.sleep(0.02)
        return self.index

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self.socket.close(linger=0)
        self.replay.close(linger=0)
