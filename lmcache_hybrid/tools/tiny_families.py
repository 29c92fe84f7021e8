"""The architectures that :mod:`tiny_models` can make, and the small sizes we give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 320


@dataclass(frozen=True)
class Family:
    """One architecture: its ``transformers`` classes and the small sizes we give it."""

    kind: str
    """What its layers keep between tokens, in a few words."""
    config_class: str
    model_class: str
    config: dict[str, Any]
    embed_std: float = 2 * 128**-0.5
    """Small against what the layers add, so that context outweighs the last token."""
    tied: bool = False
    """Whether the architecture insists on one matrix for embedding and output."""
    cpu: bool = True
    """Whether vLLM's CPU build runs it as it is; if not, benchmarks/families says what it needs."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Written into config.json beside what transformers writes: what only vLLM reads."""
    renames: dict[str, str] = field(default_factory=dict)
    """Parts of weights' names that transformers writes otherwise than published checkpoints."""


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,  # 192 hangs vLLM's CPU kernels
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "pad_token_id": 256,
    "eos_token_id": 256,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 64}
_GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # the CPU kernel needs 128
    "linear_value_head_dim": 128,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        "gated delta net, attention in every fourth layer, MoE",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 8,
            "head_dim": 64,
            **_GDN,
            **_MOE,
        },
    ),
    "granite4": Family(
        "Mamba2, attention in every fourth layer",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_attention_heads": 2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2,
            "num_hidden_layers": 8,
            "attention_multiplier": 64**-0.5,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
            "mamba_expand": 2,
            "mamba_d_state": 64,
            **_MAMBA2,
        },
    ),
    "falcon_h1": Family(
        "Mamba2 beside attention in every layer",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "mamba_d_ssm": 256,
            "mamba_d_state": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            **_MAMBA2,
        },
    ),
    "lfm2": Family(
        "short convolution, some attention layers",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_attention_heads": 2,
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,  # vLLM reads conv_dim and block_dim; transformers does not
            "block_dim": 128,
        },
        tied=True,
    ),
    "lfm2_moe": Family(
        "short convolution, some attention layers, MoE",
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            "num_attention_heads": 2,
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "num_dense_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        tied=True,
    ),
    "qwen3_5": Family(
        "gated delta net, attention in every fourth layer",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"num_hidden_layers": 8, "head_dim": 64, **_GDN},
        cpu=False,
    ),
    "qwen3_5_moe": Family(
        "gated delta net, attention in every fourth layer, MoE",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 64, **_GDN, **_MOE},
        cpu=False,
    ),
    "olmo_hybrid": Family(
        "gated delta net, attention in every fourth layer",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {"num_hidden_layers": 4, "num_attention_heads": 2, **_GDN},
        renames={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        cpu=False,
    ),
    "nemotron_h": Family(
        "Mamba2, attention and MLP in layers of their own",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_attention_heads": 2,
            "head_dim": 64,
            "hybrid_override_pattern": "M-M*M-M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
        },
    ),
    "nemotron_h_moe": Family(
        "Mamba2, attention and MoE in layers of their own",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_attention_heads": 2,
            "head_dim": 64,
            "hybrid_override_pattern": "MEM*MEM*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
        cpu=False,
    ),
    "jamba": Family(
        "Mamba1, attention in every fourth layer, MoE",
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_attention_heads": 2,
            "num_hidden_layers": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 3,
            "num_experts": 4,
        },
        cpu=False,
    ),
    "zamba2": Family(
        "Mamba2, one attention block shared by some layers",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "mamba_d_state": 64,
            "use_mem_rope": True,
        },
        tied=True,
    ),
    "kimi_linear": Family(
        "Kimi Delta Attention, MLA in every fourth layer",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "kv_lora_rank": 512,  # the CPU kernel takes 512 and 64
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        extra={
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "head_dim": 128,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True,
            "first_k_dense_replace": 1,
            "moe_router_activation_func": "sigmoid",
            "min_moe_intermediate_per_partition": 32,  # over two ranks vLLM pads what has less
        },
        renames={".layers.0.block_sparse_moe.": ".layers.0.mlp."},
        cpu=False,
    ),
    "gemma3": Family(
        "sliding window of 128 tokens, full attention in every fourth layer",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        embed_std=0.25 * 128**-0.5,  # the architecture multiplies by sqrt(hidden_size)
    ),
    "llama": Family(
        "plain full attention",
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_hidden_layers": 4, "num_attention_heads": 2},
    ),
}
