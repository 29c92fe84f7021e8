# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of a model and of settings."""

from dataclasses import replace
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lmcache_hybrid.tools.doctor.context import Context, read_context
from lmcache_hybrid.tools.doctor.model import Model, ModelError, gpu_sizes, kv_cache_config
from lmcache_hybrid.tools.doctor.options import (
    check_chunk_size,
    check_hosts,
    check_model,
    check_options,
)
from lmcache_hybrid.tools.flags import parse_flags
from lmcache_hybrid.tools.sizing.blocks import GDN_PREFILLS, PLATFORMS, compute
from lmcache_hybrid.tools.sizing.shape import load_shape
from lmcache_hybrid.tools.tiny_families import FAMILIES
from lmcache_hybrid.tools.tiny_models import make_model

from ..helpers import model
from .findings import (
    ERROR,
    MODEL,
    OK,
    SKIPPED,
    TRANSFER,
    WARNING,
    assert_sentences,
    described,
    of_status,
    only,
)

# Model


@pytest.mark.parametrize(
    "family, sizes, attention, states, token_bytes, state_bytes",
    [
        # Pages of two attention layers; states of two layers in each group. Where the processor
        # has no bfloat16, vLLM keeps states in it, else in float32.
        ("qwen3_next", (384, 256), (3,), (0, 1, 2), 2 * 512, (3 * 2 * 135_680, 3 * 2 * 70_144)),
        ("lfm2", (128,), (2,), (0, 1), 2 * 512, (2 * 2 * 512,)),
        ("falcon_h1", (384, 256), (0,), (1,), None, None),
    ],
)
def test_a_models_groups_and_bytes(family, sizes, attention, states, token_bytes, state_bytes):
    found = described(model(family))
    size = found.block_size
    assert found.served and size in sizes
    assert (found.attention, found.states) == (attention, states)
    if token_bytes:
        assert found.attention_bytes == token_bytes * size
        assert found.state_bytes == state_bytes[sizes.index(size)]
        assert found.largest == max(found.attention_bytes, found.state_bytes // len(states))
    text = " ".join(f.message for f in assert_sentences(check_model(of(found))))
    assert f"N is {size} tokens" in text and f"{found.state_bytes:,} bytes" in text


def of(model: Model | None, named: str | None = "m") -> Context:
    return Context(None, None, model, named, ())


@pytest.mark.parametrize(
    "unit, status, says, fix",
    [
        (
            0,
            OK,
            "only longer prompts can hit, at multiples of",
            "Set --prefix-match-unit 64: hits from 65 tokens on.",
        ),
        (96, OK, "with --prefix-match-unit 96 prompts of 97 tokens and more hit", ""),
        (100, ERROR, "--prefix-match-unit 100 does not divide this model's", "Use 96."),
    ],
)
def test_a_unit(unit, status, says, fix):
    found = [f for f in check_model(of(replace(MODEL, unit=unit))) if f.check == "block size"]
    assert_sentences(found)
    assert only(found).status == status and says in only(found).message
    assert only(found).fix == fix


@pytest.mark.parametrize("unit, shortest", [(0, 768), (96, 192)])
def test_a_block_that_a_drafter_costs_is_told(unit, shortest):
    model = replace(MODEL, unit=unit, drafts="The last block is given up.")
    found = [f for f in check_model(of(model)) if f.check == "drafts"]
    assert_sentences(found)
    assert only(found).message.endswith(
        f" A prompt of fewer than {shortest} tokens leaves no state for its repeat."
    )
    assert not [f for f in check_model(of(MODEL)) if f.check == "drafts"]


def on_a_cpu(**more) -> Model:
    return replace(MODEL, **{"device": "cpu", "gpu_sizes": (272, 320), "plan": "m --tp 4"} | more)


@pytest.mark.parametrize(
    "sizes, told, fix",
    [
        ((272, 320), "(N is 272 or 320 there).", "For a GPU: lmcache-hybrid plan m --tp 4."),
        ((), "on a GPU N and bytes differ.", "For a GPU: run this on it."),
    ],
    ids=str,
)
def test_figures_of_a_cpu_are_told_as_such(sizes, told, fix):
    found = check_model(of(on_a_cpu(gpu_sizes=sizes)))
    device = only(finding for finding in found if finding.check == "device")
    assert device.status == OK and device.message.endswith(told) and device.fix == fix
    here = list(check_model(of(replace(MODEL, device="cuda"))))[0]
    assert here.message == "N and bytes are those of vLLM on this device: cuda."


@pytest.mark.parametrize(
    "sizes, unit, status, told, fix",
    [
        # vLLM exits on a GPU if U does not divide N.
        ((272,), 0, OK, "N is 384 tokens", ""),
        ((320, 272), 0, OK, "N is 384 tokens", ""),
        ((), 0, OK, "N is 384 tokens", ""),
        ((320,), 0, OK, "N is 384", "Set --prefix-match-unit 64: hits from 65 tokens on."),
        (
            (272,),
            64,
            WARNING,
            "on a GPU vLLM exits, as N is 272 there.",
            "For a GPU choose U with lmcache-hybrid plan m --tp 4.",
        ),
        ((320,), 64, OK, "prompts of 65 tokens and more hit", ""),
        ((), 64, OK, "prompts of 65 tokens and more hit", ""),
        ((320,), 80, ERROR, "size 384 on a CPU.", "Leave it out here; on a GPU it is right."),
        (
            (272,),
            100,
            ERROR,
            "block size 384.",
            "Leave it out; `lmcache-hybrid plan` has units for a GPU.",
        ),
        ((192,), 100, ERROR, "block size 384.", "Use 96."),
    ],
    ids=str,
)
def test_on_a_cpu_a_unit_must_also_fit_a_gpu(sizes, unit, status, told, fix):
    found = check_model(of(on_a_cpu(gpu_sizes=sizes, unit=unit)))
    said = only(assert_sentences(f for f in found if f.check == "block size"))
    assert (said.status, said.fix) == (status, fix) and told in said.message


@pytest.mark.parametrize("sizes, advised", [((272,), False), ((384,), True)], ids=str)
def test_what_short_prompts_need_must_also_fit_a_gpu(context, sizes, advised):
    found = context(model=on_a_cpu(gpu_sizes=sizes, longest=384))
    told = only(of_status(check_options(found), ERROR))
    assert ("--prefix-match-unit" in told.message) is advised


@pytest.mark.parametrize("generates", [True, False])
def test_a_prompt_to_pool_may_be_as_long_as_the_model_allows(context, generates):
    found = context(model=replace(MODEL, longest=385, generates=generates))
    assert bool(of_status(check_options(found), ERROR)) is generates
    assert described(model("lfm2"), "--max-model-len", "1024").generates


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1", "nemotron_h"])
def test_a_gpus_block_size_is_that_of_the_plan(family):
    """Computed from what vLLM reads of the model, with the flags of the engine."""
    flags = ["--tensor-parallel-size", "2", "--mamba-ssm-cache-dtype", "float32"]
    found = described(model(family), *flags, "--block-size", "64")
    gpu, shape = PLATFORMS["gpu"], load_shape(Path(model(family)))
    assert found.gpu_sizes == tuple(
        dict.fromkeys(
            compute(
                shape, gpu.with_gdn_prefill(kernel), tp=2, ssm_dtype="float32", block_size=64
            ).block_size
            for kernel in GDN_PREFILLS
        )
    )
    assert found.device == "cpu"
    assert found.plan == f"{model(family)} --tp 2 --ssm-dtype float32 --block-size 64"


def test_the_kernel_that_a_flag_names_decides():
    found = described(model("qwen3_next"), "--gdn-prefill-backend", "triton")
    gpu = PLATFORMS["gpu"]
    assert found.gpu_sizes == (compute(load_shape(Path(model("qwen3_next"))), gpu).block_size,)


def test_a_family_that_plan_does_not_know_has_no_size_on_a_gpu():
    arguments = AsyncEngineArgs.from_cli_args(parse_flags(model("lfm2"), []))
    assert gpu_sizes(arguments, {"model_type": "olmo_hybrid"}, 0) == ()


@pytest.mark.parametrize("unit", [0, 64])
def test_a_unit_has_no_effect_beside_blocks_of_several_sizes(unit, monkeypatch):
    """As beside windows: GroupPlan.with_unit knows where it has one."""

    def of_two_sizes(config):
        groups = kv_cache_config(config)
        for group in groups.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, FullAttentionSpec):
                group.kv_cache_spec = replace(spec, block_size=2 * spec.block_size)
        return groups

    monkeypatch.setattr("lmcache_hybrid.tools.doctor.model.kv_cache_config", of_two_sizes)
    flags = ["--prefix-match-unit", str(unit)] if unit else []
    found = check_model(of(described(model("lfm2"), *flags)))
    said = only(f for f in found if f.check == "block size")
    assert said.status == (ERROR if unit else OK)
    assert said.fix == ("Leave it out." if unit else "")
    assert ("--prefix-match-unit 64 has no effect" in said.message) is bool(unit)


def test_flags_of_vllm_decide_what_a_rank_holds():
    """As the layers of that rank say; no other rank is started."""
    one, half = (
        described(model("qwen3_next"), *flags)
        for flags in ([], ["--tensor-parallel-size", "2", "--max-model-len", "3k"])
    )
    assert (one.ranks, half.ranks, half.longest) == (1, 2, 3000)
    assert half.attention_bytes / half.block_size == one.attention_bytes / one.block_size / 2
    assert 2 * half.state_bytes == one.state_bytes
    text = " ".join(f.message for f in assert_sentences(check_model(of(half))))
    assert f"On each of 2 ranks a block has {half.attention_bytes:,} bytes" in text


def test_a_retention_interval_that_vllm_refuses_is_told():
    with pytest.raises(
        ModelError, match="^vLLM refuses prefix_cache_retention_interval=100: .*128"
    ):
        described(model("lfm2"), "--prefix-cache-retention-interval", "100")
    assert described(model("lfm2"), "--prefix-cache-retention-interval", "256").served


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_a_stage_holds_its_own_layers_only(family):
    one, two = (
        described(model(family), *flags) for flags in ([], ["--pipeline-parallel-size", "2"])
    )
    assert (two.block_size, two.local_ranks) == (one.block_size, 2)
    # Each stage has half of the attention layers and half of the others.
    assert two.stages == ((one.attention_bytes // 2, one.state_bytes // 2),) * 2
    assert two.largest == one.largest // 2
    text = " ".join(f.message for f in assert_sentences(check_model(of(two))))
    assert f"all 2 stages together, a block has {one.attention_bytes:,} bytes" in text


def test_one_copy_of_a_data_parallel_engine_is_looked_at():
    flags = "--data-parallel-size", "2", "--data-parallel-size-local", "2"
    assert described(model("lfm2"), *flags) == described(model("lfm2"))


def test_the_address_of_a_host_with_some_of_the_ranks_is_named(monkeypatch):
    flags = "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.0.0.1"
    found = described(model("qwen3_next"), *flags)
    assert (found.hosts, found.local_ranks) == (2, 1)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    said = only(assert_sentences(check_hosts(of(found))))
    assert said.status == OK and "on 2 hosts" in said.message and "10.0.0.7" in said.message
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    said = only(assert_sentences(check_hosts(of(found))))
    assert said.status == ERROR and "set VLLM_HOST_IP" in said.message
    assert not list(check_hosts(of(described(model("qwen3_next")))))
    # Each of these engines is on one host.
    engines = "--nnodes", "2", "--data-parallel-size", "2", "--data-parallel-size-local", "1"
    assert described(model("lfm2"), *engines).hosts == 1


def test_parallelism_that_is_refused_is_told(monkeypatch):
    monkeypatch.setattr("zmq.has", lambda capability: False)
    flags = "--tensor-parallel-size", "2", "--nnodes", "2"
    with pytest.raises(ModelError, match="^nnodes=2 needs lookups between hosts to be encrypted"):
        described(model("qwen3_next"), *flags)


@pytest.mark.parametrize("unit", [0, 32, 48])
def test_ranks_that_share_blocks(unit, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES["qwen3_next"].config, "num_key_value_heads", 1)
    one_head = make_model("qwen3_next", tmp_path / "one_head")
    flags = ["--tensor-parallel-size", "2"]
    apart = described(str(one_head), *flags)
    n = apart.block_size
    flags += ["--decode-context-parallel-size", "2"]
    flags += ["--prefix-match-unit", str(unit)] if unit else []
    shared = described(str(one_head), *flags)
    assert (shared.block_size, shared.dcp, shared.unit) == (2 * n, 2, unit or n)
    assert shared.attention_bytes == apart.attention_bytes
    assert "--decode-context-parallel-size 2" in shared.plan
    found = only(f for f in check_model(of(shared)) if f.check == "block size")
    if n % shared.unit:
        assert (
            found.status == ERROR
            and f"does not divide this model's block size {n}" in found.message
        )
    else:
        assert found.status == OK
        assert (
            f"N is {n} tokens, and 2 ranks share each attention block of {2 * n}" in found.message
        )
        assert f"{shared.unit + 1} tokens and more hit" in found.message


def test_vllm_is_asked_about_all_of_its_flags():
    with pytest.raises(ModelError, match="enable_prefix_caching=False leaves no boundary"):
        described(model("lfm2"), "--no-enable-prefix-caching")


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-model-len", "many"], "argument --max-model-len"),
        (["--kv-transfer-config", "{"], "argument --kv-transfer-config"),
        (["--kv-transfer-config", "[1]"], "argument --kv-transfer-config"),
    ],
    ids=str,
)
def test_flags_that_vllm_does_not_take(flags, told):
    found = list(check_options(read_context(model("lfm2"), flags)))
    assert [finding.status for finding in assert_sentences(found)] == [ERROR, SKIPPED]
    assert found[0].message.startswith("vLLM does not take these flags: ")
    assert told in found[0].message


def test_without_a_network_no_other_model_is_looked_for(monkeypatch):
    """vLLM's default is one, and its flags are read before the model of the user is put in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_context(model("lfm2")).model == described(model("lfm2"))


def test_a_model_that_is_not_served():
    found = described(model("llama"))
    assert not found.served
    assert only(check_model(of(found))).status == WARNING


def test_no_model():
    assert only(check_model(of(None, None))).status == SKIPPED


def test_a_model_that_does_not_exist(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="^vLLM refuses"):
        described(str(tmp_path))


@pytest.mark.parametrize("name", ["nonexist/model", "not/a/name"])
def test_a_name_that_is_not_found(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (told,) = read_context(name).troubles
    assert told.status == ERROR and told.message.startswith(f"vLLM refuses '{name}': ")
    assert told.fix.startswith("Give a folder, check the name, or set HF_TOKEN")
    (told,) = read_context(model("lfm2"), ["--no-enable-prefix-caching"]).troubles
    assert told.status == ERROR and "HF_TOKEN" not in told.fix


# Options


def test_a_good_configuration(context, tmp_path):
    found = context(local_disk=str(tmp_path / "d"), max_local_disk_size=0.01, model=MODEL)
    assert found.troubles == ()
    assert [f.status for f in assert_sentences(check_options(found))] == [OK]
    assert only(check_chunk_size(found)).message == "chunk_size 256 is set to the block size 384."


@pytest.mark.parametrize(
    "publishes, inside, told", [(False, False, 1), (True, False, 0), (True, True, 1)]
)
def test_events_that_are_never_published(context, publishes, inside, told):
    found = replace(context(enable_kv_events=True, model=MODEL), publishes=publishes, inside=inside)
    said = of_status(assert_sentences(check_options(found)), WARNING)
    assert len(said) == told
    assert all("enable_kv_events=True has no effect" in each.message for each in said)


def test_a_limit_of_a_folder_that_holds_no_block(context, tmp_path):
    found = context(
        remote_url=f"fs://localhost:0{tmp_path}",
        transfer={
            **TRANSFER,
            "kv_connector_extra_config": {"lmcache.hybrid_fs_max_size_gb": 0.00001},
        },
        model=MODEL,
    )
    (said,) = of_status(assert_sentences(check_options(found)), ERROR)
    assert "lmcache.hybrid_fs_max_size_gb=1e-05 is too small: the records of one" in said.message


def test_every_refusal_is_told_not_only_the_first(context):
    found = context(
        enable_blending=True, save_unfull_chunk=True, remote_url="azure://container", model=MODEL
    )
    errors = of_status(assert_sentences(check_options(found)), ERROR)
    assert [text.message.split("=")[0].split()[-1] for text in errors] == [
        "enable_blending",
        "save_unfull_chunk",
        "remote_url",
    ]


@pytest.mark.parametrize("more", [{}, {"save_unfull_chunk": False}], ids=str)
def test_what_lmcache_sets_itself_is_not_told(context, more):
    """With enable_blending it sets save_unfull_chunk."""
    found = context(enable_blending=True, model=MODEL, **more)
    told = only(of_status(assert_sentences(check_options(found)), ERROR))
    assert told.message.startswith("LMCache option enable_blending=True")


def test_what_an_engine_refuses_is_never_hidden(context):
    """Though nobody wrote it."""
    found = context(model=MODEL)
    found.config.save_unfull_chunk = True
    assert "save_unfull_chunk" in only(of_status(check_options(found), ERROR)).message


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"chunk_size": 100}, "chunk_size=100 is not a multiple of this model's block size 384"),
        ({"max_local_cpu_size": 1e-6}, "max_local_cpu_size=1e-06 is too small"),
        ({"local_cpu": False}, "nothing is kept"),
        ({"local_disk": "/proc/none", "max_local_disk_size": 1}, "cannot be written"),
    ],
    ids=str,
)
def test_what_a_model_cannot_work_with(context, settings, told):
    found = of_status(assert_sentences(check_options(context(model=MODEL, **settings))), ERROR)
    assert told in only(found).message


def test_our_own_settings(context):
    def told(**extra) -> str:
        transfer = TRANSFER | {"kv_connector_extra_config": extra}
        (bad,) = of_status(check_options(context(transfer=transfer, model=MODEL)), ERROR)
        return bad.message

    assert "hybrid_typo is not a setting" in told(**{"lmcache.hybrid_typo": 1})
    checkpoints = told(**{"lmcache.hybrid_checkpoint_tokens": 100})
    assert "checkpoint_tokens=100 is not a multiple" in checkpoints


def test_our_settings_among_other_connectors(context):
    def told(*connectors: dict) -> list[str]:
        extra = {"connectors": list(connectors)}
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        return [bad.message for bad in of_status(check_options(context(transfer=transfer)), ERROR)]

    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert told(TRANSFER, other) == []
    wrong = {"kv_connector_extra_config": {"lmcache.hybrid_load_policy": "fastest"}}
    assert "hybrid_load_policy='fastest'" in only(told(other, TRANSFER | wrong))
    assert "is not asked" in only(told(other))


def test_options_that_lmcache_does_not_know(context):
    found = context(max_local_cpu_sise=5)
    (bad,) = of_status(assert_sentences(check_options(found)), WARNING)
    assert "Unknown configuration key: max_local_cpu_sise" in bad.message


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list", "chunk_size: many"])
def test_a_file_that_lmcache_cannot_read(context, text):
    told = assert_sentences(check_options(context(text)))
    assert told[0].check == "LMCache config" and told[0].status in (ERROR, WARNING)


def test_a_malformed_value_hides_no_other_mistake(context, tmp_path):
    """And no folder is made."""
    disk = tmp_path / "disk"
    settings = {"local_disk": str(disk), "max_local_disk_size": 1, "cache_policy": "best"}
    found = context(max_local_cpu_size="2Gi", **settings)
    told = [bad.message for bad in of_status(assert_sentences(check_options(found)), ERROR)]
    assert len(told) == 2 and told[0].startswith("max_local_cpu_size='2Gi' is not a number")
    assert "cache_policy='best' is none of" in told[1]
    assert not disk.exists()


def test_a_file_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/no/such/file.yaml")
    bad = only(of_status(assert_sentences(check_options(read_context(None))), ERROR))
    assert "LMCACHE_CONFIG_FILE='/no/such/file.yaml' is not a file" in bad.message


@pytest.mark.parametrize(
    "transfer, told",
    [
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, "is not asked"),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_many"}, "kv_role Input should be"),
        (
            {"kv_conector": "LMCacheConnectorV1"},
            "kv-transfer-config: kv_conector Unexpected keyword argument.",
        ),
    ],
    ids=str,
)
def test_a_connector_that_is_not_ours_or_not_valid(context, transfer, told):
    found = assert_sentences(check_options(context(transfer=transfer)))
    assert told in found[0].message and found[0].status == ERROR


def test_a_consumer_stores_nothing(context):
    found = context(transfer=TRANSFER | {"kv_role": "kv_consumer"})
    assert "stores nothing" in only(of_status(check_options(found), WARNING)).message


def test_a_priority_limit_that_stores_few_requests_is_no_error(context):
    told = only(of_status(check_options(context(priority_limit=-1)), WARNING))
    assert "so only requests that name -1 or less are stored" in told.message


def test_without_a_model_the_chunk_size_is_open(context):
    assert only(assert_sentences(check_chunk_size(context(chunk_size=77)))).status == SKIPPED
    assert list(check_options(context(chunk_size=77)))[0].status == OK


def test_what_does_nothing_is_said(context, monkeypatch):
    """The engine warns of it in its log."""
    monkeypatch.setenv("LMCACHE_HYBRID_KEYFILE", "/run/key")
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "")
    extra = {"kv_connector_extra_config": {"lmcache.hybrid_attention_group": 3}}
    found = context(transfer=TRANSFER | extra, remote_url="redis://localhost:1")
    told = [each.message for each in of_status(check_options(found), WARNING)]
    assert len(told) == 3
    assert "did you mean LMCACHE_HYBRID_KEY_FILE?" in told[1]
    assert "is not a setting any more" in told[0] and "LMCACHE_REMOTE_URL is empty" in told[2]
