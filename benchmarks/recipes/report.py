# SPDX-License-Identifier: Apache-2.0
"""Each recipe as Markdown; every figure is one of ``lmcache-hybrid plan MODEL --json``."""

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from typer.testing import CliRunner

from benchmarks.figures import markdown
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.sizing.plan import RAM_PROMPTS

CONTEXT = 32_000
# Prompts of CONTEXT fit, and answers; without it, vLLM takes the model's own limit.
MAX_LEN = 65_536
STORED = 100  # prompts
WANTED_UNIT = 64
HEAD = [
    *("Model", "Ranks", "N", "U", "GiB per prompt", "with U"),
    *("RAM, GiB per rank", "Disk, GiB per rank", "Redis, GiB in all"),
]
FLASHINFER = ("--gdn-prefill-backend", "flashinfer")
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'


@dataclass(frozen=True)
class Recipe:
    """One model and how it is served.

    Attributes:
        name: of ``lmcache-hybrid plan --list``.
        weights: what ``vllm serve`` is given.
        page: in docs/families.
        tp: tensor parallel size.
        block_size: vLLM's --block-size; 0 leaves it to vLLM.
        flags: others of vLLM, which plan does not take.
        gdn: whether vLLM 0.33 makes N another on Hopper and newer.
    """

    name: str
    weights: str
    page: str
    tp: int = 1
    block_size: int = 0
    flags: str = ""
    gdn: bool = False


RECIPES = (
    Recipe("Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next", 4, gdn=True),
    Recipe("Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B", "qwen3.5", 2, gdn=True),
    Recipe("Qwen3.6-27B", "Qwen/Qwen3.6-27B", "qwen3.5", 2, gdn=True),
    Recipe("Granite-4.0-H-Small", "ibm-granite/granite-4.0-h-small", "granite-4", 2),
    Recipe("Falcon-H1-7B", "tiiuae/Falcon-H1-7B-Instruct", "falcon-h1"),
    Recipe("LFM2-8B-A1B", "LiquidAI/LFM2-8B-A1B", "lfm2", block_size=512),
    Recipe("Nemotron-3-Nano-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron", 2),
    Recipe(
        "Kimi-Linear-48B-A3B",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "kimi-linear",
        4,
        flags="--trust-remote-code",
    ),
)


@cache
def plan(recipe: Recipe, *more: str) -> dict[str, Any]:
    """What ``lmcache-hybrid plan --json`` prints."""
    words = ["plan", recipe.name, "--context", str(CONTEXT), "--tp", str(recipe.tp), "--json"]
    words += ["--block-size", str(recipe.block_size)] if recipe.block_size else []
    done = CliRunner().invoke(app, [*words, *more])
    if done.exit_code:
        raise RuntimeError(done.output)
    return json.loads(done.stdout)


def recipes() -> str:
    """The table of all figures, then flags and LMCache's file for each model."""
    rows = []
    for recipe in RECIPES:
        rows.append([f"[{recipe.name}](#{_anchor(recipe.name)})", *_figures(recipe)])
        if recipe.gdn:
            rows.append(["with vLLM 0.33 on Hopper or newer", *_figures(recipe, *FLASHINFER)])
    return "\n\n".join([markdown(HEAD, rows), *map(_section, RECIPES)])


def _figures(recipe: Recipe, *more: str) -> list[str]:
    sizes = plan(recipe, *more)
    unit = _unit(sizes)
    stored = plan(recipe, *more, "--prompts", str(STORED))["backends"]
    return [
        str(recipe.tp),
        f"{sizes['block_size']:,}",
        str(unit["tokens"]),
        _gib(sizes["bytes_per_prompt"]),
        _gib(unit["bytes_per_prompt"]),
        str(_ram(recipe, *more)),
        str(math.ceil(stored["disk"]["gib_per_rank"])),
        str(math.ceil(stored["redis"]["taken"] / 2**30)),
    ]


def _unit(sizes: dict[str, Any]) -> dict[str, Any]:
    """Of plan's units the one nearest to 64 tokens."""
    inner = [unit for unit in sizes["units"] if unit["tokens"] < sizes["block_size"]]
    return min(inner, key=lambda u: max(u["tokens"] / WANTED_UNIT, WANTED_UNIT / u["tokens"]))


def _ram(recipe: Recipe, *more: str) -> int:
    held = plan(recipe, *more, "--prompts", str(RAM_PROMPTS))["backends"]["ram"]
    return math.ceil(held["gib_per_rank"])


def _section(recipe: Recipe) -> str:
    flags = [f"--tensor-parallel-size {recipe.tp}"] if recipe.tp > 1 else []
    flags += [f"--block-size {recipe.block_size}"] if recipe.block_size else []
    flags += [recipe.flags] if recipe.flags else []
    stored = plan(recipe, "--prompts", str(STORED))["backends"]
    disk = math.ceil(stored["disk"]["gib_per_rank"])
    flags += [f"--max-model-len {MAX_LEN}", "--shutdown-timeout 30"]
    return f"""## {recipe.name}

```
LMCACHE_CONFIG_FILE=lmcache.yaml vllm serve {recipe.weights} \\
  {" ".join(flags)} \\
  --kv-transfer-config '{CONNECTOR}'
```

```yaml
local_cpu: true
max_local_cpu_size: {_ram(recipe)}
local_disk: /srv/lmcache
max_local_disk_size: {disk}
```

[What was tested of its family](families/{recipe.page}.md)."""


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g}"


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")
