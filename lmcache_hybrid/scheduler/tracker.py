# SPDX-License-Identifier: Apache-2.0
"""Tracks one request from its first lookup to its end.

Its :data:`Phase` is that of its lookup and load::

    NotAsked --ask--> Asked --offer--> Offered --load--> Loading --end_load--> NotAsked
        ^               |   <---ask---  |  ^
        '-----admit-----+-----admit-----'  '-- offer, of what needs no asking, from NotAsked

:meth:`RequestTracker.withdraw` takes a promise back: it cancels a pending lookup, and leaves of an
offer that there is nothing to load, so that vLLM's next call does not ask again.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.identity.adapters import Adapter
from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.drops import Drop
from lmcache_hybrid.scheduler.keeps import Keep
from lmcache_hybrid.scheduler.lookup_queue import PendingLookup
from lmcache_hybrid.scheduler.prefetches import Prefetch
from lmcache_hybrid.scheduler.prompt import extended
from lmcache_hybrid.scheduler.step_ends import StepEnds

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class NotAsked:
    """Not looked up yet, or running: the next admission looks it up."""


@dataclass(frozen=True)
class Asked:
    """Its lookup is pending. Each rank may already hold a claim."""

    lookup: PendingLookup


@dataclass(frozen=True)
class Offered:
    """The ranks answered, and vLLM has no blocks for the request yet.

    Attributes:
        result: what can be loaded, if it is a hit.
        floor: local blocks when the ranks were asked; their claims start there.
        claim: number of the lookup for which the ranks may hold a claim, 0 for none.
        tokens: what vLLM was last told to load, 0 for nothing.
    """

    result: LookupResult
    floor: int
    claim: int
    tokens: int = 0


@dataclass(frozen=True)
class Loading:
    """A load is under way; the workers hold its claim and release it.

    Attributes:
        boundary: in tokens, where the load ends.
        tokens: how many are loaded.
        deadline: ``time.monotonic`` after which the workers give it up.
    """

    boundary: int
    tokens: int
    deadline: float = math.inf


Phase = NotAsked | Asked | Offered | Loading


@dataclass
class Stored:
    """Parts of a request that need not be saved again; a lookup result overrides it.

    Attributes:
        attention: leading blocks whose attention pages are stored.
        states: boundaries in tokens whose states the last lookup found, or were saved since, with
            their partly filled pages where they lie inside a block.
        windows: (group, block) of window pages, likewise.
    """

    attention: int = 0
    states: set[int] = field(default_factory=set)
    windows: set[tuple[int, int]] = field(default_factory=set)

    def starts(self, boundary: int, plan: GroupPlan) -> bool:
        """Whether all is stored that a request needs to start from ``boundary`` (in blocks)."""
        pages = (
            (window.group, block)
            for window in plan.windows
            for block in range(window.first(0, boundary), boundary)
        )
        has_state = not plan.states or boundary * plan.block_size in self.states
        return boundary <= self.attention and has_state and self.windows.issuperset(pages)

    def learn(self, result: LookupResult, floor: int, plan: GroupPlan) -> None:
        """Add the states and windows that a lookup past ``floor`` blocks has found."""
        # Of all others nothing is known: some before a hit may be missing.
        self.states.update(boundary * plan.block_size for boundary in result.states)
        if result.hit:
            self.states.add(result.tokens(plan.block_size))
        for window in plan.windows:
            first = window.first(floor, result.boundary)
            pages, last = set(range(first, result.boundary)), 0
            for end in result.states:
                pages.update(range(max(last, window.first(0, end)), end))
                last = end
            self.windows.update((window.group, block) for block in pages)

    def forget(self, attention: int = 0) -> None:
        """Save everything again but the first ``attention`` blocks of attention pages."""
        self.attention = attention
        self.states.clear()
        self.windows.clear()


@dataclass
class RequestTracker:
    """One request. Used by the scheduler's thread only.

    Attributes:
        prompt_tokens: length of the prompt; a session's grows with each part, and is 0 after a
            reset until it is tracked anew.
        prefix: the prompt's whole blocks, and those of generated tokens as far as they
            are stored; empty where nothing may be cached.
        inner: tokens of the prompt up to its last boundary of U tokens; 0 without such.
        tags: the user's; None where nothing may be cached.
        skip_save: whether the user asked that nothing is stored.
        unstored: why nothing of it is stored, as counters name it; None if it is.
        found: whether the store had records of it.
        save: whether this request's blocks are stored.
        step_ends: where its steps end so that a state can be stored.
        phase: of its lookup and load.
        load_seconds: max time of a load of the offer; None until the policy has judged it,
            and where it is computed.
        background: lookup of what is stored already; admission does not wait for it.
        stored: what need not be saved again.
        likeliest: boundaries in tokens that later requests are likeliest to need.
        next_unoffered: the next boundary in tokens to store without a hand-off from vLLM: one in
            known tokens, or without state groups any. 0 for none.
        chunks: whether further steps of its prefill end where a state is stored.
        logged: whether its first lookup has been logged.
        delayed: whether its lookup had to wait until others pinned less.
        drop: what it asks to be removed from the store; None for nothing.
        prefetch: what it asks to be copied to RAM; None for nothing.
        keep: what it asks to be evicted last; None for nothing.
        may_load: False once a load failed, or a reset came after its first step.
    """

    request: "Request"
    prefix: Prefix
    save: bool
    step_ends: StepEnds
    phase: Phase = NotAsked()
    load_seconds: float | None = None
    background: PendingLookup | None = None
    stored: Stored = field(default_factory=Stored)
    likeliest: set[int] = field(default_factory=set)
    next_unoffered: int = 0
    chunks: bool = False
    logged: bool = False
    delayed: bool = False
    may_load: bool = True
    inner: int = 0
    tags: tuple[tuple[str, str], ...] | None = None
    skip_save: bool = False
    unstored: str | None = None
    found: bool = False
    drop: Drop | None = None
    prefetch: Prefetch | None = None
    keep: Keep | None = None
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.num_prompt_tokens

    @property
    def claim(self) -> int:
        """Number of the lookup whose claims are ours to drop, 0 for none."""
        match self.phase:
            case Asked(lookup):
                return lookup.request.number
            case Offered():
                return self.phase.claim
        return 0

    # Transitions

    def ask(self, lookup: PendingLookup) -> None:
        """Wait for ``lookup``, whose claims replace those of the lookup before."""
        assert not isinstance(self.phase, Loading)
        self.phase = Asked(lookup)

    def ask_in_background(self, lookup: PendingLookup) -> None:
        """Let ``lookup`` tell what is stored already, in place of an earlier one."""
        self.cancel_background()
        self.background = lookup

    def forget_answer(self) -> None:
        """Forget what the ranks answered, before they are asked anew."""
        self.load_seconds = None
        # Store again what is computed again: it may be missing because its save failed.
        self.stored.forget(self.stored.attention)

    def offer(self, result: LookupResult, floor: int) -> None:
        """Take the ranks' answer, or one that needs no asking."""
        self.phase = Offered(result, floor, self.claim)

    def promise(self, tokens: int) -> None:
        """Promise vLLM ``tokens`` of the offer."""
        assert isinstance(self.phase, Offered) and 0 < tokens
        self.phase = replace(self.phase, tokens=tokens)

    def load(self, tokens: int, block_size: int, now: float) -> LookupResult:
        """Start the promised load, for which vLLM has blocks.

        Args:
            now: ``time.monotonic``, from which on the load may take ``load_seconds``.

        Returns:
            What the ranks offered.
        """
        offered = self.phase
        # All of it or nothing: a load that ends elsewhere would need another state.
        assert isinstance(offered, Offered) and tokens == offered.tokens > 0, (
            f"vLLM loads {tokens} tokens that were never offered"
        )
        result = offered.result
        end = result.tokens(block_size)
        assert self.load_seconds is not None
        self.phase = Loading(end, tokens, now + self.load_seconds)
        return offered.result

    def fail_load(self, slow: bool) -> None:
        """Load nothing for the request any more: its load failed on a rank.

        Args:
            slow: the store was only too slow; else all of it is saved again.
        """
        self.may_load = False
        if not slow:
            self.stored.forget()

    def end_load(self) -> None:
        """End a load that all ranks have reported, failed or not."""
        assert isinstance(self.phase, Loading)
        self.phase = NotAsked()

    def withdraw(self) -> int:
        """Cancel the pending lookup or drop the offer; a late answer is dropped.

        Returns:
            Number of the lookup whose claims the ranks must release, 0 for none.
        """
        claim = self.claim
        match self.phase:
            case Asked(lookup):
                lookup.cancel()
                self.phase = NotAsked()
            case Offered(result, floor):
                self.phase = Offered(LookupResult(0, result.attention), floor, claim=0)
            case Loading():
                raise AssertionError("the workers hold the claim of a load under way")
        return claim

    def admit(self) -> int:
        """Start without a load; vLLM has blocks. Returns as :meth:`withdraw` does."""
        claim = self.withdraw()
        self.phase, self.load_seconds = NotAsked(), None  # vLLM may leave a promise alone
        return claim

    def leave_store(self) -> None:
        """Stop loading and storing it."""
        self.may_load = self.save = False
        self.cancel_background()

    def cancel_background(self) -> None:
        """Cancel the lookup of what is stored already."""
        if self.background is not None:
            self.background.cancel()
            self.background = None

    # Keys

    def extend(self, blocks: int, hashes_per_block: int) -> None:
        """Extend the prefix with generated tokens, to ``blocks`` blocks in all."""
        if self.save and blocks > len(self.prefix.hashes):
            self.prefix = extended(self.prefix, self.request, blocks, hashes_per_block)

    def take_answer(self, result: LookupResult, floor: int, plan: GroupPlan) -> bool:
        """Take a lookup result.

        Args:
            floor: local blocks when the ranks were asked.

        Returns:
            Whether the prefix's keys are known.
        """
        self.background = None
        known = self.identify(result.adapter)
        if result.available:
            self.stored.attention = result.attention  # less than was sent, where a save failed
        self.stored.learn(result, floor, plan)
        if self.prefetch is not None:
            self.prefetch.silent = not result.available
        return known

    def identify(self, adapter: Adapter | None) -> bool:
        """Take the adapter's content from the ranks; cache nothing where they do not know it.

        Returns:
            Whether the prefix's keys are known.
        """
        if self.prefix.identified:
            return True
        prefix = self.prefix.computed_with(adapter.contents) if adapter is not None else None
        self.prefix, self.save = prefix or Prefix(()), self.save and prefix is not None
        if prefix is None:
            self.inner = 0
        return prefix is not None

    def settle_keep(self, plan: GroupPlan) -> None:
        """Note whether what it asks to be kept, and promised to store, is stored by now."""
        keep = self.keep
        if keep is not None and keep.promised and self.stored.starts(keep.promised, plan):
            keep.promised = 0

    @property
    def saving(self) -> bool:
        """Whether blocks of its steps are stored."""
        return self.save and self.prefix.identified

    @property
    def unsaved(self) -> bool:
        """Whether it has blocks to save, or a pending lookup may show that it has."""
        if not self.save:
            return False
        waits = self.background is not None or self.next_unoffered > 0 or self.chunks
        return waits or self.stored.attention < len(self.prefix.hashes)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of vLLM."""
        blocks = len(self.prefix.hashes)
        assert 0 <= self.stored.attention <= blocks
        assert all(boundary > 0 for boundary in self.likeliest)
        match self.phase:
            case Offered(result, _, claim, tokens):
                assert claim or not result.hit, "offered without a claim"
                assert result.hit or not tokens, "promised without an offer"
                assert result.boundary <= blocks
            case Loading(boundary, tokens, _):
                assert 0 < tokens <= boundary
