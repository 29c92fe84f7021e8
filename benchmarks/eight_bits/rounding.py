# SPDX-License-Identifier: Apache-2.0
"""Rounds the states that a load has restored, in an engine's process.

A state is rounded where it lies, to the values that would come back if its record had been stored
in eight bits: one scale for each row of its last dimension.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

INT8_LARGEST, FP8_LARGEST = 127.0, 448.0
SCALE_BYTES = 4
# Name of the file, beside the switch, that gets the sizes of a state.
SIZES = "sizes.json"


def int8(state: torch.Tensor) -> torch.Tensor:
    """Round to 255 even steps between a row's largest value and its negative."""
    scale = _scale(state, INT8_LARGEST)
    return torch.round(state.float() / scale).clamp(-INT8_LARGEST, INT8_LARGEST) * scale


def fp8(state: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, a row's largest value to its largest."""
    scale = _scale(state, FP8_LARGEST)
    return (state.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _sizes(layers: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one boundary's states over all layers, as they are and in eight bits."""
    states = [state[0] for layer in layers.values() for state in layer.kv_cache]
    rows = sum(state.numel() // state.shape[-1] for state in states)
    return {
        "exact": sum(state.numel() * state.element_size() for state in states),
        "eight bits": sum(state.numel() for state in states) + SCALE_BYTES * rows,
    }


def _scale(state: torch.Tensor, largest: float) -> torch.Tensor:
    row = state.float().abs().amax(-1, keepdim=True)
    return torch.where(row > 0, row / largest, 1.0)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"int8": int8, "float8": fp8}


def install(switch: str) -> None:
    """Let each load round the states that it restores, once the engine makes its connector.

    Not before: vLLM's CPU platform fails where LMCache's numba is imported when it starts.

    Args:
        switch: path of a file that says how, a name of :data:`KINDS`; with any other text, or
            without the file, states stay exact. The first load writes :data:`SIZES` beside it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    factory = cast("Any", KVConnectorFactory)
    create = factory.create_connector

    def create_connector(*arguments: Any, **named: Any) -> Any:
        if factory.create_connector is not create:
            factory.create_connector = create
            _install(Path(switch))
        return create(*arguments, **named)

    factory.create_connector = create_connector


def _install(switch: Path) -> None:
    """Mutates this package's classes."""
    import lmcache_hybrid.connector
    from lmcache_hybrid.worker.copies import CopyJob, HostCopies

    layers: dict[str, Any] = {}
    connector, copies = cast("Any", lmcache_hybrid.connector), cast("Any", HostCopies)
    map_pages, scatter = connector.map_pages, copies.scatter

    def mapped(vllm_config: Any, kv_cache_config: Any, plan: Any, *more: Any) -> Any:
        context = vllm_config.compilation_config.static_forward_context
        for group in plan.states:
            names = kv_cache_config.kv_cache_groups[group].layer_names
            layers.update((name, context[name]) for name in names)
        return map_pages(vllm_config, kv_cache_config, plan, *more)

    def rounded(self: Any, items: Sequence[CopyJob], after: Any) -> None:
        scatter(self, items, after)
        sizes = switch.with_name(SIZES)
        if not sizes.exists():
            sizes.write_text(json.dumps(_sizes(layers)))
        kind = KINDS.get(switch.read_text() if switch.exists() else "")
        if kind is None:
            return
        for item in items:
            blocks = item.block if isinstance(item.block, tuple) else (item.block,)
            for layer in (layers[name] for name in item.pages.layers if name in layers):
                for state in layer.kv_cache:
                    for block in blocks:
                        state[block] = kind(state[block]).to(state.dtype)

    connector.map_pages = mapped
    copies.scatter = rounded
