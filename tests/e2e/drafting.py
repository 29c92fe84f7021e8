# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-Next whose drafts are sometimes right, for tests of speculative decoding.

It has a head for multi-token prediction (MTP) with an attention layer of its own, whose pages lie
in the KV cache beside the model's. The next token depends mostly on the last one, so the head
guesses about every third token. The layers have a say, too: other guesses are wrong.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

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


def make_drafting_model(folder: Path) -> Path:
    """Write the model to ``folder``/drafting and return that path."""
    from safetensors.torch import load_file, save_file

    out = folder / "drafting"
    if out.exists():
        return out
    known = FAMILIES["qwen3_next"]
    # Few layers: kernels that Triton interprets are slow.
    FAMILIES["drafting"] = replace(known, config={**known.config, "num_hidden_layers": 4})
    try:
        base = make_model("drafting", folder / "drafting-base")
    finally:
        del FAMILIES["drafting"]
    part = folder / ".drafting"
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
        weights[f"mtp.layers.0.{name.removeprefix(layer)}"] = weights[name].clone()
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    (part / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    part.rename(out)
    return out


def make_drafter(model: Path, method: str) -> Path:
    """Write a drafter of one attention layer for ``model`` beside it and return its path.

    Its pages are as large as one of the model's layers'. It uses the model's embedding and output.

    Args:
        method: eagle, eagle3 or draft_model.
    """
    from safetensors.torch import load_file, save_file

    out = model.with_name(f"{model.name}-{method}")
    if out.exists():
        return out
    target = json.loads((model / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: target[name] for name in (*same, "intermediate_size", "rms_norm_eps")}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"max_position_embeddings": target["max_position_embeddings"]}
    weights = _one_layer(config, wide=method == "eagle3")
    shared = load_file(model / "model.safetensors")
    size = config["hidden_size"]
    if method == "eagle":
        del weights["layers.0.input_layernorm.weight"]
        weights["fc.weight"] = torch.eye(size, 2 * size)
    elif method == "eagle3":
        weights["layers.0.hidden_norm.weight"] = weights["norm.weight"] = torch.ones(size)
        weights["fc.weight"] = torch.eye(size, 3 * size) / 8
        weights["lm_head.weight"] = shared["lm_head.weight"]
    else:
        weights["embed_tokens.weight"] = shared["model.embed_tokens.weight"]
        weights["norm.weight"] = torch.ones(size)
        weights = {f"model.{name}": each for name, each in weights.items()}
        weights["lm_head.weight"] = shared["lm_head.weight"]
    out.mkdir()
    found = {name: each.bfloat16().clone() for name, each in weights.items()}
    save_file(found, out / "model.safetensors", {"format": "pt"})
    for file in model.glob("tokenizer*"):
        shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config))
    return out


def _one_layer(config: dict, wide: bool) -> dict[str, torch.Tensor]:
    """Weights of one of Llama's layers.

    Args:
        wide: the attention's input is the last token's embedding and then a hidden state, and
            its output the embeddings that it looks at, mostly the last one.
    """
    size, inner = config["hidden_size"], config["intermediate_size"]
    dim, kv = config["head_dim"], config["num_key_value_heads"]
    heads, columns = config["num_attention_heads"], 2 * size if wide else size
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) * columns**-0.5

    names = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
    attention = {f"{name}_proj": normal(rows, columns) for name, rows in names.items()}
    attention["o_proj"] = normal(size, heads * dim)
    if wide:
        assert size == kv * dim
        attention["k_proj"][:, size:] = 0
        keys = 2**0.5 * attention["k_proj"].view(kv, dim, columns)
        attention["k_proj"] = keys.reshape(kv * dim, columns)
        attention["q_proj"] = keys.repeat_interleave(heads // kv, 0).reshape(-1, columns)
        attention["v_proj"] = torch.eye(size, columns)
        places = torch.arange(size).view(kv, dim)
        attention["o_proj"] = torch.zeros(size, heads * dim)
        for head in range(0, heads, heads // kv):
            attention["o_proj"][
                places[head * kv // heads], torch.arange(head * dim, (head + 1) * dim)
            ] = 1.0
    mlp = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    layer = {f"self_attn.{name}": each for name, each in attention.items()}
    layer |= {f"mlp.{name}": normal(*shape) for name, shape in mlp.items()}
    layer |= {f"{name}_layernorm": torch.ones(size) for name in ("input", "post_attention")}
    return {f"layers.0.{name}.weight": each for name, each in layer.items()}
