# SPDX-License-Identifier: Apache-2.0
"""What several unit tests need: a small plan, prompts, records, pages, requests."""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import xxhash
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.groups import GroupPlan, Window
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.drop import DropRequest, DropResult
from lmcache_hybrid.protocol.hit_records import record_keys
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.request_options import RequestOptionsReader
from lmcache_hybrid.storage import drops, keeps
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_format import digests_of
from lmcache_hybrid.tools.tiny_models import make_model
from lmcache_hybrid.worker.pages import GroupPages
from tests.naive_store import NaiveStore

N = 16
STATE_SPEC = MambaSpec(
    block_size=16, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
LMCACHE = "LMCacheConnectorV1"
# The attention group is not group 0, and there are several state groups.
PLAN = GroupPlan(block_size=N, attention=(2,), states=(0, 1, 3))
# Two attention groups around one state group.
WIDE = GroupPlan(block_size=N, attention=(0, 2), states=(1,))
# No states: full attention and a window of two blocks.
WINDOWS = GroupPlan(N, (0,), (), (Window(1, 2),))

LAYERS_PER_GROUP = 2

OPTIONS = Options(
    save=True,
    priority_limit=None,
    min_retrieve_tokens=0,
    max_tokens_per_load=0,
)

init_none_hash(sha256_cbor)


def make_prefix(blocks: int, seed: int = 0, tags: tuple[tuple[str, str], ...] = ()) -> Prefix:
    return Prefix(tuple(bytes([seed, i]) * 16 for i in range(blocks)), tags)


PREFIX = make_prefix(6)


def question(
    limit: int = 6, floor: int = 0, prefix: Prefix = PREFIX, request_id: str = "r"
) -> LookupRequest:
    return LookupRequest(request_id, prefix, limit, floor)


def reach(answer: LookupResult) -> tuple[int, int]:
    return answer.boundary, answer.attention


def keys_of(prefix: Prefix, block: int, kind: int, plan: GroupPlan = PLAN) -> list[RecordKey]:
    groups = plan.attention if kind == ATTENTION else plan.states
    return record_keys(prefix, block, plan.block_size, kind, groups)


def fill(
    store: NaiveStore,
    prefix: Prefix,
    attention: int,
    states: Iterable[int],
    plan: GroupPlan = PLAN,
) -> None:
    """Store the pages of the first ``attention`` blocks and all states at ``states``."""
    keys = [key for block in range(attention) for key in keys_of(prefix, block, ATTENTION, plan)]
    for end in states:
        keys += keys_of(prefix, end - 1, STATE, plan)
    put(store, keys)


def put(store, keys: Sequence[RecordKey], size: int = 8) -> None:
    records = []
    for key in keys:
        buffer = store.reserve(size)
        buffer.payload.copy_(payload_of(key, size))
        payload = memoryview(buffer.payload.numpy())
        buffer.digests = digests_of(payload, buffer.digester)
        records.append((key, buffer))
    store.put(records)


def fetch(store, claim, keys: Sequence[RecordKey]) -> list[torch.Tensor]:
    """The payloads, read and checked as a load does. Releases the buffers, not the claim."""
    buffers = store.fetch(claim, keys)
    try:
        payloads = []
        for key, buffer in zip(keys, buffers, strict=True):
            data = buffer.payload.clone()
            if digests_of(memoryview(data.numpy()), buffer.digester) != buffer.digests:
                store.discard(key, claim)
                raise RecordError("checksum", "of the test")
            payloads.append(data)
        store.keep(claim, list(zip(keys, buffers, strict=True)))
        return payloads
    finally:
        for buffer in buffers:
            buffer.release()


def payload_of(key: RecordKey, size: int = 8) -> torch.Tensor:
    """Bytes that differ between keys."""
    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(repr(key).encode()))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        settle(future, function, *args)
        return future


def settle(future: Future, function, *args) -> None:
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)


class Counted(list):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


class Later(Executor):
    """Runs what it was given when told to."""

    def __init__(self) -> None:
        self.waiting: list = []

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        self.waiting.append(lambda: settle(future, function, *args))
        return future

    def run(self, count: int = sys.maxsize) -> None:
        while self.waiting and count:
            self.waiting.pop(0)()
            count -= 1


class Ranks:
    """Lookups over naive stores, asked as the scheduler does over the network."""

    def __init__(
        self, ranks: int = 1, plan: GroupPlan = PLAN, executor: Executor | None = None
    ) -> None:
        self.stores = [NaiveStore() for _ in range(ranks)]
        self.lookups = [RankLookup(plan, store) for store in self.stores]
        self.questions: list[LookupRequest] = []
        self.silent = False
        self.contents: tuple[bytes, ...] = tuple(b"%d" % rank for rank in range(ranks))
        self.plan, self.drops, self.begun = plan, list[DropRequest](), 0
        self.queue = LookupQueue(
            self.ask, 1000, executor or AtOnce(), lambda _: self.contents, self.drop, self.keep
        )
        self.keeps: list[KeepRequest] = []

    def ask(self, question: LookupRequest) -> list[LookupResult]:
        self.questions.append(question)
        answers = [lookup.answer(question) for lookup in self.lookups]
        for lookup in self.lookups:
            lookup.refresh()  # as the server does once it has sent the answer
        return [] if self.silent else answers

    def drop(self, request: DropRequest) -> list[DropResult]:
        self.drops.append(request)
        if self.begun < request.step:
            return [DropResult(waits=True) for _ in self.stores]
        results = [drops.drop(self.plan, store, request) for store in self.stores]
        return [] if self.silent else results

    def keep(self, request: KeepRequest) -> list[KeepResult]:
        self.keeps.append(request)
        sizes = dict.fromkeys(self.plan.groups, 1000)
        results = [keeps.keep(self.plan, store, sizes, request) for store in self.stores]
        return [] if self.silent else results

    @property
    def num_claims(self) -> list[int]:
        return [len(lookup._claims) for lookup in self.lookups]

    @property
    def pins(self) -> int:
        return sum(store.pins.total() for store in self.stores)


def make_pages(
    plan: GroupPlan = PLAN, num_blocks: int = 12
) -> tuple[torch.Tensor, dict[int, GroupPages]]:
    """One int8 buffer that backs every group, as vLLM lays it out on CPU.

    Block ``b`` of every layer lies in the b-th page of the layer's slot, so
    groups overlay each other; states fill a part of the page only.
    """
    buffer = torch.randint(-128, 128, (LAYERS_PER_GROUP, num_blocks, 512), dtype=torch.int8)
    caches = make_caches(buffer, plan)
    return buffer, {
        group: GroupPages([name for name in caches if name.startswith(f"g{group}.")], caches)
        for group in (*plan.attention, *plan.states)
    }


def make_caches(buffer: torch.Tensor, plan: GroupPlan = PLAN) -> dict[str, torch.Tensor]:
    """Per layer its tensor in the buffer of :func:`make_pages`, as vLLM registers it."""
    caches = {}
    for group in (*plan.attention, *plan.states):
        for i in range(LAYERS_PER_GROUP):
            if group in plan.attention:
                flat = buffer[i].view(torch.bfloat16)
                cache = flat.view(len(flat), 2, 16, 8)
            else:
                cache = state_view(buffer[i], 100 + 10 * group)
            caches[f"g{group}.{i}"] = cache
    return caches


def state_view(pages: torch.Tensor, state_bytes: int) -> torch.Tensor:
    """[B, 1, 1, state_bytes] over int8 [B, page], padding left out by the strides."""
    blocks, page = pages.shape
    return pages.as_strided(
        (blocks, 1, 1, state_bytes), (page, state_bytes, state_bytes, 1), pages.storage_offset()
    )


def make_request(
    request_id: str = "r",
    tokens: int | Sequence[int] = 3 * N + 1,
    *,
    hash_block_size: int = N,
    params: dict | None = None,
    lora: LoRARequest | None = None,
    **kwargs,
) -> Request:
    """vLLM's request over a prompt of ``tokens`` (a count, or the ids)."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    sampling = SamplingParams(
        max_tokens=8, extra_args={"kv_transfer_params": params} if params else None
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling_params=sampling,
        pooling_params=None,
        lora_request=lora,
        block_hasher=get_request_block_hasher(hash_block_size, sha256_cbor),
        **kwargs,
    )


def tags_of(request: Request) -> tuple[tuple[str, str], ...] | None:
    return RequestOptionsReader().read(request).tags


Tables = dict[str, tuple[list[int], ...]]


def make_output(
    scheduled: dict[str, int],
    tables: Tables | None = None,
    offers: dict[str, list[tuple[int, int, int]]] | None = None,
    new: Sequence[Request] = (),
) -> SchedulerOutput:
    """One step as vLLM's scheduler hands it to ``build_connector_meta``."""
    tables, offers = tables or {}, offers or {}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData.from_request(request, tables[request.request_id]) for request in new
    ]
    running = [r for r in scheduled if r not in {request.request_id for request in new}]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=running,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(running),
        num_computed_tokens=[0] * len(running),
        num_output_tokens=[0] * len(running),
    )
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=scheduled.keys() | offers.keys(),
        resolve_block_ids=tables.__getitem__,
        boundary_state_offloads=offers,
    )
    return output


def vllm_config(transfer) -> SimpleNamespace:
    """Stands in for VllmConfig where only ``kv_transfer_config`` is read."""
    return SimpleNamespace(kv_transfer_config=transfer)


@cache
def model(family: str) -> str:
    return str(make_model(family, Path(tempfile.gettempdir(), "tiny", family)))


def engine_config(family: str, extra=None, connector: str | None = LMCACHE, **args) -> VllmConfig:
    transfer = connector and KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra or {}
    )
    return EngineArgs(
        model=model(family), max_model_len=2048, kv_transfer_config=transfer, **args
    ).create_engine_config()
