# SPDX-License-Identifier: Apache-2.0
"""What sizing computes from a config equals what vLLM computes from the same one.

vLLM's side is its own code: the model classes' state shapes and dtypes, its KV cache
specs, its search for N and its grouping, on a stand-in for the config of an engine.
Only Qwen3.5's class cannot be imported here (it needs torchvision); its two methods
are those of Qwen3-Next's, word for word.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm.config import ModelConfig
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import (
    NemotronHForCausalLMConfig,
    Qwen3_5ForConditionalGenerationConfig,
)
from vllm.model_executor.models.falcon_h1 import FalconH1ForCausalLM
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.jamba import JambaForCausalLM
from vllm.model_executor.models.lfm2 import Lfm2ForCausalLM
from vllm.model_executor.models.lfm2_moe import Lfm2MoeForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.models.kimi_k3 import KimiLinearForCausalLM
from vllm.platforms.interface import Platform as VllmPlatform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools import tiny_families
from lmcache_hybrid.tools.sizing import catalogue
from lmcache_hybrid.tools.sizing.blocks import PLATFORMS, Sizes, compute
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, ModelShape, read_shape

from .planning import get_kv_cache_groups_uniform_page_size

# vLLM's name of the grid that FlashInfer's prefill writes checkpoints on; 0.32 has none.
CHECKPOINTS = "FLASHINFER_GDN_CHECKPOINT_ALIGNMENT"
PREFILLS = ("triton", "flashinfer") if hasattr(gdn_attn, CHECKPOINTS) else ("triton",)
CLASSES: dict[str, Any] = {
    "qwen3_next": Qwen3NextForCausalLM,
    "qwen3_5_text": Qwen3NextForCausalLM,
    "qwen3_5_moe_text": Qwen3NextForCausalLM,
    "granitemoehybrid": GraniteMoeHybridForCausalLM,
    "falcon_h1": FalconH1ForCausalLM,
    "nemotron_h": NemotronHForCausalLM,
    "lfm2": Lfm2ForCausalLM,
    "lfm2_moe": Lfm2MoeForCausalLM,
    "jamba": JambaForCausalLM,
    "kimi_linear": KimiLinearForCausalLM,
}
# transformers' layer types, in vLLM's order of layers.
ATTENDS = ("full_attention", "attention")
RECURS = ("linear_attention", "mamba", "conv")


@dataclass
class Engine:
    """vLLM's view of one model on one rank, without an engine."""

    config: dict
    platform: str = "gpu"
    tp: int = 1
    kv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    block_size: int = 0
    gdn_prefill: str = "triton"
    drafts: int = 0

    def __post_init__(self) -> None:
        kind = self.config["model_type"]
        self.hf = _hf_config(self.config)
        convertor = ModelArchConfigConvertorBase(self.hf, self.hf)
        arch = SimpleNamespace(
            head_size=convertor.get_head_size(),
            total_num_kv_heads=convertor.get_total_num_kv_heads(),
        )
        self.model = SimpleNamespace(
            architecture="",
            dtype=getattr(torch, self.config["dtype"]),
            hf_config=self.hf,
            hf_text_config=self.hf,
            is_hybrid=True,
            model_arch_config=arch,
            use_mla=kind == "kimi_linear",
        )
        self.parallel = SimpleNamespace(tensor_parallel_size=self.tp)
        self.model.get_head_size = lambda: ModelConfig.get_head_size(self.model)
        self.model.get_num_kv_heads = lambda parallel: ModelConfig.get_num_kv_heads(
            self.model, parallel
        )
        self.cache = SimpleNamespace(
            block_size=self.block_size or PLATFORMS[self.platform].block_size,
            cache_dtype=self.kv_dtype,
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=self.ssm_dtype,
            mamba_cache_mode="align",
            mamba_block_size=None,
            user_specified_mamba_block_size=False,  # read by vLLM up to 0.31
            mamba_page_size_padded=None,
            use_replayssm=False,
            use_kda_recoverssm=False,
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model,
            cache_config=self.cache,
            parallel_config=self.parallel,
            speculative_config=SimpleNamespace(num_speculative_tokens=self.drafts)
            if self.drafts
            else None,
            num_speculative_tokens=self.drafts,
            compilation_config=SimpleNamespace(static_forward_context={"mamba": self.layer()}),
        )
        update = {"nemotron_h": NemotronHForCausalLMConfig}.get(kind)
        if kind.startswith("qwen3_5"):
            update = Qwen3_5ForConditionalGenerationConfig
        if update is not None:
            update.verify_and_update_config(self.vllm_config)

    def layer(self) -> QwenGatedDeltaNetAttention:
        """A recurrent layer, as far as vLLM 0.33 asks it for where it can write checkpoints."""
        made = QwenGatedDeltaNetAttention.__new__(QwenGatedDeltaNetAttention)
        flashinfer = self.gdn_prefill == "flashinfer"
        made._checkpoint_alignment = getattr(gdn_attn, CHECKPOINTS) if flashinfer else None
        return made

    def align(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let vLLM choose N. Mutates ``cache``."""
        backend: Any = CPUAttentionBackend if self.platform == "cpu" else FlashAttentionBackend
        if self.model.use_mla:
            backend = FlashMLABackend

        class Here(VllmPlatform):
            _find_non_ssm_backends = classmethod(lambda cls, config: [backend])

        model = CLASSES[self.config["model_type"]]
        monkeypatch.setattr(
            ModelRegistry, "resolve_model_cls", lambda architecture, model_config: (model, "")
        )
        Here._align_hybrid_block_size(self.vllm_config, backend)

    def attention_spec(self) -> FullAttentionSpec:
        kind = MLAAttentionSpec if self.model.use_mla else FullAttentionSpec
        dtype = torch.uint8 if self.kv_dtype == "fp8" else self.model.dtype
        return kind(
            block_size=self.cache.block_size,
            num_kv_heads=self.model.get_num_kv_heads(self.parallel),
            head_size=self.model.get_head_size(),
            dtype=dtype,
        )

    def state_spec(self) -> MambaSpec:
        model = CLASSES[self.config["model_type"]]
        return MambaSpec(
            block_size=self.cache.block_size,
            shapes=tuple(model.get_mamba_state_shape_from_config(self.vllm_config)),
            dtypes=tuple(model.get_mamba_state_dtype_from_config(self.vllm_config)),
            page_size_padded=self.cache.mamba_page_size_padded,
            mamba_cache_mode="align",
        )

    def layers(self) -> list[str]:
        """ATTENTION or STATE of each layer that keeps something."""
        if self.config["model_type"] == "falcon_h1":
            return [ATTENTION, STATE] * self.hf.num_hidden_layers
        if self.config["model_type"] == "kimi_linear":
            full = self.hf.linear_attn_config["full_attn_layers"]
            return [ATTENTION if i + 1 in full else STATE for i in range(self.hf.num_hidden_layers)]
        kinds = {**dict.fromkeys(ATTENDS, ATTENTION), **dict.fromkeys(RECURS, STATE)}
        return [kinds[name] for name in self.hf.layer_types if name in kinds]

    def groups(self) -> list[tuple[str, int, int]]:
        """(kind, layers, bytes without padding) as vLLM groups them."""
        attention, state = self.attention_spec(), self.state_spec()
        assert attention.page_size_bytes == state.page_size_bytes, "pages of two sizes"
        specs = {
            f"{index}.{kind}": attention if kind == ATTENTION else state
            for index, kind in enumerate(self.layers())
        }
        return [
            (
                STATE if isinstance(group.kv_cache_spec, MambaSpec) else ATTENTION,
                len(group.layer_names),
                group.kv_cache_spec.real_page_size_bytes * len(group.layer_names),
            )
            for group in get_kv_cache_groups_uniform_page_size(specs)
        ]


def _hf_config(config: dict) -> Any:
    """What transformers (or vLLM) makes of a config.json."""
    kind = config["model_type"]
    fields = {name: value for name, value in config.items() if name != "model_type"}
    if kind != "nemotron_h":
        # transformers wants the two to agree; our table names one of them.
        fields.setdefault("num_hidden_layers", len(config.get("layer_types", ())))
    if kind == "kimi_linear":
        linear = {**config["linear_attn_config"], "kda_layers": []}
        return KimiLinearConfig(**{**fields, "linear_attn_config": linear})
    made = transformers.AutoConfig.for_model(kind, **fields)
    if kind == "lfm2" and not hasattr(made, "conv_dim"):
        made.conv_dim = made.hidden_size
    return made


def sizes_of(shape: ModelShape, engine: Engine) -> Sizes:
    return compute(
        shape,
        PLATFORMS[engine.platform].with_gdn_prefill(engine.gdn_prefill),
        tp=engine.tp,
        kv_dtype=engine.kv_dtype,
        ssm_dtype=engine.ssm_dtype,
        block_size=engine.block_size,
        drafts=engine.drafts,
    )


def check(config: dict, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sizes:
    engine = Engine(config, **options)
    engine.align(monkeypatch)
    sizes = sizes_of(read_shape(config), engine)
    assert sizes.block_size == engine.cache.block_size
    assert sizes.token_bytes * sizes.block_size == engine.attention_spec().page_size_bytes
    assert sizes.state_bytes == engine.state_spec().real_page_size_bytes
    assert [(g.kind, g.layers, g.bytes) for g in sizes.groups] == engine.groups()
    return sizes


known = pytest.mark.parametrize("known", catalogue.models(), ids=lambda known: known.name)


@known
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_model_of_the_table(known, tp, monkeypatch):
    try:
        compute(known.shape, PLATFORMS["gpu"], tp=tp)
    except ConfigError:
        # vLLM cannot split it either: heads, or the convolution of one group too many.
        with pytest.raises(AssertionError):
            engine = Engine(known.config, tp=tp)
            heads = engine.model.model_arch_config.total_num_kv_heads
            assert max(heads, tp) % min(heads, tp) == 0
            engine.state_spec()
        return
    check(known.config, monkeypatch, tp=tp)


@known
@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "fp8"},
        {"ssm_dtype": "float32"},
        {"ssm_dtype": "bfloat16"},
        {"block_size": 64},
        {"block_size": 4096},
        {"drafts": 1},
        {"drafts": 3, "tp": 2},
        {"platform": "cpu", "ssm_dtype": "float32"},
        {"platform": "cpu", "ssm_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_options_of_the_engine(known, options, monkeypatch):
    if known.config["model_type"] == "kimi_linear" and options.get("platform") == "cpu":
        pytest.skip("vLLM has no such kernel on CPU")
    check(known.config, monkeypatch, **options)


@pytest.mark.parametrize("gdn_prefill", PREFILLS)
@pytest.mark.parametrize("block_size", [0, 96, 4096])
@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3.6-27B", "Qwen3.5-122B-A10B"])
def test_checkpoints_of_gated_delta_nets(name, block_size, gdn_prefill, monkeypatch):
    known = next(known for known in catalogue.models() if known.name == name)
    check(known.config, monkeypatch, gdn_prefill=gdn_prefill, block_size=block_size)


# N of README.md's table, which the engine tests of each family meet.
@pytest.mark.parametrize(
    ("family", "block_size", "groups"),
    [
        ("qwen3_next", 384, "sss a"),
        ("granite4", 256, "sss a"),
        ("falcon_h1", 384, "a s"),
        ("lfm2", 128, "ss a"),
    ],
)
def test_the_tiny_models_on_cpu(family, block_size, groups, monkeypatch):
    spec = tiny_families.FAMILIES[family]
    made = getattr(transformers, spec.config_class)(
        **{**tiny_families.COMMON, **spec.config, "dtype": "bfloat16"}
    )
    config = {**made.to_dict(), "dtype": "bfloat16"}
    sizes = check(config, monkeypatch, platform="cpu", ssm_dtype="float32")
    # The engine tests run on a CPU with AVX512-BF16, where vLLM makes auto float32.
    assert sizes == compute(read_shape(config), PLATFORMS["cpu"])
    assert sizes.block_size == block_size
    kinds = "".join(group.kind[0] for group in sizes.groups)
    assert kinds == groups.replace(" ", "")
