# SPDX-License-Identifier: Apache-2.0
"""Opens a rank's store under the names of its model, and logs them."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.storage.key_names import readable_name
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.residency import Residency

if TYPE_CHECKING:
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore
    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine

logger = init_logger("vllm.lmcache_hybrid.storage.open_store")


def open_store(
    engine: "LMCacheEngine",
    model: str,
    fingerprint: bytes,
    replicas: Replicas | None,
    max_payload: int,
    digester: Digester,
    residency: Residency | None,
) -> "LMCacheStore":
    """Open the store of an engine after its ``post_init``.

    Args:
        model: name or folder.
        fingerprint: of this rank, before it is renamed for the digester's key.
        replicas: groups that other ranks also hold, likewise.

    For the others see :class:`LMCacheStore`.
    """
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore

    fingerprint = digester.name(fingerprint)
    logger.info(
        "Records of this rank have the fingerprint %s%s.",
        fingerprint[:8].hex(),
        f", sealed with the key {digester.key_id.hex()}" if digester.key_id else "",
    )
    if replicas is not None:
        replicas = replicas.sealed_with(digester)
        logger.info(
            "Pages of KV cache groups %s are equal on all tensor-parallel ranks: rank %d "
            "writes them to stores that ranks share, with the fingerprint %s.",
            tuple(sorted(replicas.groups)),
            replicas.owner,
            replicas.fingerprint[:8].hex(),
        )
    return LMCacheStore(
        engine, readable_name(model), fingerprint, max_payload, digester, replicas, residency
    )
