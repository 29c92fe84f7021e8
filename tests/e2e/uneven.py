# SPDX-License-Identifier: Apache-2.0
"""A tiny Nemotron-H whose attention layers have different numbers of KV heads.

vLLM serves such models (NemotronHPuzzleForCausalLM): their configuration, which comes with the
model as remote code, answers for each layer. A block has as many bytes in every group, so the
blocks of layers with half the heads have twice the tokens. Nothing stands in for vLLM's code.
"""

import json
import shutil
from pathlib import Path

from lmcache_hybrid.tools.tiny_models import make_model

OPTIONS = {"trust_remote_code": True}
CONFIGURATION = """
import copy

from transformers import NemotronHConfig


class UnevenConfig(NemotronHConfig):
    model_type = "nemotron_h_puzzle"

    def get_nemotron_h_config_for_layer(self, index):
        layer = copy.copy(self)
        layer.num_key_value_heads = self.kv_heads.get(str(index), self.num_key_value_heads)
        return layer
"""


def make_uneven_model(folder: Path) -> Path:
    """Write the model to ``folder``/uneven and return that path.

    Of two attention layers the first one has one KV head, the other one two.
    """
    from safetensors.torch import load_file, save_file

    out = folder / "uneven"
    if out.exists():
        return out
    base, part = make_model("nemotron_h", folder / "nemotron_h"), folder / ".uneven"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(base, part)
    config = json.loads((part / "config.json").read_text())
    weights = load_file(part / "model.safetensors")
    narrow = config["layers_block_type"].index("full_attention")
    for name in weights:
        if f".layers.{narrow}." in name and ("k_proj" in name or "v_proj" in name):
            weights[name] = weights[name][: config["head_dim"]].clone()
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    config |= {
        "architectures": ["NemotronHPuzzleForCausalLM"],
        "model_type": "nemotron_h_puzzle",
        "auto_map": {"AutoConfig": "uneven.UnevenConfig"},
        "kv_heads": {str(narrow): 1},
    }
    (part / "config.json").write_text(json.dumps(config))
    (part / "uneven.py").write_text(CONFIGURATION)
    part.rename(out)
    return out
