# SPDX-License-Identifier: Apache-2.0
"""Reads a model's attention and recurrent layers from its ``config.json``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmcache_hybrid.core.errors import ConfigError

ATTENTION, STATE = "attention", "state"
# Layer types in configs, old names and new ones. Others keep nothing between tokens.
_KINDS = {
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mamba": STATE,
    "mamba2": STATE,
    "linear_attention": STATE,
    "conv": STATE,
}
_NOTHING = {"mlp", "moe"}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True)
class Attention:
    """The KV cache of one attention layer per token, all ranks together.

    Attributes:
        heads: key/value heads; 1 for a latent (MLA), which every rank holds whole.
        head_size: elements of a key, and of a value.
        latent: MLA, one vector instead of keys and values.
        queries: query heads for each of ``heads``; 1 for a latent.
    """

    heads: int
    head_size: int
    latent: bool = False
    queries: int = 1

    def elements(self, tp: int) -> int:
        """Return the elements per token on one of ``tp`` ranks; vLLM: ``FullAttentionSpec``.

        With fewer heads than ranks each rank holds one (``ModelConfig.get_num_kv_heads``).
        """
        if self.latent:
            return self.head_size
        return 2 * self.head_size * max(1, self.heads // tp)


@dataclass(frozen=True)
class Recurrent:
    """The state of one recurrent layer, all ranks together.

    vLLM: ``MambaStateShapeCalculator``, whose shapes all have this form.

    Attributes:
        channels: over which the convolution runs, without those of ``groups``.
        columns: past inputs that it keeps of each, its kernel less one.
        heads: of the recurrent state, 0 for none (short convolution).
        head_elements: of its state per head.
        groups: of Mamba2's B and C.
        group_channels: convolution channels per group.
        widens: whether vLLM gives each speculative token a column.
    """

    channels: int
    columns: int
    heads: int = 0
    head_elements: int = 0
    groups: int = 0
    group_channels: int = 0
    widens: bool = True

    def conv_elements(self, tp: int, drafts: int = 0) -> int:
        """Count them on one rank. Groups that do not divide are repeated on each rank.

        Args:
            drafts: speculative tokens.
        """
        groups = self.groups if self.groups % tp == 0 else tp
        channels = _share(self.channels + groups * self.group_channels, tp)
        return channels * (self.columns + self.widens * drafts)

    def state_elements(self, tp: int) -> int:
        """Count them on one rank."""
        return _share(self.heads, tp) * self.head_elements


def _share(whole: int, tp: int) -> int:
    if whole % tp:
        raise ConfigError(
            f"--tp {tp} does not divide {whole} heads or channels of a recurrent layer; choose "
            "a tensor parallel size that does."
        )
    return whole // tp


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that sizes depend on.

    Attributes:
        kinds: ATTENTION or STATE per layer that keeps something, in vLLM's order.
        dtype: of the weights, as vLLM's ``--dtype auto`` takes it.
        ssm_dtype: of the recurrent states, as ``--mamba-ssm-cache-dtype auto`` takes it.
        kv_dtype: as ``--kv-cache-dtype auto`` takes it.
    """

    model_type: str
    kinds: tuple[str, ...]
    attention: Attention
    recurrent: Recurrent
    dtype: str
    ssm_dtype: str
    kv_dtype: str

    @property
    def has_delta_nets(self) -> bool:
        """Whether its recurrent layers are gated delta nets."""
        return FAMILIES[self.model_type] is _qwen

    def with_dtype(self, dtype: str) -> "ModelShape":
        """Apply vLLM's ``--dtype``; the other dtypes follow if they are the weights'."""
        own = self.dtype
        return replace(
            self,
            dtype=dtype,
            ssm_dtype=dtype if self.ssm_dtype == own else self.ssm_dtype,
            kv_dtype=dtype if self.kv_dtype == own else self.kv_dtype,
        )


Config = Mapping[str, Any]


class _Fields(dict):
    """A config whose missing fields are errors that name them."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"the config of a {self.get('model_type')} model has no {key!r}, which its sizes "
            "depend on; use the config.json that lies beside the weights."
        )


def load_shape(path: Path) -> ModelShape:
    """Read a ``config.json``, or the one in a folder.

    Raises:
        ConfigError: no such file, no JSON, or a model that cannot be sized.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"MODEL={str(path)!r} cannot be read ({error}); name a model folder, its config.json, "
            "or a model of `lmcache-hybrid plan --list`."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object; name a model's config.json.")
    return read_shape(config)


def read_shape(config: Config) -> ModelShape:
    """Return the shape of a model of a known family.

    Raises:
        ConfigError: another family, no recurrent or no attention layers, a field is missing.
    """
    text = _Fields(config.get("text_config") or config.get("llm_config") or config)
    model_type = str(text.get("model_type") or config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"model_type={model_type!r} is not a hybrid family that can be sized; the families "
            f"are {', '.join(FAMILIES)}."
        )
    kinds = _kinds(text)
    if model_type == "falcon_h1":
        kinds = (ATTENTION, STATE) * text["num_hidden_layers"]
    for kind in (ATTENTION, STATE):
        if kind not in kinds:
            raise ConfigError(
                f"this {model_type} model has no {kind} layers, so it is not a hybrid; "
                "LMCache's own adapter serves it."
            )
    dtype = _dtype(config, text)
    attention, recurrent = family(text)
    return ModelShape(
        model_type,
        kinds,
        attention,
        recurrent,
        dtype,
        _ssm_dtype(model_type, text, dtype),
        _kv_dtype(config, text, dtype),
    )


def _kinds(text: _Fields) -> tuple[str, ...]:
    """List the kind of each layer, from the field that this family has for it."""
    names: Sequence[str]
    layers = range(text.get("num_hidden_layers") or 0)
    if listed := text.get("layer_types") or text.get("layers_block_type"):
        names = listed
    elif pattern := text.get("hybrid_override_pattern"):
        names = [_PATTERN.get(sign, sign) for sign in pattern]
    elif (chosen := text.get("full_attn_idxs")) is not None:
        names = ["full_attention" if i in chosen else "conv" for i in layers]
    elif linear := text.get("linear_attn_config"):
        chosen = linear["full_attn_layers"]  # counted from 1
        names = ["full_attention" if i + 1 in chosen else "linear_attention" for i in layers]
    elif period := text.get("attn_layer_period"):
        offset = text["attn_layer_offset"]
        names = ["attention" if i % period == offset else "mamba" for i in layers]
    else:
        interval = text.get("full_attention_interval", 4)
        names = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    strange = sorted(set(names) - set(_KINDS) - _NOTHING)
    if strange:
        raise ConfigError(
            f"layers of type {', '.join(strange)} cannot be sized; the types are "
            f"{', '.join([*_KINDS, *sorted(_NOTHING)])}."
        )
    return tuple(_KINDS[name] for name in names if name in _KINDS)


def _dtype(config: Config, text: Config) -> str:
    for each in (config, text):
        found = each.get("dtype") or each.get("torch_dtype")
        if found:
            return "bfloat16" if found == "float32" else str(found)
    return "bfloat16"


def _ssm_dtype(model_type: str, text: Config, dtype: str) -> str:
    """vLLM: ``MODELS_CONFIG_MAP`` and ``MambaStateDtypeCalculator``."""
    if model_type.startswith("nemotron_h"):
        return text.get("mamba_ssm_cache_dtype", "float32")
    if model_type.startswith("qwen3_5"):
        return text.get("mamba_ssm_dtype") or dtype
    return "float32" if model_type == "kimi_linear" else dtype


def _kv_dtype(config: Config, text: Config, dtype: str) -> str:
    """vLLM: ``resolve_kv_cache_dtype_string``; ModelOpt's checkpoints name one."""
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    algorithm = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if not algorithm or not str(quantization.get("quant_method")).startswith("modelopt"):
        return dtype
    if isinstance(algorithm, dict):
        floats = algorithm.get("type") == "float"
        algorithm = (
            {"8": "fp8", "4": "nvfp4"}.get(str(algorithm.get("num_bits"))) if floats else None
        )
    return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(str(algorithm).lower(), dtype)


def _heads(text: _Fields, head_size: int | None = None) -> Attention:
    queries = text["num_attention_heads"]
    heads = text.get("num_key_value_heads") or queries
    size = head_size or text["hidden_size"] // queries
    return Attention(heads, size, queries=queries // heads)


def _mamba2(
    intermediate: int, groups: int, heads: int, head_dim: int, state: int, kernel: int
) -> Recurrent:
    """vLLM: ``mamba2_state_shape``."""
    return Recurrent(intermediate, kernel - 1, heads, head_dim * state, groups, 2 * state)


def _qwen(text: _Fields) -> tuple[Attention, Recurrent]:
    """Gated DeltaNet; vLLM: ``gated_delta_net_state_shape``."""
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads, size = text["linear_num_value_heads"], text["linear_value_head_dim"]
    return _heads(text, text.get("head_dim")), Recurrent(
        2 * keys + heads * size,
        text["linear_conv_kernel_dim"] - 1,
        heads,
        size * text["linear_key_head_dim"],
    )


def _granite(text: _Fields) -> tuple[Attention, Recurrent]:
    """Granite 4, and Falcon-H1, which may say how wide its Mamba2 layers are."""
    intermediate = text.get("mamba_d_ssm") or text["mamba_expand"] * text["hidden_size"]
    heads, head_dim = text["mamba_n_heads"], text.get("mamba_d_head", "auto")
    return _heads(text, text.get("head_dim")), _mamba2(
        intermediate,
        text["mamba_n_groups"],
        heads,
        intermediate // heads if head_dim == "auto" else head_dim,
        text["mamba_d_state"],
        text["mamba_d_conv"],
    )


def _nemotron(text: _Fields) -> tuple[Attention, Recurrent]:
    heads, head_dim = text["mamba_num_heads"], text["mamba_head_dim"]
    # transformers' default; older checkpoints name it attention_head_dim and have 128.
    return _heads(text, text.get("head_dim", 128)), _mamba2(
        heads * head_dim,
        text.get("mamba_n_groups") or text["n_groups"],
        heads,
        head_dim,
        text["ssm_state_size"],
        text["conv_kernel"],
    )


def _lfm2(text: _Fields) -> tuple[Attention, Recurrent]:
    """vLLM: ``short_conv_state_shape``."""
    channels = text.get("conv_dim") or text["hidden_size"]
    return _heads(text), Recurrent(channels, text["conv_L_cache"] - 1, widens=False)


def _jamba(text: _Fields) -> tuple[Attention, Recurrent]:
    """vLLM: ``mamba1_state_shape``."""
    intermediate = text["mamba_expand"] * text["hidden_size"]
    return _heads(text), Recurrent(
        intermediate, text["mamba_d_conv"] - 1, intermediate, text["mamba_d_state"], widens=False
    )


def _kimi(text: _Fields) -> tuple[Attention, Recurrent]:
    """Kimi Delta Attention beside MLA; vLLM: ``kda_state_shape``, ``MLAAttentionSpec``."""
    linear = _Fields(text["linear_attn_config"])
    heads, size = linear["num_heads"], linear["head_dim"]
    latent = Attention(1, text["kv_lora_rank"] + text["qk_rope_head_dim"], latent=True)
    columns = linear["short_conv_kernel_size"] - 1
    return latent, Recurrent(3 * heads * size, columns, heads, size * size)


FAMILIES: dict[str, Callable[[_Fields], tuple[Attention, Recurrent]]] = {
    "qwen3_next": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "granitemoehybrid": _granite,
    "falcon_h1": _granite,
    "nemotron_h": _nemotron,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "jamba": _jamba,
    "kimi_linear": _kimi,
}
