# SPDX-License-Identifier: Apache-2.0
"""Checks that two processes give a prompt the same block hash, by which records are found."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from lmcache_hybrid.config.lmcache_config import STABLE_HASH
from lmcache_hybrid.tools.doctor.finding import Finding, error, ok, warning

TOKENS = tuple(range(16))
SECONDS = 300


def block_hash(algorithm: str) -> str:
    """Return vLLM's hash of a prompt's first block, in hex."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    return bytes(hash_block_tokens(function, None, TOKENS)).hex()


def in_another_process(algorithm: str) -> Callable[[], str]:
    """Start hashing in another process; the returned function waits for the hash.

    It has this process's environment. Without PYTHONHASHSEED Python uses a new seed for its
    hashes, as in every engine.
    """
    code = f"from {__name__} import block_hash; print(block_hash({algorithm!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        text=True,
    )

    def result() -> str:
        try:
            out, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(f"the other process ended with exit code {process.returncode}")
        return out.split()[-1]

    return result


def check_hash(other: Callable[[], str], algorithm: str = STABLE_HASH) -> Iterator[Finding]:
    """
    Args:
        other: the hash of another process.
    """
    own = block_hash(algorithm)
    if other() != own:
        yield error(
            "block hash",
            f"Two processes hash the same prompt differently with {algorithm}, so nothing stored "
            "is found again.",
            "Use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to a shared value.",
        )
        return
    yield ok("block hash", f"Two processes agree on {algorithm}: {own[:16]}.")
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        yield warning(
            "block hash",
            f"PYTHONHASHSEED={seed} goes into every block hash: engines find each other's records "
            "only with the same value, or all without.",
            "Unset it everywhere, this package does not need it.",
        )
