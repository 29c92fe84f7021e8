# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-Next whose drafts are sometimes right, for tests of speculative decoding.

It has a head for multi-token prediction (MTP) with attention layers of its own, one for each
module, whose pages lie in the KV cache beside the model's. The next token depends mostly on the
last one, so the head guesses about every third token. The layers have a say, too: other guesses
are wrong.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lmcache_hybrid.tools.tiny_families import FAMILIES
from lmcache_hybrid.tools.tiny_models import make_model

LOUDNESS = 16.0  # of the last token's embedding
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {
    "method": "ngram_gpu",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
OPTIONS = {"max_num_seqs": 2}


def make_drafting_model(folder: Path, modules: int = 1) -> Path:
    """Write the model to ``folder`` and return its path.

    Args:
        modules: of the head.
    """
    out = folder / ("drafting" if modules == 1 else f"drafting-{modules}")
    if out.exists():
        return out
    known = FAMILIES["qwen3_next"]
    # Few layers: kernels that Triton interprets are slow.
    FAMILIES["drafting"] = replace(known, config={**known.config, "num_hidden_layers": 4})
    try:
        base = make_model("drafting", folder / "drafting-base")
    finally:
        del FAMILIES["drafting"]
    part = folder / f".{out.name}"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(base, part)
    config = json.loads((part / "config.json").read_text())
    weights = load_file(part / "model.safetensors")
    weights["model.embed_tokens.weight"] *= LOUDNESS
    size, attention = config["hidden_size"], config["layer_types"].index("full_attention")
    # The head's input is the last token's embedding, then the model's hidden state.
    weights["mtp.fc.weight"] = torch.eye(size, 2 * size).bfloat16()
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size).bfloat16()
    layer = f"model.layers.{attention}."
    for name in [name for name in weights if name.startswith(layer)]:
        for module in range(modules):
            own = f"mtp.layers.{module}.{name.removeprefix(layer)}"
            weights[own] = weights[name].clone()
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    (part / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": modules}))
    part.rename(out)
    return out


def make_drafter(model: Path, method: str) -> Path:
    """Write a drafter of one attention layer for ``model`` beside it and return its path.

    Its pages are as large as those of the model's layers. Its input is the last token's embedding,
    as MTP's is here; embedding and output are the model's.

    Args:
        method: eagle, or draft_model for a whole model with an embedding and an output of its own.
    """
    out = model.with_name(f"{model.name}-{method}")
    if out.exists():
        return out
    target = json.loads((model / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    config = {name: target[name] for name in (*same, "intermediate_size", "rms_norm_eps")}
    whole = target["hidden_size"] // target["num_attention_heads"]
    config["head_dim"] = target.get("head_dim") or whole
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"max_position_embeddings": target["max_position_embeddings"]}
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (keys, size),
        "self_attn.v_proj": (keys, size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"layers.0.{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    if method == "eagle":
        weights["fc.weight"] = torch.eye(size, 2 * size)
    else:
        target_weights = load_file(model / "model.safetensors")
        weights["layers.0.input_layernorm.weight"] = weights["norm.weight"] = torch.ones(size)
        weights["embed_tokens.weight"] = target_weights["model.embed_tokens.weight"]
        weights = {f"model.{name}": each for name, each in weights.items()}
        weights["lm_head.weight"] = target_weights["lm_head.weight"]
    out.mkdir()
    found = {name: each.bfloat16().clone() for name, each in weights.items()}
    save_file(found, out / "model.safetensors", {"format": "pt"})
    for file in model.glob("tokenizer*"):
        shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config))
    return out
