# SPDX-License-Identifier: Apache-2.0
"""Lookups over LMCache's ZMQ transport; each rank is a process, as in an engine."""

import itertools
import logging
import multiprocessing
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import SimpleNamespace

from benchmarks.performance.path import prefix_of, rank
from benchmarks.performance.shapes import QWEN36_27B, Shape
from lmcache_hybrid.protocol.agreement import agree
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.rank_lookup import RankLookup

# Blocks and groups of a real model; a lookup reads no page.
SHAPE = Shape("tiny pages", QWEN36_27B.block_size, 1, 4096, QWEN36_27B.states, 4096, "")
TIMEOUT_MS = 10_000

_names = itertools.count()


def _config(engine_id: str, ranks: int, rank_: int = 0) -> SimpleNamespace:
    """What the transport reads of vLLM's configuration."""
    transfer = SimpleNamespace(
        engine_id=engine_id, get_from_extra_config=lambda name, default: default
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(world_size=ranks, rank=rank_),
    )


def _prefix(tokens: int) -> Prefix:
    return prefix_of(tokens // SHAPE.block_size, seed=tokens)


class _Timed:
    """A rank's lookup that measures its answers."""

    def __init__(self, lookup: RankLookup, forget: Callable[[], None]) -> None:
        self._lookup, self._forget = lookup, forget
        self.refresh = lookup.refresh
        self.seconds: list[float] = []

    def answer(self, request: LookupRequest) -> LookupResult:
        self._forget()
        started = time.perf_counter()
        result = self._lookup.answer(request)
        if request.limit:
            self.seconds.append(time.perf_counter() - started)
        return result


def _serve(engine_id: str, rank_: int, lengths: Sequence[int], pipe: Connection) -> None:
    """Be one rank with prompts of so many tokens in LMCache's RAM, until the pipe is closed.

    Sends the seconds of its answers whenever it is asked. LMCache's keys are made anew for each
    lookup, as for a prompt that was not seen lately.
    """
    from lmcache_hybrid.storage.rpc import LookupServer

    logging.disable(logging.ERROR)
    with rank("ram", SHAPE, sum(lengths) // SHAPE.block_size) as one:
        for tokens in lengths:
            one.save(f"save {tokens}", _prefix(tokens))
        timed = _Timed(one.lookup, one.store._names._keys.cache_clear)
        server = LookupServer(_config(engine_id, 1, rank_))
        server.serve(timed, lambda epoch: None, one.worker.ledger)
        try:
            pipe.send([])
            while True:
                pipe.recv()
                pipe.send(timed.seconds)
                timed.seconds.clear()
        except EOFError:
            server.close()


def lookups(
    lengths: Sequence[int], counts: Sequence[int], rounds: int
) -> dict[str, dict[str, float | list[float]]]:
    """Seconds of lookups that hit at the last boundary of a prompt.

    Args:
        lengths: of the prompts, in tokens.
        counts: of the ranks that are asked.

    Returns:
        By prompt and ranks. ``one_rank`` is what a rank needs for its answer without the
        transport; ``all`` is what the scheduler's thread waits for.
    """
    from lmcache_hybrid.storage.rpc import LookupClient

    engine_id, context = f"bench-{uuid.uuid4()}", multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for number in range(max(counts)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(engine_id, number, lengths, theirs), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)
            pipes.append(ours)
        assert all(pipe.recv() == [] for pipe in pipes)
        found = {}
        for tokens, ranks in itertools.product(lengths, counts):
            client = LookupClient(_config(engine_id, ranks), TIMEOUT_MS)
            stack.callback(client.close)
            times = _ask(client.ask, _prefix(tokens), rounds)
            pipes[0].send(None)
            one_rank = pipes[0].recv()[1:]
            found[f"{tokens} tokens, {ranks} ranks"] = {**times, "one_rank": one_rank}
        return found


def _ask(
    send: Callable[[LookupRequest], list[LookupResult]], prefix: Prefix, rounds: int
) -> dict[str, float | list[float]]:
    blocks, seconds, questions = len(prefix.hashes), [], 0

    def ask(question: LookupRequest) -> list[LookupResult]:
        nonlocal questions
        questions += 1
        return send(question)

    for _ in range(rounds + 1):
        request = LookupRequest(f"r{next(_names)}", prefix, blocks, 0)
        started = time.perf_counter()
        answer = agree(ask, request)
        seconds.append(time.perf_counter() - started)
        assert answer.boundary == blocks
        send(LookupRequest(request.request_id, prefix, 0, 0))  # the claim is given up
        time.sleep(0.01)  # the ranks are idle again
    return {"all": seconds[1:], "round_trips": questions / (rounds + 1), "blocks": blocks}
