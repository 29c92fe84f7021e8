# SPDX-License-Identifier: Apache-2.0
"""The lines that ``plan`` prints, read as an engine reads them."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from lmcache.v1.config import LMCacheEngineConfig
from typer.testing import CliRunner
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lmcache_hybrid.config import lmcache_config
from lmcache_hybrid.config.folders import read_limits
from lmcache_hybrid.config.lmcache_config import settle_lmcache_config
from lmcache_hybrid.config.options import read_options
from lmcache_hybrid.config.own_options import read_own_options
from lmcache_hybrid.config.store_sizes import check_sizes
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.sizing.storage import BACKENDS

from .helpers import vllm_config

MODELS = ["Qwen3-Next-80B-A3B", "LFM2-350M", "Kimi-K3"]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of ``vllm serve``."""
    return make_arg_parser(FlexibleArgumentParser())


def plan(*words: str) -> str:
    answer = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"})
    assert answer.exit_code == 0, answer.output
    return answer.output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_takes_what_is_printed(
    model: str,
    backend: str,
    parser: FlexibleArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of the machine that it is for.
    monkeypatch.setattr(lmcache_config, "memory_of_the_machine", lambda limit: 1 << 50)
    words = [model, "--tp", "2", "--backend", backend, "--step-tokens", "16k"]
    words += ["--kv-cache-dtype", "bfloat16", "--ssm-dtype", "float32"]
    n = json.loads(plan(*words, "--json"))["block_size"]
    words += ["--checkpoint-tokens", str(2 * n)]
    found = json.loads(plan(*words, "--json"))
    file, shell = re.split(r"# shell\n", plan(*words).partition("# lmcache.yaml\n")[2])
    file = file.replace("/srv/", f"{tmp_path}/")  # the check makes the folder
    Path("lmcache.yaml").write_text(file)
    config = LMCacheEngineConfig.from_file("lmcache.yaml")
    said = yaml.safe_load(file)
    assert {name: getattr(config, name) for name in said} == said
    settle_lmcache_config(config, n)
    sizes = [group["bytes"] for group in found["groups_per_rank"]]
    check_sizes(config, max(sizes), sum(sizes), len(sizes))

    command = shell.partition("\n\n#")[0].replace("\\\n", "")
    variable, *serve = shlex.split(command)
    assert (variable, serve[:2]) == ("LMCACHE_CONFIG_FILE=lmcache.yaml", ["vllm", "serve"])
    parsed = parser.parse_args(serve[2:])
    assert parsed.tensor_parallel_size == 2 and parsed.max_num_batched_tokens == 16_000
    assert (parsed.kv_cache_dtype, parsed.mamba_ssm_cache_dtype) == ("bfloat16", "float32")
    assert parsed.shutdown_timeout == (0 if backend == "ram" else 30)
    transfer = vllm_config(parsed.kv_transfer_config)
    options = read_options(transfer, config, found["block_size"])
    assert options.checkpoint_tokens == 2 * n

    sizes = {
        "ram": config.max_local_cpu_size,
        "disk": config.max_local_disk_size,
        "fs": parsed.kv_transfer_config.kv_connector_extra_config.get(
            "lmcache.hybrid_fs_max_size_gb"
        ),
        "redis": None,
    }
    ranks = 1 if backend == "fs" else 2
    needed = found["backends"][backend]["taken"]
    if sizes[backend] is None:
        assert f"maxmemory {needed}" in shell
    else:
        assert needed <= sizes[backend] * 2**30 * ranks
        assert sizes[backend] * 2**30 * ranks <= needed * 1.01 + 2**30
    if backend == "fs":
        extra = parsed.kv_transfer_config.kv_connector_extra_config
        assert read_limits(read_own_options(extra), {}, config).max_bytes >= needed


@pytest.mark.parametrize("backend", ["disk", "fs"])
@pytest.mark.parametrize("prompts", [5, 11, 100])
def test_ram_above_a_disk_holds_ten_prompts_or_nothing(backend: str, prompts: int) -> None:
    """As in docs/recipes.md: RAM that holds all of the store is of no use."""
    words = ["Qwen3.6-27B", "--tp", "2", "--context", "32k"]
    found = json.loads(plan(*words, "--prompts", str(prompts), "--json"))["backends"][backend]
    ten = json.loads(plan(*words, "--prompts", "10", "--json"))["backends"]["ram"]
    written = found["write"]["lmcache_yaml"]
    assert written["local_cpu"] is (prompts > 10)
    if prompts > 10:
        assert 0 <= written["max_local_cpu_size"] - ten["gib_per_rank"] <= 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_that_never_hit_make_no_limit_of_zero(backend: str) -> None:
    said = json.loads(
        plan("Qwen3-Next-80B-A3B", "--context", "100", "--backend", backend, "--json")
    )
    written = json.dumps(said["to_write"] if "to_write" in said else said)
    assert (
        "maxmemory 0" not in written and '_gb": 0.0' not in written and '_size": 0.0' not in written
    )


def test_drafts_widen_states() -> None:
    words = "Qwen3-Next-80B-A3B", "--json", "--speculative-config"
    drafted = plan(*words, '{"method": "mtp", "num_speculative_tokens": 2}')
    assert json.loads(drafted)["block_size"] == 560
    assert json.loads(plan(*words[:2]))["block_size"] == 544
