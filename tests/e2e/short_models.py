# SPDX-License-Identifier: Apache-2.0
"""Models of fewer layers, with the same KV cache groups, where a test's time goes into layers."""

import dataclasses
from pathlib import Path

from lmcache_hybrid.tools.tiny_families import FAMILIES
from lmcache_hybrid.tools.tiny_models import make_model

# What is left of each family: one round of its kinds of layers.
_CONFIGS = {
    "qwen3_next": {"num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
}


def make_short_model(family: str, model_dir: Path) -> Path:
    """One layer in each group; families that are quick as they are have all their layers."""
    if family not in _CONFIGS:
        return make_model(family, model_dir / family)
    name, spec = f"short_{family}", FAMILIES[family]
    FAMILIES[name] = dataclasses.replace(spec, config=spec.config | _CONFIGS[family])
    return make_model(name, model_dir / name)
