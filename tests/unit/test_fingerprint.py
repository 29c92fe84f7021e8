# SPDX-License-Identifier: Apache-2.0
"""What must match for two engines to share records, and what need not."""

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
import vllm.envs as envs
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.identity.weights import LOADED
from lmcache_hybrid.tools.tiny_models import make_model
from lmcache_hybrid.worker import fingerprint as module
from lmcache_hybrid.worker import fingerprint_settings as settings
from lmcache_hybrid.worker.fingerprint import fingerprints
from lmcache_hybrid.worker.pages import GroupPages

from .helpers import PLAN, make_pages

_, PAGES = make_pages()
STATE_LAYER = PAGES[0].layers[0]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("granite4", model_dir / "granite4")


@pytest.fixture(scope="module")
def made(model: Path) -> VllmConfig:
    """vLLM's own configuration, with layers as the workers register them."""
    config = EngineArgs(model=str(model), max_model_len=4096).create_engine_config()
    context = config.compilation_config.static_forward_context
    for group, pages in PAGES.items():
        for layer in pages.layers:
            backend = type("AttentionBackend", (), {})
            context[layer] = SimpleNamespace(attn_backend=backend)
            if group in PLAN.states:
                context[layer].get_state_shape = lambda: ((3, 64), (4, 16, 16))
                context[layer].get_state_dtype = lambda: (torch.bfloat16, torch.float32)
    return config


@pytest.fixture
def config(made: VllmConfig) -> VllmConfig:
    return copy.deepcopy(made)


def of(config: VllmConfig, plan: GroupPlan = PLAN, pages=PAGES, draft: str = "draft") -> bytes:
    """As after loading the same weights for every configuration; see test_weights.py."""
    if config.speculative_config is not None and config.speculative_config.draft_model_config:
        LOADED.note(config.speculative_config.draft_model_config, draft)
    LOADED.note(config.model_config, "weights")
    return fingerprints(config, plan, pages)[0]


def test_equal_configurations_share(config, made):
    assert of(config) == of(made) and len(of(made)) == 16


# One change each. Keys are what changes, values change a VllmConfig in place.
FACTS = {
    "dtype": lambda c: setattr(c.model_config, "dtype", torch.float16),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "quantization arguments": lambda c: setattr(
        c.model_config, "quantization_config", {"linear": "int8"}
    ),
    "rope": lambda c: c.model_config.hf_config.rope_parameters.update(rope_theta=5000.0),
    "layer types": lambda c: c.model_config.hf_config.layer_types.reverse(),
    "multiplier": lambda c: setattr(c.model_config.hf_config, "attention_multiplier", 0.5),
    "code": lambda c: setattr(c.model_config, "code_revision", "0" * 40),
    "model class": lambda c: setattr(c.model_config, "model_impl", "transformers"),
    "class override": lambda c: setattr(c.model_config, "model_class_overrides", {"A": "b:A"}),
    "dummy weights": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "cache dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2"),
    "cache layout": lambda c: setattr(c.cache_config, "kv_cache_layout", "LBHNC"),
    "replayssm": lambda c: setattr(c.cache_config, "use_replayssm", True),
    "state dtype": lambda c: setattr(
        c.compilation_config.static_forward_context[STATE_LAYER],
        "get_state_dtype",
        lambda: (torch.float16, torch.float32),
    ),
    "state shape": lambda c: setattr(
        c.compilation_config.static_forward_context[STATE_LAYER],
        "get_state_shape",
        lambda: ((64, 3), (4, 16, 16)),
    ),
    "backend": lambda c: setattr(
        c.compilation_config.static_forward_context[STATE_LAYER],
        "attn_backend",
        type("OtherBackend", (), {}),
    ),
    "mixture of experts": lambda c: setattr(c.kernel_config, "moe_backend", "triton"),
    "linear layers": lambda c: setattr(c.kernel_config, "linear_backend", "marlin"),
    "linear layers by quantisation": lambda c: setattr(
        c.kernel_config, "linear_backend_per_quant", {"fp8": "triton"}
    ),
    "quantised queries": lambda c: setattr(
        c.attention_config, "disable_flashinfer_q_quantization", True
    ),
    "quantised queries of prefills": lambda c: setattr(
        c.attention_config, "use_prefill_query_quantization", True
    ),
    "trtllm": lambda c: setattr(c.attention_config, "use_trtllm_attention", True),
    "stochastic rounding": lambda c: setattr(c.mamba_config, "enable_stochastic_rounding", True),
    "additional": lambda c: setattr(c, "additional_config", {"gdn_prefill_backend": "triton"}),
    "rank": lambda c: setattr(c.parallel_config, "rank", 1),
    "world": lambda c: setattr(c.parallel_config, "world_size", 2),
    "tensor parallel": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "pipeline parallel": lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "context parallel": lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
    "decode context": lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "speculative": lambda c: setattr(c, "speculative_config", speculative(None)),
    "lora": lambda c: setattr(c, "lora_config", LoRAConfig(lora_dtype="float16")),
    "multimodal": lambda c: setattr(
        c.model_config, "multimodal_config", MultiModalConfig(mm_processor_kwargs={"size": 2})
    ),
    "device": lambda c: setattr(c.device_config, "device_type", "cuda"),
}


def media(**options) -> SimpleNamespace:
    return SimpleNamespace(multimodal_config=MultiModalConfig(**options))


def test_which_tokens_of_a_video_are_left_out_matters():
    """Both methods leave equally many."""
    evs, vidcom2 = (
        module._multimodal(media(video_pruning_rate=0.5, video_pruning_method=method))
        for method in ("evs", "vidcom2")
    )
    assert evs != vidcom2
    assert module._multimodal(media(video_pruning_method="vidcom2")) == (
        module._multimodal(media())
    )


@pytest.mark.parametrize("text_only", [False, True])
def test_code_that_makes_pixels_of_an_image_matters_where_there_may_be_one(monkeypatch, text_only):
    found = []
    for release in ("5.16.1", "5.19.0"):
        monkeypatch.setattr(module, "_version", lambda name, release=release: release)
        found.append(module._multimodal(media(language_model_only=text_only)))
    assert (found[0] == found[1]) == text_only


def test_scales_of_a_vision_tower_matter_by_their_content(tmp_path):
    found = []
    for name, content in (("a", "1"), ("b", "2"), ("c", "1")):
        file = tmp_path / f"{name}.json"
        file.write_text(content)
        made = media()
        made.multimodal_config.mm_encoder_fp8_scale_path = str(file)
        found.append(module._multimodal(made))
    assert found[0] == found[2] != found[1] != module._multimodal(media())


def test_which_tokens_of_a_block_a_rank_holds_matters(made, monkeypatch):
    """Without context parallelism nothing more is asked, so that records keep their names."""

    def named(size: int, rank: int = 0, **settings) -> bytes:
        config = copy.deepcopy(made)
        config.parallel_config.decode_context_parallel_size = size
        for name, value in settings.items():
            setattr(config.parallel_config, name, value)
        monkeypatch.setattr(module, "get_dcp_world_size_and_rank", lambda: (size, rank))
        return of(config)

    settings = "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"
    assert {named(1), *(named(1, rank=1, **{name: 4}) for name in settings)} == {of(made)}
    found = [named(2), named(2, rank=1), named(4), named(4, rank=1)]
    found += [named(2, **{name: 4}) for name in settings]
    found.append(named(2, dcp_comm_backend="a2a"))
    assert len({of(made), *found}) == 1 + len(found)


def speculative(draft, tokens: int = 2, method: str = "ngram") -> SimpleNamespace:
    return SimpleNamespace(
        method=method, num_speculative_tokens=tokens, draft_model_config=draft, model=None
    )


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_matters_alone(config, made, fact):
    FACTS[fact](config)
    assert of(config) != of(made)


def test_no_two_changes_give_the_same_fingerprint(made):
    found = {of(made)}
    for change in FACTS.values():
        config = copy.deepcopy(made)
        change(config)
        found.add(of(config))
    assert len(found) == 1 + len(FACTS)


# Where an engine runs, how large it is and what it is called must not cost hits.
NO_FACTS = {
    "loader": lambda c: setattr(c.load_config, "model_loader_extra_config", {"uri": "s3://b"}),
    "weights elsewhere": lambda c: setattr(c.model_config, "model_weights", "s3://bucket/b"),
    "context": lambda c: setattr(c.model_config, "max_model_len", 2048),
    "name": lambda c: setattr(c.model_config, "served_model_name", "other"),
    "seed": lambda c: setattr(c.model_config, "seed", 7),
    "tokenizer": lambda c: setattr(c.model_config, "tokenizer", "elsewhere"),
    "eager": lambda c: setattr(c.model_config, "enforce_eager", True),
    "memory": lambda c: setattr(c.cache_config, "gpu_memory_utilization", 0.5),
    "blocks": lambda c: setattr(c.cache_config, "num_gpu_blocks", 77),
    "retention": lambda c: setattr(c.cache_config, "prefix_cache_retention_interval", None),
    "batch": lambda c: setattr(c.scheduler_config, "max_num_batched_tokens", 512),
    "data parallel rank": lambda c: setattr(c.parallel_config, "data_parallel_rank", 3),
    "engine id": lambda c: setattr(c, "instance_id", "other"),
    "name in the config": lambda c: setattr(c.model_config.hf_config, "_name_or_path", "/else"),
    "transformers": lambda c: setattr(c.model_config.hf_config, "transformers_version", "9"),
}


# As of the releases this was looked at with. A field that is in neither list counts
# until it has been looked at too: add it here, or to NOT_COUNTED with its reason.
COUNTED = {
    "attention_config": "minimax_m3_msa_decode_backend flash_attn_version use_trtllm_attention "
    "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization "
    "indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa "
    "trtllm_ragged_backend minimax_m3_indexer_cp",
    "kernel_config": "moe_backend sparse_indexer_topk_backend linear_backend "
    "linear_backend_per_quant monokernel",
    "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "cache_config": "kv_cache_layout cache_dtype sliding_window use_replayssm use_kda_recoverssm "
    "kv_sharing_fast_prefill swa_bounded_replay",
}


# What the oldest supported vLLM does not know yet.
SINCE = {
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": (0, 32),
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": (0, 33),
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": (0, 33),
    "trtllm_ragged_backend": (0, 33),
    "minimax_m3_indexer_cp": (0, 33),
    "indexer_tp_shard_min_rows": (0, 33),
    "monokernel": (0, 33),
    "simple_cpu_offload_num_blocks": (0, 33),
}
ABSENT = {name for name, first in SINCE.items() if vllm.__version_tuple__[:2] < first}


@pytest.mark.parametrize("section", COUNTED)
def test_every_setting_has_been_looked_at(made, section):
    assert settings.counted(made)[section].keys() == set(COUNTED[section].split()) - ABSENT
    fields = {field.name for field in dataclasses.fields(getattr(made, section))}
    assert settings.NOT_COUNTED[section].keys() - ABSENT <= fields, "vLLM has given up a setting"


@pytest.mark.parametrize("section", COUNTED)
def test_a_setting_that_counts_is_the_same_in_every_process(made, section):
    """No address in its text."""
    text = json.dumps(module._plain(settings.counted(made)[section]))
    assert " at 0x" not in text and " object" not in text


@pytest.mark.parametrize("fact", NO_FACTS)
def test_where_an_engine_runs_and_how_large_it_is_does_not_matter(config, made, fact):
    NO_FACTS[fact](config)
    assert of(config) == of(made)


@pytest.mark.parametrize(
    "plan",
    [
        GroupPlan(2 * PLAN.block_size, PLAN.attention, PLAN.states),
        GroupPlan(PLAN.block_size, PLAN.attention, PLAN.states[::-1]),
        GroupPlan(PLAN.block_size, (*PLAN.attention, 0), PLAN.states),
        GroupPlan(PLAN.block_size, PLAN.attention, PLAN.states, split=((2, 2),)),
    ],
)
def test_blocks_and_groups_matter(made, plan):
    assert of(made, plan) != of(made)


def test_the_model_runner_does_not_matter(made, monkeypatch):
    """The layers' kernels make the bytes; tests/e2e/test_v2.py compares them."""
    found = set()
    for version2 in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", version2)
        assert made.use_v2_model_runner == bool(int(version2))
        found.add(of(made))
    assert len(found) == 1


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(12, 2, 16, 16, dtype=torch.float8_e4m3fn),
        torch.zeros(12, 16, 2, 8, dtype=torch.bfloat16),
        torch.zeros(12, 16, 2, 8, dtype=torch.bfloat16).transpose(1, 2),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_type_shape_and_strides_of_pages_matter(made, cache):
    names = PAGES[2].layers
    other = GroupPages(names, {name: cache.clone() for name in names})
    assert other.layers == names
    assert of(made, pages={**PAGES, 2: other}) != of(made)


def test_order_of_layers_matters(made):
    other = copy.copy(PAGES[2])
    other.layers = PAGES[2].layers[::-1]
    assert of(made, pages={**PAGES, 2: other}) != of(made)


@pytest.mark.parametrize("name", module._ENVIRONMENT)
def test_environment_that_changes_values_matters(made, monkeypatch, name):
    before = of(made)
    if name in ABSENT:
        pytest.skip("this vLLM has no such setting")
    assert hasattr(envs, name), "vLLM has renamed it"
    monkeypatch.setattr(envs, name, "changed", raising=False)
    assert of(made) != before


def test_conv_layout_matters(made, monkeypatch):
    """State pages are plain bytes to vLLM: shape and strides do not tell SD from DS."""
    before = of(made)
    other = "DS" if mamba_utils.get_conv_state_layout() == "SD" else "SD"
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: other)
    assert of(made) != before


@pytest.mark.parametrize(
    "name, value",
    [("_is_amx_tile_supported", lambda: "other"), ("machine", lambda: "other")],
)
def test_the_processor_matters(made, monkeypatch, name, value):
    before = of(made)
    monkeypatch.setattr(torch.cpu if name.startswith("_") else module.platform, name, value)
    assert of(made) != before


def test_facts_of_pages_matter_and_none_leaves_the_text_as_it_was(made, monkeypatch):
    found = []
    for facts in (
        {},
        {"layer": {"struct of arrays": True}},
        {"layer": {"struct of arrays": False}},
    ):
        monkeypatch.setattr(module, "page_facts", lambda config, layers, facts=facts: facts)
        found.append(module._facts(made, PLAN, PAGES))
    assert "pages" not in found[0] and found[1].keys() == found[2].keys()
    assert len({module._digest(each) for each in found}) == 3


def test_code_from_outside_matters_and_none_leaves_the_text_as_it_was(made, monkeypatch):
    found = [of(made)]
    for code in ({}, {"model": ["plugged-kit==1"]}, {"model": ["plugged-kit==2"]}):
        monkeypatch.setattr(module, "model_code", lambda config, code=code: code)
        found.append(of(made))
    assert found[0] == found[1] and len(set(found)) == 3


def test_versions_matter(made, monkeypatch):
    before = of(made)
    monkeypatch.setattr(module.record_format, "VERSION", 99)
    recorded = of(made)
    monkeypatch.setattr(module, "_version", lambda name: "99")
    assert len({before, recorded, of(made)}) == 3


def test_context_length_matters_for_longrope_only(made):
    """vLLM picks its long or short factors by max_model_len, see ``NO_FACTS`` for the rest."""
    long, short = copy.deepcopy(made), copy.deepcopy(made)
    for config, length in ((long, 8192), (short, 4096)):
        config.model_config.hf_config.rope_parameters["rope_type"] = "longrope"
        config.model_config.max_model_len = length
    assert of(long) != of(short)


def test_drafts_matter(made, model, tmp_path):
    """The draft's own weights too: its layers have pages in the attention group."""

    def with_drafts(config, weights: str = "draft") -> bytes:
        other = copy.deepcopy(made)
        other.speculative_config = config
        return of(other, draft=weights)

    draft = copy.deepcopy(made.model_config)
    draft.model = str(shutil.copytree(model, tmp_path / "draft"))
    found = [
        of(made),
        with_drafts(speculative(None)),
        with_drafts(speculative(None, tokens=3)),
        with_drafts(speculative(None, method="suffix")),
        with_drafts(speculative(made.model_config, method="mtp")),
        with_drafts(speculative(draft, method="eagle")),
    ]
    assert with_drafts(speculative(copy.deepcopy(draft), method="eagle")) == found[-1]
    found.append(with_drafts(speculative(draft, method="eagle"), weights="trained further"))
    assert len(set(found)) == len(found)


def test_facts_read_the_same_in_every_process():
    """Order of sets, hashes and addresses differ from process to process.

    That the facts of a real engine are stable shows where a store outlives one.
    """
    program = (
        "import json, torch\n"
        "from lmcache_hybrid.worker.fingerprint import _plain\n"
        "from transformers import PretrainedConfig\n"
        "value = {1: {'a', 'b', 'c'}, 'b': [object(), frozenset([(1, 2), 'x'])],\n"
        "    'c': (torch.float16, lambda: 0), 'd': PretrainedConfig(pad_token_id=3)}\n"
        "text = json.dumps(_plain(value), sort_keys=True)"
    )
    here: dict = {}
    exec(program, here)
    there = subprocess.run(
        [sys.executable, "-c", program + "\nprint(text)"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.splitlines()[-1].replace("__main__.", "") == here["text"]


# Configuration


def test_an_override_of_the_configuration_file_matters(model, tmp_path, made):
    """hf_overrides: the file on disk is the same, the model is another."""
    folder = shutil.copytree(model, tmp_path / "model")
    other = EngineArgs(
        model=str(folder), max_model_len=4096, hf_overrides={"attention_multiplier": 0.25}
    ).create_engine_config()
    same = EngineArgs(model=str(folder), max_model_len=4096).create_engine_config()
    for config in (other, same):
        config.compilation_config.static_forward_context.update(
            made.compilation_config.static_forward_context
        )
    assert of(same) == of(made), "the path matters"
    assert of(other) != of(made)
    assert json.loads((folder / "config.json").read_text())["attention_multiplier"] == 0.125
