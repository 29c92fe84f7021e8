# SPDX-License-Identifier: Apache-2.0
"""Steps that were scheduled and whose results the scheduler has not seen."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from .model import ToyRank
from .truth import Truth


@dataclass
class _Step:
    output: SchedulerOutput
    results: list[ModelRunnerOutput] = field(default_factory=list)


class Flight:
    """Has each rank execute the steps in order.

    The stages of a pipeline are at different steps at one time: each is one behind the stage
    before it. Ranks that are no stages execute a step as soon as it is scheduled.
    """

    def __init__(
        self,
        ranks: Sequence[ToyRank],
        staged: bool,
        truths: dict[str, Truth],
        aggregator: KVOutputAggregator,
    ) -> None:
        self._ranks, self._staged, self._truths = ranks, staged, truths
        self._aggregator = aggregator
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def schedule(self, output: SchedulerOutput) -> None:
        """Add a step; each rank executes what it has come to."""
        self._steps.append(_Step(output))
        for stage, rank in enumerate(self._ranks):
            self._run(stage, rank, len(self._steps) - stage * self._staged)

    def finish(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The oldest step and what all ranks say of it, once all have executed it."""
        for stage, rank in enumerate(self._ranks):
            self._run(stage, rank, 1)
        step = self._steps.popleft()
        return step.output, self._aggregator.aggregate(step.results)

    def _run(self, stage: int, rank: ToyRank, steps: int) -> None:
        """Execute those of the first ``steps`` steps that the rank has not executed."""
        for step in list(self._steps)[: max(0, steps)]:
            if len(step.results) == stage:  # the stages before have
                step.results.append(rank.execute(step.output, self._truths))
