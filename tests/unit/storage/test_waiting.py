# SPDX-License-Identifier: Apache-2.0
"""Requests that wait with a hit leave room in LMCache's RAM for others."""

import pytest

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.scheduler.pin_limit import Pins
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.storage.rank_lookup import RankLookup

from ..helpers import Ranks, make_request, put
from ..scheduler_rig import Rig, table
from ..store_box import POOL_GB, Box, N

PLAN = GroupPlan(N, (1,), (0,))
PAYLOAD = 60_000  # with its header 15 times the 4 KiB in which LMCache's pool gives out memory
BLOCKS, LONG = 5, 20


class Queue(Rig):
    """Requests over one rank with LMCache's own store, whose pool their hits fill."""

    def __init__(self, box: Box, bound: bool) -> None:
        self.store = box.store
        ranks = Ranks(1, PLAN)
        ranks.stores, ranks.lookups = [box.store], [RankLookup(PLAN, box.store)]
        sizes = dict.fromkeys(PLAN.groups, PAYLOAD)
        super().__init__(ranks, PLAN, pins=Pins(PLAN, sizes, POOL_GB if bound else None))
        self.requests = []
        while not self.requests or self.stored(self.requests[0]):
            number = len(self.requests)
            self.requests.append(request := prompt(number))
            put(self.store, keys(request), PAYLOAD)
        del self.requests[0]

    def stored(self, request, blocks: int = BLOCKS) -> bool:
        return len(self.store.locate(keys(request, blocks))) == blocks + 1

    @property
    def room(self) -> int:
        """Records for which others can be evicted."""
        buffers = list(iter(lambda: self.store.reserve(PAYLOAD), None))
        for buffer in buffers:
            buffer.release()
        return len(buffers)


def prompt(number: int, blocks: int = BLOCKS):
    return make_request(str(number), range(1000 * number, 1000 * number + blocks * N + 1))


def keys(request, blocks: int = BLOCKS):
    return load_keys(prefix_of(request, N, 1), 0, blocks, PLAN)


@pytest.mark.parametrize("bound", [True, False])
def test_a_new_prompt_is_stored_beside_a_queue_of_hits(box, bound):
    box = box("ram", max_payload=PAYLOAD)
    queue = Queue(box, bound)
    assert len(queue.requests) >= 9
    held = [request for request in queue.requests if queue.match(request)[0]]
    if bound:
        put(queue.store, keys(new := prompt(99, LONG), LONG), PAYLOAD)
        assert queue.stored(new, LONG) and all(map(queue.stored, held))
    else:
        assert held == queue.requests and queue.room < LONG
    # The others hit, or they are computed where theirs were evicted.
    for request in queue.requests:
        tokens, _ = queue.match(request)
        queue.scheduler.update_state_after_alloc(request, table(request), tokens)
        queue.step()
        queue.loaded(request)
        queue.scheduler.request_finished(request)
    assert queue.scheduler.counts.hits.total() >= len(held)
    queue.step()
    box.assert_pool_is_free()
