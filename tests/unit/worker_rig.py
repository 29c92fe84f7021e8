# SPDX-License-Identifier: Apache-2.0
"""A worker over a naive store."""

import threading

import torch

from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.worker.loads import PART_BYTES
from lmcache_hybrid.worker.worker import HybridWorker
from tests.naive_store import NaiveStore

from .helpers import PLAN, make_caches, make_pages, make_prefix

PREFIX = make_prefix(3)
DEADLINE = 20.0


class Rig:
    """A worker over a naive store; blocks 1 to 3 hold a prompt's pages, 4 its states."""

    def __init__(self, plan=PLAN, store=None, part_bytes=PART_BYTES) -> None:
        self.plan = plan
        self.store = store or NaiveStore()
        self.lookup = RankLookup(plan, self.store)
        self.buffer, self.pages = make_pages(plan)
        self.caches = make_caches(self.buffer, plan)
        self.worker = HybridWorker(
            plan, self.pages, self.store, self.lookup, torch.device("cpu"), part_bytes
        )

    def save_metadata(self, request_id: str = "w") -> ConnectorMetadata:
        plan = self.plan
        # Group g of a layer uses block 1 + i for its i-th block; states their own blocks.
        attention = tuple((i, (1 + i,) * len(plan.attention)) for i in range(3))
        states = ((3, tuple(4 + i for i in range(len(plan.states)))),)
        return ConnectorMetadata(saves=(SaveSpec(request_id, PREFIX, attention, states),))

    def saved(self) -> "Rig":
        self.worker.save(self.save_metadata())
        return self

    def load(
        self, request_id: str = "r", start: int = 0, boundary: int = 3, claim=True
    ) -> LoadSpec:
        """A load into blocks 7, 8, 9 (attention) and 10, 11, ... (states)."""
        if claim:
            answer = self.lookup.answer(LookupRequest(request_id, PREFIX, boundary, start))
            assert answer.boundary == boundary
        plan = self.plan
        return LoadSpec(
            request_id,
            PREFIX,
            start,
            boundary,
            (tuple(range(7 + start, 7 + boundary)),) * len(plan.attention),
            tuple(10 + i % 2 for i in range(len(plan.states))),
        )

    def start(self, *loads: LoadSpec) -> None:
        self.worker.start_loads(ConnectorMetadata(loads=loads))

    def results(self, finished=frozenset()):
        """Ask as vLLM does, step after step, until something ended."""
        timer = threading.Event()
        for _ in range(int(DEADLINE / 0.005)):
            results = self.worker.results(set(finished), True)
            if results.finished_recving:
                return results
            timer.wait(0.001)
        raise AssertionError("no load ended")

    def run(self, *loads: LoadSpec):
        self.start(*loads)
        results = self.results()
        assert not self.worker.results(set(), False).finished_recving  # once and no more
        return results

    def bytes_of(self, group: int, block: int) -> bytes:
        out = torch.empty(self.pages[group].block_bytes, dtype=torch.uint8)
        self.pages[group].gather(block, out)
        return out.numpy().tobytes()

    def assert_clean(self) -> None:
        assert not self.store.pins
        assert self.store.live_buffers == 0
        assert not self.lookup._claims


def assert_failed(rig: Rig, results, request_id: str = "r") -> None:
    assert results.failed_recving == results.finished_recving == {request_id}
    assert rig.worker.counts.failed_loads.total() == 1
    assert rig.worker.counts.loaded_states == 0
    rig.assert_clean()


def raise_in(store, name):
    def broken(*args):
        raise OSError("broken store")

    setattr(store, name, broken)
