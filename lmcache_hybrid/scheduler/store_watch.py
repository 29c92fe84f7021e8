# SPDX-License-Identifier: Apache-2.0
"""Warns where many prompts are not stored, or many lookups miss, and names the reasons."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.groups import GroupPlan, suggested_unit
from lmcache_hybrid.protocol.lookup import LookupRequest, LookupResult
from lmcache_hybrid.scheduler.tracker import RequestTracker

logger = init_logger("vllm.lmcache_hybrid.scheduler.store_watch")

# Prompts not stored, and lookups without a hit, before a warning.
PROMPTS, LOOKUPS = 50, 200
# This many prompts are enough after this many seconds.
FEW_PROMPTS, LONG_SECONDS = 10, 600.0
# Ranks report saves a few steps after a prompt has ended.
SETTLE_SECONDS = 10.0
REPEAT_SECONDS = 3600.0
# Prompts or lookups between two looks at the clock, which costs more than counting.
LOOK = 5
SEE = "See docs/troubleshooting.md, 'No hits at all'."


@dataclass
class Spell:
    """A spell without saves, or without hits.

    Attributes:
        count: prompts or lookups in it.
        since: clock at its first look, when ``count`` was LOOK.
        why: reasons, with their counts.
        said: whether it was warned of.
        silent_until: clock before which there is no warning, of this or a later spell.
    """

    count: int = 0
    since: float = 0.0
    why: Counter[str] = field(default_factory=Counter)
    said: bool = False
    silent_until: float = 0.0

    def add(self, why: str | None) -> bool:
        """Count one more, with its reason if known. Returns whether to look at the clock."""
        self.count += 1
        if why is not None:
            self.why[why] += 1
        return self.count % LOOK == 0


class StoreWatch:
    """Watches lookups and ended prompts. Used by the scheduler's thread only.

    A prompt counts when it ends, because only then all of it should be stored.

    Attributes:
        in_ram: whether LMCache also keeps records in RAM: then a record counts as stored even if
            its write to another backend fails.
    """

    def __init__(
        self, plan: GroupPlan, options: Options, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._block_size, self._unit = plan.block_size, plan.unit or plan.block_size
        helps = plan.with_unit(1).unit and not plan.unit
        self._finer = suggested_unit(plan.block_size) if helps else 0
        self._options, self._clock = options, clock
        # Whether the store is known to hold records, and whether a lookup has found some.
        self._holds = self._found = False
        self._unstored, self._missed = Spell(), Spell()
        self.in_ram = True

    def answered(self, tracker: RequestTracker, asked: LookupRequest, result: LookupResult) -> None:
        """Take a prompt's lookup result."""
        why, found = None, self._found
        if result.boundary or result.tail:
            tracker.found = self._found = self._holds = True
            if not self._is_short(asked, result):
                if self._missed.count:
                    self._end(self._missed, "LMCache serves hits again.")
                return
            why = "few"
        elif result.attention:
            tracker.found = self._found = self._holds = True
            why = "states" if result.attention > asked.floor else None
        elif not result.available:
            why = "silent"
            self._unstored.why[why] += 1
        # Count prompts with a boundary to hit. Those with local blocks count only where another
        # engine fills the store and nothing of it was ever found: else what they share with
        # earlier prompts is in vLLM's own cache by now.
        could_hit = (asked.limit, asked.limit_tail) > (asked.floor, 0)
        could_hit = could_hit and not (asked.floor and (self._options.save or found))
        is_first = not (tracker.logged or tracker.request.skip_reading_prefix_cache)
        spell = self._missed
        # Another engine fills the store of one that stores nothing, with the same prompts.
        fed = self._holds or not self._options.save
        look = fed and could_hit and is_first and spell.add(why)
        if look and self._is_due(spell, LOOKUPS, LOOKUPS):
            nothing = "nothing" if self._holds else "unfed"
            known = sum(spell.why[each] for each in ("states", "silent", "few"))
            spell.why[nothing] = spell.count - known
            which = "LMCache holds records" if self._holds else "This engine stores nothing itself"
            self._warn(f"{which}, and none of the last {spell.count} lookups led to a load", spell)

    def ended(self, tracker: RequestTracker) -> None:
        """Take a request that has ended."""
        request = tracker.request
        if tracker.found or request.num_computed_tokens < request.num_prompt_tokens:
            return
        # Requests that may not be stored matter only as long as nothing was stored.
        if not self._options.save or self._holds and tracker.unstored:
            return
        spell = self._unstored
        look = spell.add(tracker.unstored or (None if tracker.save else "dropped"))
        if look and self._is_due(spell, PROMPTS, FEW_PROMPTS):
            self._warn(f"LMCache has stored nothing of the last {spell.count} prompts", spell)

    def reported(self, counts: Mapping[str, Any]) -> None:
        """Take the ranks' counts.

        Args:
            counts: see :meth:`lmcache_hybrid.core.counts.Ledger.report`.
        """
        failed = counts.get("worker.failed_writes", {})
        if counts.get("worker.saved_bytes") and (self.in_ram or not failed):
            self._holds = True
            if self._unstored.count or self._unstored.why:
                self._end(self._unstored, "LMCache stores prompts again.")
        elif failed and not self.in_ram:
            # Saves that were counted before may have failed as well. Until ranks report some
            # without a failure, or a lookup finds some, the store counts as empty.
            self._holds = self._found
        for why, times in counts.get("worker.skipped_saves", {}).items():
            self._unstored.why[f"save {why}"] += times
        for backend, times in failed.items():
            self._unstored.why[f"write {backend}"] += times

    def forget(self) -> None:
        """Start over: the store was cleared."""
        self._holds = self._found = False
        self._unstored, self._missed = Spell(), Spell()

    def _is_short(self, asked: LookupRequest, result: LookupResult) -> bool:
        """Whether a hit is too short to be loaded, past what vLLM has itself."""
        found = result.tokens(self._block_size) - asked.floor * self._block_size
        return 0 < found < self._options.min_retrieve_tokens

    def _is_due(self, spell: Spell, most: int, few: int) -> bool:
        now = self._clock()
        if spell.count == LOOK:
            spell.since = now
        seconds = now - spell.since
        if seconds < SETTLE_SECONDS or spell.count < (few if seconds >= LONG_SECONDS else most):
            return False
        if now < spell.silent_until:
            return False
        spell.said, spell.silent_until = True, now + REPEAT_SECONDS
        return True

    def _warn(self, text: str, spell: Spell) -> None:
        reasons = "; ".join(self._reason(why, n) for why, n in (+spell.why).most_common(3))
        logger.warning(
            "%s, in %d s: %s. %s",
            text,
            self._clock() - spell.since,
            reasons or "no step has counted why; please report it",
            SEE,
        )

    def _reason(self, why: str, times: int) -> str:
        kind, _, name = why.partition(" ")
        finer = f" (from {self._finer + 1} on with --prefix-match-unit {self._finer})"
        return {
            "short": f"{times} are too short, a prompt hits from {self._unit + 1} tokens on"
            f"{finer if self._finer else ''}",
            "uncacheable": f"{times} cannot be cached: prompt embeddings, some media, wrong tags",
            "priority": f"{times} are above priority_limit={self._options.priority_limit}",
            "skip_save": f"{times} ask for lmcache.skip_save, drop or prefetch",
            "dropped": f"{times} have a LoRA adapter that a rank does not know, or saw a reset",
            "silent": f"ranks gave no answer to {times} lookups",
            "save": f"ranks skipped {times} saves ({name})",
            "write": f"{name} failed to write {times} records",
            "few": f"{times} hits had fewer than min_retrieve_tokens="
            f"{self._options.min_retrieve_tokens} to load past vLLM's own cache; lower it",
            "states": f"of {times} there are attention pages, but no state that far",
            "nothing": f"of {times} nothing was found: no prompt so far began as an earlier one of "
            "its cache_salt, LoRA adapter and tags, or its records were evicted",
            "unfed": f"of {times} nothing was found: no engine fills this store, or one whose "
            "records have another fingerprint (both logs say it) or other block hashes, or prompts "
            "come before their records: such an engine answers before it has written",
        }[kind]

    def _end(self, spell: Spell, text: str) -> None:
        spell.count = 0
        spell.why.clear()
        if spell.said:
            spell.said = False
            logger.info("%s", text)
