# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform under Ray, which vLLM refuses: it names no device for Ray to count.

A platform plugin of vLLM, found by the entry point that ``test_ray.py`` writes. Ray counts "GPUs"
that the test gives its nodes; ranks still compute on the CPU.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "tests.e2e.ray_communicator.SpreadCpuCommunicator"


def name() -> str:
    return f"{__name__}.{RayCpuPlatform.__name__}"
