# SPDX-License-Identifier: Apache-2.0
"""What requests ask to be prefetched, and what came of it.

A load copies what it reads from a disk or a remote store to RAM. So a request that prefetches is
one that loads all it can, is not stored, and says what it has found.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler.drops import UNCACHEABLE

if TYPE_CHECKING:
    from vllm.v1.request import Request

NO_RAM = "LMCache keeps nothing in RAM on this engine (local_cpu: false). Nothing was copied."
COMPUTED = (
    "vLLM computes all of this prompt, because it asks for prompt_logprobs. Nothing was copied."
)
NOTHING = "nothing of this prompt can be loaded: it is not stored, or shorter than a block."
SILENT = "a rank did not answer in time. Nothing was copied: repeat it."
FAILED = "its load failed, and the prompt was computed; the engine's log says why. Repeat it."
UNFINISHED = "the request has ended before its prompt was loaded: repeat it."


@dataclass
class Prefetch:
    """What a request asks to be prefetched. Used by the scheduler's thread only.

    Attributes:
        error: why nothing is copied; "" while that is not known.
        asked: tokens in vLLM's own cache when it last asked what can be loaded.
        local: these tokens when the request was admitted; None before.
        loaded: tokens that are loaded, by backend.
        silent: whether a rank gave no answer to the last lookup.
    """

    error: str = ""
    asked: int = 0
    local: int | None = None
    silent: bool = False
    loaded: Counter[str] = field(default_factory=Counter)

    def begin(self, request: "Request", cacheable: bool, in_ram: bool) -> None:
        """Find out whether anything can be copied.

        Args:
            cacheable: whether its prompt may be cached.
            in_ram: whether RAM keeps what loads read.
        """
        if self.error:
            return
        if not in_ram:
            self.error = NO_RAM
        elif not cacheable:
            self.error = UNCACHEABLE
        elif request.skip_reading_prefix_cache:
            self.error = COMPUTED

    def ask(self, tokens: int) -> None:
        """Note that vLLM asks what can be loaded; it does so again after a preemption.

        Args:
            tokens: in vLLM's own cache.
        """
        self.asked, self.local = tokens, None
        self.loaded.clear()

    def admit(self, result: LookupResult | None, block_size: int) -> None:
        """Note what a request starts from.

        Args:
            result: the offer that is loaded; None without a load, and when its load has ended.
        """
        self.local = self.asked
        if result is None:
            return
        start, inside = divmod(self.local, block_size)
        loaded = list(result.last(result.boundary - start + bool(result.tail)))
        for source, blocks in loaded:
            self.loaded[source] += blocks * block_size
        self.loaded[loaded[-1][0]] -= inside
        if result.tail:
            self.loaded[result.source] -= block_size - result.tail

    def answer(self, failed: bool) -> dict[str, Any]:
        """Return what the client is told.

        Args:
            failed: whether its load failed.
        """
        error = self.error
        if not error and self.local is None:
            error = UNFINISHED
        elif not error and failed:
            error = FAILED
        elif not error and not self.loaded and not self.local:
            error = SILENT if self.silent else NOTHING
        if error:
            return {"error": error}
        return {"loaded": dict(self.loaded), "vllm": self.local}
