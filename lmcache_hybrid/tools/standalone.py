# SPDX-License-Identifier: Apache-2.0
"""Makes LMCache's engine and backends without vLLM: for the doctor, benchmarks and tests."""

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_hybrid.storage.disk import make_backend
from lmcache_hybrid.storage.remote import make_connector
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine, LMCacheEngineBuilder


def make_engine(
    name: str, config: LMCacheEngineConfig, model: str, rank: int = 0, ranks: int = 1
) -> LMCacheEngine:
    """Make an engine that copies no slots, as ``storage/service_factory.py`` does in vLLM.

    Its backends exist after ``post_init``; ``LMCacheEngineBuilder.destroy(name)`` ends it.

    Args:
        name: of the engine, once per process.
        model: first part of the names of its records.
    """
    make_connector.install()
    make_backend.install(config)
    return LMCacheEngineBuilder.get_or_create(
        name,
        config,
        LMCacheMetadata(
            model_name=model,
            world_size=ranks,
            local_world_size=ranks,
            worker_id=rank,
            local_worker_id=rank,
            kv_dtype=torch.bfloat16,
            # The shape of an attention chunk, which records do not have.
            kv_shape=(1, 2, config.chunk_size, 1, 8),
            role="worker",
            chunk_size=config.chunk_size,
        ),
        None,
        lambda tensor, source: tensor,
        lambda value, source: value,
    )
