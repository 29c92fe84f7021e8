# SPDX-License-Identifier: Apache-2.0
"""The models of all engines here and of ``benchmarks.serve``; Granite is the same everywhere.

Float32, because a processor without AVX-512 multiplies matrices in bfloat16 several times
more slowly; and Mamba2, because the gated delta nets of vLLM's CPU build take bfloat16 only.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from lmcache_hybrid.core.groups import GroupPlan, plan_groups
from lmcache_hybrid.tools import tiny_models as tinymodels
from lmcache_hybrid.tools.doctor.model import kv_cache_config
from lmcache_hybrid.tools.tiny_families import FAMILIES

DTYPE = "float32"
BASE = "granite4"
FAMILY = f"{BASE}_bench"
# Of four layers three with states.
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
    "num_attention_heads": 8,
    "mamba_n_heads": 16,
    "mamba_d_state": 128,
    "shared_intermediate_size": 1024,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """
    Attributes:
        folder: of its files.
        family: as in :data:`FAMILIES`.
        dtype: that it is to run in.
        layers: how many.
        parameters: how many, over all layers.
        block_size: N in tokens, as vLLM settles it on this machine.
        states: groups with states.
    """

    folder: Path
    family: str
    dtype: str
    layers: int
    parameters: int
    block_size: int
    states: int

    @property
    def record(self) -> dict[str, str | int]:
        """What tells it from other models, for the JSON file."""
        return {
            "family": self.family,
            "layers": self.layers,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "block_size": self.block_size,
        }


def make_model(folder: Path, family: str = BASE) -> Model:
    """Write it below ``folder``; starts no engine.

    Args:
        family: other ones are as small as in tests, and in bfloat16.
    """
    name, dtype = family, "bfloat16"
    if family == BASE:
        name, dtype = FAMILY, DTYPE
        spec = FAMILIES[BASE]
        FAMILIES[FAMILY] = dataclasses.replace(spec, config={**spec.config, **CONFIG})
    made = tinymodels.make_model(name, folder / name)
    layers = FAMILIES[name].config["num_hidden_layers"]
    plan = _plan(made, dtype)
    size, states = plan.block_size, len(plan.states)
    return Model(made, family, dtype, layers, _parameters(made), size, states)


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())


def _plan(folder: Path, dtype: str) -> GroupPlan:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(folder), dtype=dtype, load_format="dummy")
    return plan_groups(kv_cache_config(arguments.create_engine_config()))
