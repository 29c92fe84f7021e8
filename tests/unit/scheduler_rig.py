# SPDX-License-Identifier: Apache-2.0
"""A scheduler over naive stores, and the small part of vLLM that calls it."""

import dataclasses
from types import SimpleNamespace

from vllm.v1.outputs import KVConnectorOutput

from lmcache_hybrid.protocol.metadata import ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.scheduler.scheduler import HybridScheduler

from .helpers import OPTIONS, PLAN, N, Ranks, fill, make_output, tags_of

# PLAN: states in groups 0, 1 and 3, attention in group 2.
STATES = PLAN.states


class Rig:
    """A scheduler over ranks, and the small part of vLLM that calls it."""

    def __init__(
        self,
        ranks: int | Ranks = 1,
        plan=PLAN,
        hash_block_size: int = N,
        policy=None,
        pins=None,
        events=None,
        store_watch=None,
        **options,
    ) -> None:
        self.ranks = ranks if isinstance(ranks, Ranks) else Ranks(ranks, plan)
        self.plan = plan
        self.scheduler = HybridScheduler(
            plan,
            dataclasses.replace(OPTIONS, **options),
            hash_block_size,
            self.ranks.queue,
            policy,
            events,
            pins,
            store_watch,
        )

        # Ids here are made up.
        self.scheduler.blocks = SimpleNamespace(
            hold=lambda request, offer: offer not in self.reused
        )
        self.reused: list[tuple[int, int, int]] = []

    def holds(self, request, attention: int, *states: int) -> "Rig":
        """Let every rank hold blocks of the request's prompt."""
        prefix = prefix_of(request, N, 1, tags_of(request))
        for store in self.ranks.stores:
            fill(store, prefix, attention, states, self.plan)
        return self

    def match(self, request, computed: int = 0) -> tuple[int, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, computed)

    def step(self, scheduled=None, tables=None, offers=None, new=()) -> ConnectorMetadata:
        """One step; the workers note that it begins, and release its dropped claims."""
        metadata = self.scheduler.build_connector_meta(
            make_output(scheduled or {}, tables, offers, new)
        )
        self.scheduler.check_integrity()
        self.ranks.begun = max(self.ranks.begun, metadata.step)
        for released in metadata.released:
            for lookup in self.ranks.lookups:
                lookup.release(*released)
        return metadata

    def admit(self, request, computed: int = 0, tables=None) -> LoadSpec | None:
        """Match, allocate, and the step that carries the load."""
        tokens, is_async = self.match(request, computed)
        assert is_async == (tokens > 0)
        tables = tables or table(request)
        self.scheduler.update_state_after_alloc(request, tables, tokens)
        loads = self.step().loads
        assert len(loads) == (tokens > 0)
        return loads[0] if loads else None

    def loaded(self, request, failed: bool = False) -> None:
        """The workers report the end of a load."""
        for lookup in self.ranks.lookups:
            claim = lookup.take_claim(request.request_id)
            if claim is not None:
                claim.release()
        done = {request.request_id}
        output = KVConnectorOutput(finished_recving=done, failed_recving=done if failed else set())
        self.scheduler.update_connector_output(output)

    def forward(self, request, tokens: int, offers=(), tables=None) -> SaveSpec | None:
        """A step that computes ``tokens`` of a request, and what it stores."""
        rid = request.request_id
        metadata = self.step(
            {rid: tokens}, {rid: tables or table(request)}, {rid: list(offers)} if offers else {}
        )
        request.num_computed_tokens += tokens
        assert len(metadata.saves) <= 1
        return metadata.saves[0] if metadata.saves else None

    def prefill(self, request, tokens: int | None = None, computed: int = 0) -> SaveSpec | None:
        """Match without a hit, then compute the prompt in one step."""
        assert self.match(request, computed)[0] == 0
        self.scheduler.update_state_after_alloc(request, table(request), 0)
        return self.forward(request, request.num_tokens if tokens is None else tokens)


def table(request) -> tuple[list[int], ...]:
    """Block ids per group: attention 201, 202, ...; groups at 101, 301, 401 likewise."""
    blocks = -(-request.num_tokens // N)
    return tuple([100 * (g + 1) + 1 + i for i in range(blocks)] for g in range(4))


def all_offers(boundary: int, block: int = 50, groups=STATES) -> list[tuple[int, int, int]]:
    """What vLLM hands off for a boundary (in blocks), groups in any order."""
    return [(group, block + group, boundary * N) for group in reversed(groups)]


def attention_of(save: SaveSpec | None) -> list[int]:
    return [block for block, _ in save.attention] if save else []
