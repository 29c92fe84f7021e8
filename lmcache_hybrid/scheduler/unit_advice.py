# SPDX-License-Identifier: Apache-2.0
"""Counts tokens past the last boundary, and advises once to set a finer unit if it would help."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.groups import GroupPlan, suggested_unit

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.unit_advice")

# Requests between two checks.
REQUESTS = 100


class ShortPromptAdvice:
    """Checks the length of each cacheable prompt. Used by the scheduler's thread only.

    Attributes:
        ledger: counts the tokens past each prompt's last boundary.
    """

    def __init__(self, plan: GroupPlan, ledger: Ledger[SchedulerCounts]) -> None:
        self._size, self._unit = plan.block_size, plan.unit or plan.block_size
        # Advise only where a unit has an effect, see GroupPlan.with_unit.
        helps = plan.with_unit(1).unit and not plan.unit
        self._advice = suggested_unit(plan.block_size) if helps else 0
        self.ledger = ledger
        self._requests = self._short = 0

    def add(self, request: "Request") -> None:
        """Count the tokens that no later request with this prompt can hit."""
        tokens = request.num_prompt_tokens - 1  # the last token is always computed
        with self.ledger as counts:
            counts.granularity_tokens += tokens % self._unit
        self._requests += 1
        self._short += tokens < self._size
        if self._advice and self._requests % REQUESTS == 0 and 2 * self._short > self._requests:
            logger.info(
                "%d of %d requests were shorter than a block of %d tokens, which LMCache cannot "
                "restore; --prefix-match-unit %d would let them hit.",
                self._short,
                self._requests,
                self._size,
                self._advice,
            )
            self._advice = 0
