# SPDX-License-Identifier: Apache-2.0
"""Reports of the ranks on failed loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True)
class SlowLoads(KVConnectorWorkerMetadata):
    """Separates loads that were given up as too slow from all other failures.

    Ranks may report one load at different steps.

    Attributes:
        seconds: by request, the estimated time of the whole load; 0 if unknown, None where it
            failed for another reason on any rank.
    """

    seconds: Mapping[str, float | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "SlowLoads":
        assert isinstance(other, SlowLoads)
        both = dict(self.seconds)
        for request, seconds in other.seconds.items():
            mine = both.get(request, seconds)
            both[request] = None if mine is None or seconds is None else max(mine, seconds)
        return SlowLoads(both)

    def after(
        self, output: "KVConnectorOutput", loading: set[str]
    ) -> tuple["SlowLoads", dict[str, float]]:
        """Add a step's reports, and split off the loads that have ended.

        Args:
            loading: requests whose loads are under way, those that end now included.

        Returns:
            (reports of loads that go on, seconds of ended ones that were too slow).
        """
        said, known = output.kv_connector_worker_meta, self
        if isinstance(said, SlowLoads):
            known = known.aggregate(said)
        rest = {each: seconds for each, seconds in known.seconds.items() if each in loading}
        done = {each: rest.pop(each, None) for each in output.finished_recving or ()}
        return SlowLoads(rest), {r: each for r, each in done.items() if each is not None}
