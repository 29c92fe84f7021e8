# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell the scheduler of loads that failed."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(frozen=True)
class FailedLoads(KVConnectorWorkerMetadata):
    """Tells loads that were given up, because they were too slow, from all others that failed.

    Ranks may report one load at different steps.

    Attributes:
        seconds: by request, what the load would have taken; 0 where nobody knows, None where
            it failed for another reason on one rank.
    """

    seconds: Mapping[str, float | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FailedLoads":
        assert isinstance(other, FailedLoads)
        both = dict(self.seconds)
        for request, seconds in other.seconds.items():
            mine = both.get(request, seconds)
            both[request] = None if mine is None or seconds is None else max(mine, seconds)
        return FailedLoads(both)
