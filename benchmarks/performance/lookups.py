# SPDX-License-Identifier: Apache-2.0
"""Lookups over LMCache's ZMQ transport, with ranks as threads of this process."""

import itertools
import time
from contextlib import ExitStack
from types import SimpleNamespace

from benchmarks.performance.path import prefix_of
from benchmarks.performance.shapes import QWEN36_27B, Shape
from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.lookup import LookupRequest, agree
from lmcache_hybrid.protocol.prefix import Prefix, load_keys
from lmcache_hybrid.storage.rank_lookup import RankLookup
from tests.naive_store import NaiveStore

_names = itertools.count()


def _config(ranks: int, rank: int = 0) -> SimpleNamespace:
    """What the transport reads of vLLM's configuration."""
    transfer = SimpleNamespace(
        engine_id=f"bench-{next(_names)}", get_from_extra_config=lambda name, default: default
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(world_size=ranks, rank=rank),
    )


class Counted(NaiveStore):
    """Holds all records of a prefix but their bytes."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        plan, blocks = QWEN36_27B.plan, len(prefix.hashes)
        for key in load_keys(prefix, 0, blocks, plan):
            assert key.kind in (ATTENTION, STATE)
            self.records[key] = bytearray()


def lookups(tokens: int, ranks: int, rounds: int) -> dict[str, float | list[float]]:
    """Seconds of a lookup that hits at the last boundary of ``tokens`` tokens.

    The store is a dict, so the time is that of our own code and of the transport.
    ``one_rank`` is what a rank needs for its answer, without the transport.
    """
    from lmcache_hybrid.storage.rpc import LookupClient, LookupServer

    blocks = tokens // QWEN36_27B.block_size
    prefix, plan = prefix_of(blocks), QWEN36_27B.plan
    config = _config(ranks)
    times: dict[str, list[float]] = {"one_rank": [], "all": []}
    questions = 0
    with ExitStack() as stack:
        found = [RankLookup(plan, Counted(prefix)) for _ in range(ranks)]
        for rank, lookup in enumerate(found):
            config.parallel_config.rank = rank
            server = LookupServer(config)
            stack.callback(server.close)
            server.serve(lookup, lambda: None)
        client = LookupClient(config, timeout_ms=10_000)
        stack.callback(client.close)

        def ask(question: LookupRequest):
            nonlocal questions
            questions += 1
            return client.ask(question)

        for round_ in range(rounds + 1):
            started = time.perf_counter()
            answer = agree(ask, LookupRequest(f"r{round_}", prefix, blocks, 0))
            ended = time.perf_counter()
            assert answer.boundary == blocks
            alone = found[0].answer(LookupRequest(f"s{round_}", prefix, blocks, 0))
            assert alone.boundary == blocks
            if round_:
                times["all"].append(ended - started)
                times["one_rank"].append(time.perf_counter() - ended)
            for lookup in found:
                lookup.drop(f"r{round_}")
                lookup.drop(f"s{round_}")
    return {**times, "round_trips": questions / (rounds + 1), "blocks": blocks}


def real_store(tokens: int, rounds: int) -> dict[str, float | list[float]]:
    """Seconds of one rank's answer from LMCache's RAM backend, keys made anew each time."""
    from benchmarks.performance.path import rank

    blocks = tokens // QWEN36_27B.block_size
    shape = Shape("tiny pages", QWEN36_27B.block_size, 1, 4096, QWEN36_27B.states, 4096, "")
    prefix = prefix_of(blocks)
    times: list[float] = []
    with rank("ram", shape, blocks) as one:
        one.save("save", prefix)
        for round_ in range(rounds + 1):
            one.store._keys.cache_clear()
            started = time.perf_counter()
            answer = one.lookup.answer(LookupRequest(f"r{round_}", prefix, blocks, 0))
            ended = time.perf_counter()
            assert answer.boundary == blocks
            one.lookup.drop(f"r{round_}")
            if round_:
                times.append(ended - started)
    return {"one_rank": times, "blocks": blocks}
