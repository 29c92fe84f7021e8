# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM's model registry which architectures have recurrent layers."""

import multiprocessing
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Architecture:
    """One entry of the registry that vLLM's interfaces call hybrid, or could not be asked.

    Attributes:
        name: as in a checkpoint's ``architectures``.
        module: where its class is.
        why: why its module cannot be imported here; "" if it is known to be hybrid.
    """

    name: str
    module: str
    why: str = ""


def _ask(found: multiprocessing.Queue) -> None:
    from tests.e2e import standins

    standins.torchvision()
    from vllm.model_executor.models.interfaces import is_hybrid
    from vllm.model_executor.models.registry import ModelRegistry

    rows = []
    for name, entry in sorted(ModelRegistry.models.items()):
        module = entry.module_name.removeprefix("vllm.model_executor.models.")
        try:
            if is_hybrid(entry.load_model_cls()):
                rows.append(Architecture(name, module))
        except Exception as error:  # whatever a module raises when it is imported
            rows.append(Architecture(name, module, str(error).partition(".")[0][:100]))
    found.put([asdict(row) for row in rows])


def hybrids() -> list[Architecture]:
    """Import every class of the registry in a process of its own: 20 seconds."""
    spawn = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue = spawn.Queue()
    process = spawn.Process(target=_ask, args=(found,))
    process.start()
    try:
        rows = found.get(timeout=300)
    finally:
        process.terminate()
    return [Architecture(**row) for row in rows]
