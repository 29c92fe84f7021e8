# SPDX-License-Identifier: Apache-2.0
"""vLLM's communicator of CPU ranks, for ranks on several hosts under Ray.

vLLM takes ranks for those of one host, with memory that they share, if they were told the same
port; under Ray all are. With ``--nnodes`` they are not.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class SpreadCpuCommunicator(CpuCommunicator):
    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
