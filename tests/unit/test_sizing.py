# SPDX-License-Identifier: Apache-2.0
"""What prompts and checkpoints take, what plan prints, and what its page says."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_hybrid.config import options
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.expected_states import boundaries, chunk_tokens
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.cli.plan import BackendName, PlatformName, tokens
from lmcache_hybrid.tools.sizing import catalogue, storage
from lmcache_hybrid.tools.sizing.blocks import PLATFORMS, Sizes, compute, grouped
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, read_shape
from lmcache_hybrid.tools.sizing.storage import BACKENDS, CHUNK_ENDS, Workload
from lmcache_hybrid.tools.tiny_families import COMMON, FAMILIES

ROOT = Path(__file__).parents[2]
GPU = PLATFORMS["gpu"]
LFM2 = catalogue.find_shape("LFM2-350M")[1]
QWEN = catalogue.find_shape("qwen3.6-27b")[1]
LFM2_HUB = "LiquidAI/LFM2-350M"


def run(*words: str):
    return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"})


# Storage


@pytest.fixture(scope="module")
def measured() -> tuple[dict, Sizes]:
    """docs/generated/checkpoints.json, measured on a real engine, and that model's sizes on it."""
    figures = json.loads((ROOT / "docs/generated/checkpoints.json").read_text())
    config = {**COMMON, **FAMILIES[figures["family"]].config, "model_type": figures["family"]}
    config |= {"linear_conv_kernel_dim": 4}  # transformers' default, as saved beside the weights
    return figures, compute(read_shape(config), PLATFORMS["cpu"])


def test_states_steps_and_bytes_of_a_real_prefill(measured):
    figures, sizes = measured
    n, context = figures["block_size"], figures["prompt_tokens"]
    assert sizes.block_size == n
    for row in figures["rows"]:
        chunk_ends = row["interval"] == CHUNK_ENDS
        checkpoint = CHUNK_ENDS if chunk_ends else row["interval"] * n
        work = Workload(context, 1, checkpoint=checkpoint, step_tokens=2048)
        assert len(boundaries(context, n, work.interval(n))) == row["states"]
        assert storage.prefill_steps(context, n, work.interval(n), 2048) == row["steps"]
        assert storage.stored(sizes, work, BACKENDS["ram"]).payload == row["bytes"]


@pytest.mark.parametrize("context", [1, 16, 17, 48, 49, 100, 161])
@pytest.mark.parametrize("budget", [1, 15, 16, 40, 48, 100])
def test_chunks_end_where_vllm_ends_them_and_cost_no_step(context, budget):
    """Against walking: each step takes the budget, and ends at a multiple of N before the end."""
    chunk, last = chunk_tokens(budget, 16), (context - 1) // 16 * 16
    place, ends = 0, []
    while place < last:
        place = min(max((place + budget) // 16 * 16, place + 16), last)
        ends.append(place)
    assert boundaries(context, 16, chunk) == ends
    steps = [storage.prefill_steps(context, 16, interval, budget) for interval in (chunk, 0)]
    assert steps[0] == steps[1]


def test_chunks_of_later_prompts_begin_where_they_leave_the_shared_prefix():
    sizes, ram = compute(LFM2, GPU), BACKENDS["ram"]
    n = sizes.block_size
    work = Workload(21 * n + 1, 5, shared=9 * n + 3, checkpoint=CHUNK_ENDS, step_tokens=5 * n)
    # The first leaves 5, 10, 15, 20 and 21 N, the second 9 N, and each later one 14, 19 and 21 N.
    assert storage.stored(sizes, work, ram).states == 5 + 1 + 4 * 3
    assert storage.stored(sizes, dataclasses.replace(work, checkpoint=5 * n), ram).states == 2 + 20
    assert storage.stored(sizes, dataclasses.replace(work, prompts=1), ram).states == 5


@pytest.mark.parametrize("context", [1, 15, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("checkpoint", [0, 16, 32, 64])
def test_recomputed_tokens_are_those_behind_the_last_state(context, checkpoint):
    """Against counting: a branch after each number of shared tokens, one by one."""
    ends = [0, *boundaries(context, 16, checkpoint)]
    lost = [place - max(end for end in ends if end <= place) for place in range(context)]
    at_most, expected = storage.after_branch(context, 16, checkpoint)
    assert at_most == max(lost) and expected == pytest.approx(sum(lost) / context)


def test_what_prompts_share_is_stored_once():
    sizes, ram = compute(LFM2, GPU), BACKENDS["ram"]
    n = sizes.block_size
    apart = storage.stored(sizes, Workload(10 * n + 1, 5), ram)
    assert (apart.blocks, apart.states) == (50, 5)
    together = storage.stored(sizes, Workload(10 * n + 1, 5, shared=4 * n), ram)
    assert (together.blocks, together.states) == (4 + 5 * 6, 5 + 1)  # one where they branch off
    dense = storage.stored(sizes, Workload(10 * n + 1, 5, shared=4 * n, checkpoint=2 * n), ram)
    assert (dense.blocks, dense.states) == (34, 2 + 5 * 3)
    assert storage.stored(sizes, Workload(10 * n + 1, 1, shared=4 * n), ram).states == 1


def test_a_unit_adds_a_state_and_a_page_and_a_step():
    sizes, ram = compute(QWEN, GPU), BACKENDS["ram"]
    n = sizes.block_size
    page, states = sizes.in_all(ATTENTION), sizes.in_all(STATE)
    whole, inside = (storage.stored(sizes, Workload(3 * n + 500, 1, unit=u), ram) for u in (0, 112))
    assert inside.payload - whole.payload == page + states
    steps = [storage.prefill_steps(3 * n + 500, n, 0, 8192, unit) for unit in (0, 112)]
    assert steps == [2, 3]
    short = storage.stored(sizes, Workload(500, 1, unit=112), ram)
    assert (short.blocks, short.states, short.payload) == (1, 1, page + states)
    # A prompt that ends right behind a block has no boundary past it.
    assert storage.stored(sizes, Workload(3 * n + 1, 1, unit=112), ram).payload == whole.payload


@pytest.mark.parametrize("unit", [16, 112, 784])
@pytest.mark.parametrize("rates", [(10_000, 20e9), (30_000, 2.5e9), (1_000, 1e9)])
def test_from_the_break_even_on_loading_is_faster(unit, rates):
    sizes, (computed, loaded) = compute(QWEN, GPU), rates
    page, states = sizes.in_all(ATTENTION), sizes.in_all(STATE)
    found = storage.break_even(sizes, unit, computed, loaded)

    def saved(end: int) -> float:
        return end / computed - (-(-end // 784) * page + states) / loaded

    assert found % unit == 0 and saved(found) > 0
    assert all(saved(end) <= 0 for end in range(unit, found, unit))
    assert storage.break_even(sizes, unit, 1e9, 1e3) is None


def test_totals_are_those_of_all_groups_and_ranks():
    sizes = compute(QWEN, GPU, tp=2)
    work = Workload(3 * sizes.block_size + 1, 7)
    for backend in BACKENDS.values():
        found = storage.stored(sizes, work, backend)
        per_rank = [
            7 * (3 if group.kind == ATTENTION else 1) * backend.stored(record_bytes(group.bytes))
            for group in sizes.groups
        ]
        assert found.taken == 2 * sum(per_rank)
        assert found.records == 2 * 7 * (3 + 3)
        assert found.payload == 7 * (3 * sizes.in_all(ATTENTION) + sizes.in_all(STATE))


def test_latent_pages_count_once_in_stores_that_ranks_share():
    known = next(each for each in catalogue.models() if each.config["model_type"] == "kimi_linear")
    alone, sizes = compute(known.shape, GPU), compute(known.shape, GPU, tp=8)
    assert [group.replicated for group in sizes.groups] == [
        group.kind == ATTENTION for group in sizes.groups
    ]
    work = Workload(3 * sizes.block_size + 1, 1)
    unique = 3 * sizes.per_rank(ATTENTION) + sizes.in_all(STATE)
    for name, backend in BACKENDS.items():
        found = storage.stored(sizes, work, backend)
        copies = 1 if name in ("fs", "redis") else 8
        assert found.records == 3 * copies + 8 * 3
        assert found.payload == unique + 3 * (copies - 1) * sizes.per_rank(ATTENTION)
        assert found.taken >= found.payload
    fs = storage.stored(sizes, work, BACKENDS["fs"])
    assert fs.payload == unique and fs.taken <= 1.01 * unique
    # Alone a rank keeps all of it, whatever the store.
    work = Workload(3 * alone.block_size + 1, 1)
    assert len({storage.stored(alone, work, each).payload for each in BACKENDS.values()}) == 1


# Redis 6.2.5 with jemalloc 5.1.0: (bytes of a value, used_memory of its record), whose key has 94
# characters.
REDIS_USED = [
    (8_392, 10_400),
    (16_576, 20_640),
    (100_000, 114_848),
    (1_000_000, 1_048_738),
    (3_207_416, 3_670_176),
    (8_400_000, 10_485_920),
    (12_812_288, 14_680_224),
    (51_381_248, 58_720_418),
]


@pytest.mark.parametrize(("size", "used"), REDIS_USED)
def test_redis_takes_what_was_measured(size, used):
    assert BACKENDS["redis"].stored(size) == pytest.approx(used, abs=50)  # by the name


@pytest.mark.parametrize(
    ("kind", "record", "taken"),
    [("ram", 4096, 4096), ("disk", 4097, 8192), ("fs", 4068, 4096), ("fs", 4069, 8192)],
)
def test_whole_pages(kind, record, taken):
    assert BACKENDS[kind].stored(record) == taken


# Blocks


def test_groups_are_as_long_as_the_other_kind_where_that_is_little_longer():
    """As in no model of the table, all of which are compared with vLLM."""
    assert grouped((ATTENTION,) * 10 + (STATE,) * 14) == [(ATTENTION, 10), (STATE, 14)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not a hybrid family"),
        (
            {"model_type": "lfm2", "layer_types": ["full_attention"] * 2},
            "this lfm2 model has no state layers",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "sliding_attention"]},
            "layers of type sliding_attention cannot be sized",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "the config of a lfm2 model has no 'hidden_size'",
        ),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        read_shape(config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 3}, "--tp 3 does not fit 4 key/value heads"),
        ({"tp": 32}, "--tp 32 does not divide 48 heads"),
        ({"kv_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 cannot be sized"),
        ({"ssm_dtype": "fp8"}, "--ssm-dtype fp8 cannot be sized"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        compute(QWEN, GPU, **options)


def test_a_checkpoint_names_its_cache_dtype():
    """ModelOpt's checkpoints do; vLLM follows, and N doubles."""
    config = next(m.config for m in catalogue.models() if m.name == "Qwen3.6-27B")
    quantized = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    shape = read_shape({"text_config": config, "quantization_config": quantized})
    assert compute(shape, GPU).block_size == 2 * compute(QWEN, GPU).block_size
    other = {"quant_method": "compressed-tensors", "kv_cache_quant_algo": "FP8"}
    assert read_shape({**config, "quantization_config": other}) == QWEN


# The command


@pytest.mark.parametrize(
    ("text", "number"), [("100k", 100_000), ("1.5M", 1_500_000), ("7", 7), ("8_192", 8192)]
)
def test_tokens(text, number):
    assert tokens(text) == number


def test_json_of_a_named_model():
    answer = run(
        "Qwen3.6-27B", "--context", "100k", "--prompts", "500", "--backend", "redis", "--json"
    )
    assert answer.exit_code == 0
    found = json.loads(answer.output)
    assert found["block_size"] == 784
    assert found["state_bytes_per_boundary"] == 153_944_064
    redis = found["backends"].pop("redis")
    assert not found["backends"]
    # Steps of 8,192 tokens end every 10 N, and at the last boundary, 127 N.
    assert redis["records"] == 500 * (127 + 13 * 3)
    assert redis["taken"] > redis["payload"] == 500 * found["bytes_per_prompt"]
    chunk, none, *others = found["checkpoints"]
    assert none["tokens"] == 0 and [row["tokens"] // 784 for row in others] == [16, 8, 4, 2, 1]
    assert all(row["recomputed_at_most"] == row["tokens"] - 1 for row in others)
    assert (chunk["tokens"], chunk["interval"], chunk["states"]) == ("chunk", 10 * 784, 13)
    assert chunk["recomputed_at_most"] == 10 * 784 - 1
    assert chunk["bytes_per_prompt"] == found["bytes_per_prompt"]
    assert chunk["bytes_per_prompt"] - none["bytes_per_prompt"] == 12 * 153_944_064
    assert chunk["prefill_steps"] == none["prefill_steps"]


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_a_folder_and_its_config(tmp_path, inside):
    folder = tmp_path / "my-model"
    folder.mkdir()
    known = next(m for m in catalogue.models() if m.name == "Nemotron-H-8B")
    (folder / "config.json").write_text(json.dumps(known.config))
    answer = run(str(folder / inside), "--json")
    found = json.loads(answer.output)
    assert found["model"] == "my-model"
    assert found["block_size"] == compute(known.shape, GPU).block_size
    assert f"vllm serve {folder} " in run(str(folder / inside)).output


def test_chunk_ends_are_the_default_of_the_option():
    assert CHUNK_ENDS == options.CHUNK_ENDS
    plain, chunk, none = (
        json.loads(run("Qwen3.6-27B", *words, "--json").output)
        for words in ((), ("--checkpoint-tokens", "chunk"), ("--checkpoint-tokens", "0"))
    )
    assert plain == chunk and none["checkpoints"] == plain["checkpoints"]
    assert none["bytes_per_prompt"] < plain["bytes_per_prompt"]
    shorter = json.loads(run("Qwen3.6-27B", "--step-tokens", "2048", "--json").output)
    assert shorter["checkpoints"][0]["interval"] == 2 * 784
    assert shorter["bytes_per_prompt"] > plain["bytes_per_prompt"]


def test_an_interval_of_your_own_is_a_row_and_counts():
    answer = json.loads(run("Qwen3.6-27B", "--checkpoint-tokens", "2352", "--json").output)
    assert 2352 in [row["tokens"] for row in answer["checkpoints"]]
    plain = json.loads(run("Qwen3.6-27B", "--json").output)
    assert answer["bytes_per_prompt"] > plain["bytes_per_prompt"]
    printed = run("Qwen3.6-27B", "--checkpoint-tokens", "2352").output
    assert "100 prompts of 32,000 tokens, T = 2,352" in printed and "\n 2,352 (3 N) " in printed


def test_a_slow_store_is_faster_than_computing_only_from_longer_hits_on():
    rates = ["--ram-rate", "2", "--network-rate", "1"]
    found = {}
    for words in ([], rates):
        answer = json.loads(run("Qwen3.6-27B", *words, "--json").output)
        (row,) = [unit for unit in answer["units"] if unit["tokens"] == 16]
        found[bool(words)] = row["faster_from"]
        assert "(--ram-rate) and" in run("Qwen3.6-27B", *words).output
    assert all(found[True][name] > found[False][name] for name in ("ram", "network"))
    assert answer["rates"]["load_bytes"] == {"ram": 2 << 30, "network": 1 << 30}


def test_the_rate_from_ram_is_said_to_be_of_one_gpu_unless_it_is_yours():
    told = "2.5 GiB/s is the fastest that one H100 loaded"
    assert told in run("Qwen3.6-27B").output
    assert told not in run("Qwen3.6-27B", "--ram-rate", "4").output


def test_a_short_prompt_is_told_its_unit_and_a_size_that_can_be_written():
    printed = run("Qwen3-Next-80B-A3B", "--context", "500").output
    assert "It hits with --prefix-match-unit 32: add it here and to vllm serve." in printed
    own = run("Qwen3-Next-80B-A3B", "--context", "500", "--prefix-match-unit", "32").output
    assert "never hits" not in own and "  --prefix-match-unit 32 \\\n" in own
    assert "It hits with" not in run("Qwen3-Next-80B-A3B", "--context", "10").output
    for backend, limit in (("ram", "max_local_cpu_size"), ("disk", "max_local_disk_size")):
        printed = run("Qwen3-Next-80B-A3B", "--context", "500", "--backend", backend).output
        assert printed.count(f"{limit}: 0.1\n") + printed.count(f"{limit}: 0.1 ") == 2


def test_the_list_for_scripts():
    found = json.loads(run("--list", "--json").output)
    assert [row["model"] for row in found] == [known.name for known in catalogue.models()]
    (row,) = [row for row in found if row["model"] == "Qwen3.6-27B"]
    answer = json.loads(run("Qwen3.6-27B", "--json").output)
    for name in ("block_size", "attention_bytes_per_block", "state_bytes_per_boundary"):
        assert row[name] == answer[name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (["Qwen3.6-27B", "--context", text], "is not a number of tokens")
            for text in ("k", "-1", "1.5", "100g", "1.2.3", "")
        ),
        (["Qwen3.6-27B", "--context", "0"], "write 1 or more"),
        (["Qwen3.6-27B", "--step-tokens", "0"], "write 1 or more"),
        (["Qwen3.6-27B", "--checkpoint-tokens", "1000"], "is not a multiple of N=784; use 784"),
        (["Qwen3.6-27B", "--checkpoint-tokens", "often"], "write 100000 or 100k, or chunk"),
        (["Qwen3.6-27B", "--prefix-match-unit", "100"], "does not divide N=784; use 112"),
        (["LFM2-350M", "--prefix-match-unit", "10"], "does not divide N=16; leave it out"),
        (["Qwen3.6-27B", "--prefill-rate", "0"], "Input should be greater than or equal to 1"),
        (["Qwen3.6-27B", "--ram-rate", "inf"], "Input should be less than or equal to 1000000"),
        (["Qwen3.6-27B", "--ram-rate", "0"], "Input should be greater than or equal to 0.001"),
        (["Qwen3.6-27B", "--shared", "64k"], "--shared 64000 is more than --context 32000"),
        (["no-such-model"], "neither a folder with a config.json nor a model of the table"),
        (["Llama-3.1-8B"], "A model without recurrent layers needs no plan"),
        (["Qwen3-6-27B"], "did you mean Qwen3.6-27B?"),
        (["Qwen3-Next"], "did you mean Qwen3-Next-80B-A3B?"),
        (["qwen/qwen3.6"], "did you mean Qwen3.6-27B or Qwen3.6-35B-A3B?"),
        (["Qwen3.6-27B", "--dtype", "int3"], "--dtype int3 cannot be sized"),
        (["Qwen3.6-27B", "--kv-cache-dtype", "int3"], "--kv-cache-dtype int3 cannot be sized"),
        (["qwen/Qwen3-Next-80B-A3B-Instuct"], "did you mean Qwen/Qwen3-Next-80B-A3B-Instruct?"),
        (["Qwen3.6-27B", "--speculative-config", "mtp"], "'mtp' is not a JSON object"),
        (["Qwen3.6-27B", "--speculative-config", '{"model": "x"}'], 'add "method", such as "mtp"'),
        (
            ["Qwen3.6-27B", "--tp", "8", "--decode-context-parallel-size", "4"],
            "--decode-context-parallel-size 4 does not fit --tp 8: 2 ranks have the same",
        ),
        (
            ["Qwen3.6-27B", "--tp", "16", "--decode-context-parallel-size", "4"],
            "--decode-context-parallel-size 4 does not divide the 6 query heads per",
        ),
        (
            ["Kimi-K3", "--tp", "8", "--decode-context-parallel-size", "3"],
            "--decode-context-parallel-size 3 does not fit --tp 8",
        ),
        (
            [
                *"Qwen3.6-27B --tp 8 --decode-context-parallel-size 2".split(),
                "--speculative-config",
                '{"method": "mtp", "num_speculative_tokens": 1}',
            ],
            "--decode-context-parallel-size 2 is refused with a drafter",
        ),
        (
            "Kimi-K3 --tp 8 --decode-context-parallel-size 2 --checkpoint-tokens 1000".split(),
            "--checkpoint-tokens 1000 is not a multiple of 2 N=",
        ),
        (["/no/such/folder"], "MODEL '/no/such/folder' does not exist"),
        ([], "name a MODEL"),
        ([__file__], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(words, said):
    answer = run(*words)
    assert answer.exit_code == 2
    assert said in " ".join(answer.output.replace("│", " ").split())


def test_units_of_a_model_and_your_own():
    words = ["Qwen3.6-27B", "--context", "900", "--json"]
    plain = json.loads(run(*words).output)
    assert [row["tokens"] for row in plain["units"]] == [784, 112, 16]
    assert [row["shortest"] for row in plain["units"]] == [785, 113, 17]
    own = json.loads(run(*words, "--prefix-match-unit", "56").output)
    assert [row["tokens"] for row in own["units"]] == [784, 112, 56, 16]
    assert own["bytes_per_prompt"] == own["units"][2]["bytes_per_prompt"]
    assert own["bytes_per_prompt"] > plain["bytes_per_prompt"]
    assert "56" in run(*words[:-1], "--prefix-match-unit", "56").output
    assert "prefix-match-unit" not in run("LFM2-350M").output  # N is 16


def test_what_is_printed():
    answer = run("LFM2-350M", "--context", "10", "--platform", "cpu")
    assert answer.exit_code == 0
    assert "N = 128 tokens\n" in answer.output, "vLLM logs nothing of its own default"
    assert "never hits: it is no longer than 128" in answer.output
    assert f"vllm serve {LFM2_HUB} " in answer.output
    assert {name.value for name in BackendName} == set(BACKENDS)
    assert {name.value for name in PlatformName} == set(PLATFORMS)


def test_what_each_of_several_hosts_needs():
    words = ("Qwen3.5-397B-A17B", "--tp", "16", "--nnodes", "2", "--context", "64k")
    printed = " ".join(run(*words).output.split())
    made = json.loads(run(*words, "--json").output)
    assert "Each of 2 hosts has 8 ranks" in printed and "--nnodes 2" in printed
    for backend in made["backends"].values():
        written = backend["write"]["lmcache_yaml"]
        for option, size in backend["gib_per_host"].items():
            assert size == round(8 * written[option], 1)
            assert f"{size:,.1f} GiB of {'RAM' if 'cpu' in option else 'disk'}" in printed
    assert "max_local_disk_size" in made["backends"]["disk"]["gib_per_host"]
    assert "host" not in run("Qwen3.5-397B-A17B", "--tp", "16").output
    refused = run("Qwen3.5-397B-A17B", "--tp", "16", "--nnodes", "3")
    assert refused.exit_code == 2 and "--nnodes 3 does not divide --tp 16" in refused.output


def test_ranks_that_share_blocks():
    """Qwen3.6-27B has four KV heads: two of eight ranks hold the same one."""
    words = ("Qwen3.6-27B", "--tp", "8", "--context", "64k")
    shared = (*words, "--decode-context-parallel-size", "2")
    one, two = (json.loads(run(*each, "--json").output) for each in (words, shared))
    n = one["block_size"]
    assert two["block_size"] == n and two["decode_context_parallel"] == 2
    assert two["attention_bytes_per_block"] == one["attention_bytes_per_block"]
    assert (one["ranks_per_kv_head"], two["ranks_per_kv_head"]) == (2, 1)
    # Half as many blocks, and a state for the last multiple of N besides that of 2 N.
    blocks, states = one["attention_bytes_per_block"], one["state_bytes_per_boundary"]
    last = json.loads(run(*shared, "--checkpoint-tokens", "0", "--json").output)
    assert last["bytes_per_prompt"] == (64_000 // (2 * n) + 1) * blocks + 2 * states
    assert [row["tokens"] for row in two["units"]][0] == n
    printed = " ".join(run(*shared).output.split())
    assert f"it has 2 N = {2 * n} tokens, and prompts hit at multiples of {n}." in printed
    assert "--decode-context-parallel-size 2" in printed
    latent = [
        group["replicated"]
        for group in json.loads(
            run("Kimi-K3", "--tp", "8", "--decode-context-parallel-size", "8", "--json").output
        )["groups_per_rank"]
    ]
    assert not any(latent), "each rank has other tokens"


def test_what_a_drafter_costs_each_hit():
    mtp = '{"method": "mtp", "num_speculative_tokens": 2}'
    words = ("Qwen3.6-27B", "--speculative-config", mtp)
    for unit, lost in (("0", 800), ("80", 80)):
        printed = " ".join(run(*words, "--prefix-match-unit", unit).output.split())
        assert f"vLLM 0.32: Beside this drafter vLLM gives up the last {lost} tokens" in printed
        assert "vLLM 0.33: Hits lose nothing" in printed
        assert f"--speculative-config '{mtp}'" in printed
    assert "drafter" not in run("Qwen3.6-27B").output
    made = json.loads(run(*words, "--json").output)
    assert set(made["lost_to_drafts"]) == {"0.32", "0.33"}
    assert mtp in made["backends"]["ram"]["write"]["vllm_flags"]


@pytest.mark.parametrize("args", [["plan", "LFM2-350M"], ["--help"], ["inspect", "."]], ids=str)
def test_the_answer_needs_neither_torch_nor_vllm(args):
    code = (
        f"import sys; from lmcache_hybrid.tools.cli import app; sys.argv = ['x', *{args}];"
        "app(standalone_mode=False);"
        "print({'torch', 'vllm', 'lmcache', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_the_page_has_this_table():
    page = (ROOT / "docs" / "sizing.md").read_text()
    begin, end = "<!-- models:begin -->", "<!-- models:end -->"
    assert page.partition(begin)[2].partition(end)[0].strip() == catalogue.markdown(GPU)
    assert run("--list", "--markdown").output.strip() == catalogue.markdown(GPU)


def test_the_page_shows_what_is_printed():
    page = (ROOT / "docs" / "sizing.md").read_text()
    words = "Qwen3.6-27B --tp 2 --context 32k --prompts 100".split()
    assert f"lmcache-hybrid plan {' '.join(words)}" in page
    printed = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"}).output
    for line in printed.splitlines():
        assert line.rstrip() in page


def test_flashinfers_prefill_of_delta_nets_rounds_n():
    at_hopper = "vLLM 0.33 on Hopper or newer makes it 576: --gdn-prefill-backend flashinfer"
    printed = run("Qwen3-Next-80B-A3B").output
    assert "N = 544 tokens" in printed and at_hopper in printed
    printed = run("Qwen3-Next-80B-A3B", "--gdn-prefill-backend", "flashinfer").output
    assert "N = 576 tokens" in printed and "Hopper" not in printed


@pytest.mark.parametrize("words", [("Granite-4.0-H-Tiny",), ("Qwen3.6-27B", "--platform", "cpu")])
def test_nothing_else_rounds_n(words):
    assert "Hopper" not in run(*words).output
    assert run(*words, "--gdn-prefill-backend", "flashinfer").output == run(*words).output


# What is told besides the tables


@pytest.mark.parametrize(("tp", "copies"), [("4", 1), ("8", 2), ("16", 4)])
def test_copies_of_kv_heads_are_told(tp, copies):
    """Qwen3.6-27B has four."""
    assert (
        json.loads(run("Qwen3.6-27B", "--tp", tp, "--json").output)["ranks_per_kv_head"] == copies
    )
    told = (
        f"Each KV head is held, and stored, by {copies} ranks"
        in run("Qwen3.6-27B", "--tp", tp).output
    )
    assert told is (copies > 1)
    assert "Each KV head" not in run("Kimi-K3", "--tp", tp).output, "MLA has none"


@pytest.mark.parametrize("name", [known.hub[0] for known in catalogue.models()])
def test_80_columns_are_enough(name):
    """Also in a pipe, where there is no terminal to ask for its width."""
    words = [name, "--context", "1M", "--prompts", "100000", "--tp", "8"]
    printed = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"}).output
    assert "What to write" in printed
    assert_fits(printed)


def test_the_list_fits_80_columns():
    printed = CliRunner().invoke(app, ["plan", "--list"], env={"COLUMNS": "80"}).output
    assert_fits(printed)
    assert all(f"\n {known.name} " in printed for known in catalogue.models()), "none is cut"


def assert_fits(printed: str) -> None:
    """No line is longer, and none was cut or broken to make it so."""
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed


def test_the_kernels_that_n_was_computed_with_are_among_the_flags():
    words = "--gdn-prefill-backend", "flashinfer"
    assert "  --gdn-prefill-backend flashinfer \\\n" in run("Qwen3.6-27B", *words).output
    assert "  --gdn-prefill-backend" not in run("LFM2-350M", *words).output


def test_ranks_with_equal_attention_have_another_block_size():
    """So records of another tensor-parallel size would end at other boundaries, see design.md."""
    same = set()
    for model in catalogue.models():
        for tp in (1, 2, 4, 8):
            try:
                few, many = (compute(model.shape, GPU, tp=ranks) for ranks in (tp, 2 * tp))
            except ConfigError:  # its heads cannot be divided so
                continue
            if few.token_bytes == many.token_bytes and few.block_size == many.block_size:
                same.add((model.shape.model_type, tp))
    assert same == {("lfm2", 8), ("lfm2_moe", 8)}
