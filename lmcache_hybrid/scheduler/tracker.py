# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side remembers of a request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_hybrid.identity.adapters import Adapter
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.checkpoints import Checkpoints
from lmcache_hybrid.scheduler.lookups import PendingLookup

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestTracker:
    """One request from its first lookup to its end.

    Attributes:
        prefix: the prompt's whole blocks, and those of generated tokens as far as they
            are stored; empty where nothing may be cached.
        save: whether this request's blocks are stored.
        stops: where its steps shall end so that a state can be stored.
        inquiry: what the ranks were asked and have not answered.
        stored: the same, where vLLM has all of it and nobody waits for the answer.
        answer: what the ranks promised and the scheduler has not yet allocated for.
        floor: local blocks when the ranks were asked; their claims start there.
        claimed: number of the question for which ranks may hold a claim, 0 for none.
        loading: boundary in blocks of the load under way, 0 for none.
        loading_tokens: tokens of the load under way.
        logged: whether its lookup has had its line in the log.
        saved: leading blocks whose attention pages are in the store or sent to be saved; what
            the ranks say when the request is admitted anew counts more than what was sent.
        saved_states: boundaries in blocks whose states were loaded or sent to be saved since
            the last lookup.
        saved_windows: (group, block) of window pages, likewise.
        kept: boundaries in blocks that later requests are the likeliest to need.
        seal: without state groups: the next boundary in tokens whose windows are stored.
        load_failed: after a failed load nothing is promised to it again.
    """

    request: "Request"
    prefix: Prefix
    save: bool
    stops: Checkpoints
    inquiry: PendingLookup | None = None
    stored: PendingLookup | None = None
    answer: LookupResult | None = None
    floor: int = 0
    claimed: int = 0
    loading: int = 0
    loading_tokens: int = 0
    logged: bool = False
    saved: int = 0
    saved_states: set[int] = field(default_factory=set)
    saved_windows: set[tuple[int, int]] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    seal: int = 0
    load_failed: bool = False

    def identify(self, adapter: Adapter | None) -> bool:
        """Take what the ranks compute the adapter with; cache nothing where they do not know.

        Returns:
            Whether the prefix's keys are known.
        """
        if self.prefix.identified:
            return True
        prefix = self.prefix.computed_with(adapter.contents) if adapter is not None else None
        self.prefix, self.save = prefix or Prefix(()), self.save and prefix is not None
        return prefix is not None

    def forget_saved(self, attention: int = 0) -> None:
        """Nothing but the first ``attention`` blocks counts as saved any more."""
        self.saved = attention
        self.saved_states.clear()
        self.saved_windows.clear()

    @property
    def saving(self) -> bool:
        """Whether blocks of its steps are stored."""
        return self.save and self.prefix.identified

    @property
    def unsaved(self) -> bool:
        return self.save and (self.saved < len(self.prefix.hashes) or self.seal > 0)
