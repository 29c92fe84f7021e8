# SPDX-License-Identifier: Apache-2.0
"""The model of all engines here and of ``benchmarks.serve``, the same on every processor.

Float32, because a processor without AVX-512 multiplies matrices in bfloat16 several times
more slowly; and Mamba2, because the gated delta nets of vLLM's CPU build take bfloat16 only.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from lmcache_hybrid.core.groups import plan_groups
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
        layers: how many.
        parameters: how many, over all layers.
        block_size: N in tokens, as vLLM settles it on this machine.
    """

    folder: Path
    layers: int
    parameters: int
    block_size: int

    @property
    def record(self) -> dict[str, str | int]:
        """What tells it from other models, for the JSON file."""
        return {
            "family": BASE,
            "layers": self.layers,
            "parameters": self.parameters,
            "dtype": DTYPE,
            "block_size": self.block_size,
        }


def make_model(folder: Path) -> Model:
    """Write it below ``folder``; starts no engine."""
    spec = FAMILIES[BASE]
    FAMILIES[FAMILY] = dataclasses.replace(spec, config={**spec.config, **CONFIG})
    made = tinymodels.make_model(FAMILY, folder / FAMILY)
    return Model(made, CONFIG["num_hidden_layers"], _parameters(made), _block_size(made))


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())


def _block_size(folder: Path) -> int:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(folder), dtype=DTYPE, load_format="dummy")
    return plan_groups(kv_cache_config(arguments.create_engine_config())).block_size
