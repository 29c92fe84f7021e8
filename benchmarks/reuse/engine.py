# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with our connector and LMCache's RAM store, and no model.

Real: vLLM's ``Scheduler`` with its block managers, ``LMCacheConnectorV1`` as
patched, ``HybridScheduler``, ``RankLookup``, ``HybridWorker``, ``LMCacheStore``
over LMCache's ``StorageManager`` with its allocator and its eviction. Left out:
the forward, whose tokens the trace gives, and time: a load has ended when the
step that started it ends.

Every page, of one block of attention or of one block of state, is one record of
RECORD_BYTES in the store, and the store's allocator gives out nothing else. So its
capacity counts in pages, exactly.
"""

import contextlib
import copy
import functools
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from lmcache.v1.config import LMCacheEngineConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

import lmcache_hybrid.connector
import vllm_patch
from lmcache_hybrid.config.lmcache_config import settle_lmcache_config
from lmcache_hybrid.config.options import read_options
from lmcache_hybrid.config.own_options import CHECKPOINT_KEY
from lmcache_hybrid.core.groups import plan_groups
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.protocol.metadata import NOTHING
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.scheduler import HybridScheduler
from lmcache_hybrid.storage.lmcache_store import LMCacheStore
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_format import payload_bytes
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from lmcache_hybrid.tools.standalone import make_engine
from lmcache_hybrid.tools.tiny_models import make_model
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder
from lmcache_hybrid.worker import loads
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.worker import HybridWorker

LONGEST = 65_536  # tokens of a request
RECORD_BYTES = 256
ID = "benchmarks.reuse"
# Steps of one request without a token scheduled, after which it counts as stuck.
PATIENCE = 20


@dataclass(frozen=True)
class Setup:
    """One deployment.

    Attributes:
        block_size: N.
        pool: blocks of vLLM's own pool.
        store: pages that LMCache's RAM store holds, None for vLLM without a connector.
        batch: most tokens per step.
        checkpoint: ``lmcache.hybrid_checkpoint_tokens``, None where it is not set.
        save_decode: LMCache's ``save_decode_cache``.
        state_groups: state groups before the one attention group.
        plain: LMCache's own order of eviction, which knows of no prefixes and states.
        policy: LMCache's ``cache_policy``, "" where it is not set.
        unit: ``--prefix-match-unit``, 0 where it is not set.
    """

    block_size: int
    pool: int
    store: int | None
    batch: int = 8_192
    checkpoint: int | None = None
    save_decode: bool = False
    state_groups: int = 3
    plain: bool = False
    policy: str = ""
    unit: int = 0


@dataclass(frozen=True)
class Outcome:
    """One request.

    Attributes:
        local, external: prompt tokens that vLLM's cache and the store brought.
        prefill_steps: steps that computed tokens of the prompt.
    """

    local: int
    external: int
    prefill_steps: int


@functools.cache
def _base() -> tuple[VllmConfig, StructuredOutputManager]:
    """vLLM's configuration of a small hybrid model with LMCacheConnectorV1."""
    vllm_patch.register()
    init_none_hash(sha256_cbor)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("lfm2", Path(folder, "lfm2"), max_position=LONGEST)
        config = EngineArgs(
            model=str(model),
            max_model_len=LONGEST,
            max_num_batched_tokens=LONGEST,
            enforce_eager=True,
            async_scheduling=False,
            kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        ).create_engine_config()
        return config, StructuredOutputManager(config)


class _AtOnce:
    """Stands in for the loading thread: a load has ended when it was submitted."""

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()
        future.set_result(function(*args))
        return future


class _PlainStore(LMCacheStore):
    """Records count as used when they are written and when they are loaded, as in LMCache."""

    def refresh(self, keys) -> None:
        return

    def arrange(self, keys, passing=(), owner="") -> None:
        return

    def claim(self, located):
        claim = super().claim(located)
        if claim is not None:
            super().refresh(list(located))
        return claim


class _Connector(lmcache_hybrid.connector.HybridConnector):
    """HybridConnector without processes, sockets and start-up of LMCache."""

    building: "ReplayEngine"  # whose connectors are being made

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        engine = _Connector.building
        self.plan = engine.plan
        self.scheduler = self.worker = None
        self._metadata, self._guard = NOTHING, WeightsGuard()
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = HybridScheduler(
                engine.plan,
                engine.options,
                engine.hash_size,
                LookupQueue(engine.ask, 1000, _AtOnce()),
            )
            return
        # Nobody reads what is in them.
        page = torch.zeros(engine.setup.pool, payload_bytes(RECORD_BYTES), dtype=torch.uint8)
        pages = {
            group: GroupPages(["layer"], {"layer": page})
            for group in (*self.plan.attention, *self.plan.states)
        }
        self.worker = HybridWorker(
            self.plan, pages, engine.store, engine.lookup, torch.device("cpu")
        )
        self.worker.loads._executor = _AtOnce()


class ReplayEngine:
    """``with ReplayEngine(setup) as engine: engine.run("r1", prompt, output)``."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._cleanup = contextlib.ExitStack()
        self._run = 0

    def __enter__(self) -> "ReplayEngine":
        with self._cleanup:
            self._start()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        setup = self.setup
        base, structured_output = _base()
        config, kv_cache_config = self._vllm_config(base), self._kv_cache_config()
        block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        assert (block_size, hash_size) == (setup.block_size, setup.unit or setup.block_size)
        self.hash_size = hash_size
        self.plan = plan_groups(kv_cache_config).with_unit(hash_size)
        self._hasher = get_request_block_hasher(hash_size, sha256_cbor)
        self._connector = None
        if setup.store is not None:
            self._open_store(config)
            _Connector.building = self
            self._patch(lmcache_hybrid.connector, "HybridConnector", _Connector)
            self._patch(loads, "IDLE_WAIT_SECONDS", 0)
            self._patch(mixin, "get_kv_transfer_group", lambda: self._connector)
            self._patch(mixin, "get_forward_context", lambda: None)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=structured_output,
            block_size=block_size,
            hash_block_size=hash_size,
        )
        if setup.store is not None:
            from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
                LMCacheConnectorV1,
            )

            self._connector = LMCacheConnectorV1(config, KVConnectorRole.WORKER, kv_cache_config)

    def _patch(self, owner, name: str, value) -> None:
        self._cleanup.enter_context(mock.patch.object(owner, name, value))

    def _vllm_config(self, base: VllmConfig) -> VllmConfig:
        setup, config = self.setup, copy.copy(base)
        config.cache_config = cache = copy.copy(config.cache_config)
        cache.block_size = cache.mamba_block_size = setup.block_size
        cache.prefix_match_unit = setup.unit or setup.block_size
        cache.num_gpu_blocks = setup.pool
        config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
        scheduler.max_num_batched_tokens = setup.batch
        scheduler.max_num_scheduled_tokens = None
        if setup.store is None:
            config.kv_transfer_config = None
        else:
            config.kv_transfer_config = transfer = copy.copy(config.kv_transfer_config)
            chosen = {} if setup.checkpoint is None else {CHECKPOINT_KEY: setup.checkpoint}
            transfer.kv_connector_extra_config = chosen
        return config

    def _kv_cache_config(self) -> KVCacheConfig:
        setup = self.setup
        attention = FullAttentionSpec(
            block_size=setup.block_size, num_kv_heads=1, head_size=2, dtype=torch.bfloat16
        )
        state = MambaSpec(
            block_size=setup.block_size,
            shapes=((2,),),
            dtypes=(torch.int64,),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
        )
        specs = [state] * setup.state_groups + [attention]
        return KVCacheConfig(
            num_blocks=setup.pool,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], s) for i, s in enumerate(specs)],
            prefix_cache_retention_interval=0,  # vLLM's default
        )

    def _open_store(self, config: VllmConfig) -> None:
        """LMCache's engine with its RAM backend, and our store over it."""
        setup = self.setup
        lmcache = LMCacheEngineConfig.from_defaults(
            chunk_size=setup.block_size,
            local_cpu=True,
            max_local_cpu_size=setup.store * RECORD_BYTES / (1 << 30),
            save_decode_cache=setup.save_decode,
            extra_config={"local_cpu.pinned_align_bytes": RECORD_BYTES},
            **({"cache_policy": setup.policy} if setup.policy else {}),
        )
        settle_lmcache_config(lmcache, setup.block_size)
        self.options = read_options(config, lmcache)
        engine = make_engine(ID, lmcache, ID)
        self._cleanup.callback(LMCacheEngineBuilder.destroy, ID)
        engine.post_init()
        store = _PlainStore if self.setup.plain else LMCacheStore
        self.store = store(engine, ID, bytes(16), payload_bytes(RECORD_BYTES))
        self.lookup = RankLookup(self.plan, self.store)

    def ask(self, question: LookupRequest) -> list[LookupResult]:
        """The scheduler's question to its one rank."""
        answer = self.lookup.answer(question)
        self.lookup.refresh()
        return [answer]

    # What a trace does to an engine

    def run(self, prompt: list[int], output: Sequence[int]) -> Outcome:
        """One request from arrival to end.

        Raises:
            RuntimeError: it does not end.
        """
        self._run += 1
        request = Request(
            request_id=f"r{self._run}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=len(output), ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        stats = request.prefill_stats
        self.scheduler.add_request(request)
        prefill_steps = idle = 0
        while not request.is_finished():
            planned = self.scheduler.schedule()
            scheduled = planned.num_scheduled_tokens.get(request.request_id, 0)
            # vLLM has counted this step's tokens as computed by now.
            start = request.num_computed_tokens - scheduled
            prefill_steps += scheduled > 0 and start < request.num_prompt_tokens
            idle = 0 if scheduled else idle + 1
            if idle > PATIENCE:
                raise RuntimeError(f"{request.request_id} does not go on: {request.status.name}")
            self.scheduler.update_from_output(planned, self._execute(planned, request, output))
        return Outcome(
            stats.num_local_cached_tokens, stats.num_external_cached_tokens, prefill_steps
        )

    def _execute(
        self, planned: SchedulerOutput, request: Request, output: Sequence[int]
    ) -> ModelRunnerOutput:
        """What a worker returns for this step."""
        transfers = None
        if self._connector is not None:
            self._connector.handle_preemptions(planned.kv_connector_metadata)
            with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(planned) as transfers:
                pass
        names = list(planned.num_scheduled_tokens)
        # Prompt and earlier tokens are computed: the next one is sampled.
        complete = request.num_computed_tokens >= request.num_tokens
        sampled = [output[len(request.output_token_ids)]] if complete else []
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled for _ in names],
            kv_connector_output=transfers,
        )

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, not the store."""
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("vLLM cannot empty its prefix cache: a request holds blocks")

    @property
    def saved_pages(self) -> int:
        """Records written since the start, those written again included."""
        if self._connector is None:
            return 0
        counts = self._connector.worker.counts
        assert not counts.skipped_saves, "the store took less than it was given"
        return counts.saved_attention + self.setup.state_groups * counts.saved_states

    @property
    def held_pages(self) -> int:
        """Records in the store now."""
        if self._connector is None:
            return 0
        return len(self.store.manager.local_cpu_backend.hot_cache)
