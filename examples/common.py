# SPDX-License-Identifier: Apache-2.0
"""What the examples share: environment, model, prompt, engine, one request.

Importing this sets environment variables, so it comes before ``import vllm``. They are
defaults: what you export yourself wins.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MAX_MODEL_LEN = 8192
HITS = "vllm:external_prefix_cache_hits"

# Options of several examples.
Model = Annotated[str | None, typer.Option(help="Model to use; without it a tiny one is made.")]
Characters = Annotated[
    int, typer.Option(help="Length of the prompt; the tiny model has one token for each.")
]
Config = Annotated[Path, typer.Option(help="LMCache's YAML.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="redis://HOST:PORT; without it a server is started.")
]

# GB for vLLM's own KV cache on CPU; by default it takes a good part of the machine.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Two cores are plenty for the tiny model; by default each engine binds all there are.
CORES = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", CORES)
for name in ("VLLM_LOGGING_LEVEL", "LMCACHE_LOG_LEVEL"):
    os.environ.setdefault(name, "WARNING")  # export INFO to watch LMCache's lookups and hits
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # an example sends no usage statistics
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")


@dataclass(frozen=True)
class Answer:
    """One finished request. ``hit``: prompt tokens that LMCache brought. Times in seconds."""

    prompt_tokens: int
    tokens: list[int]
    hit: int
    first_token: float
    total: float

    def show(self, what: str) -> None:
        typer.echo(
            f"{what:<28} {self.hit:>5} of {self.prompt_tokens} prompt tokens from LMCache, "
            f"first token {self.first_token:.3f} s, total {self.total:.3f} s"
        )


def own_folder() -> Path:
    """This user's alone, unlike names in a temporary folder that others can guess."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lmcache-hybrid"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def model_or_tiny(model: str | None) -> str:
    """``model``, or the path of a small Qwen3-Next with random weights, made on first use."""
    if model is not None:
        return model
    from lmcache_hybrid.tools.tiny_models import make_model

    return str(make_model("qwen3_next", own_folder() / "lmcache-hybrid-qwen3_next"))


def long_prompt(characters: int, subject: str = "cache") -> str:
    """A text of so many characters without repetition, so that no two blocks are equal."""
    lines = (f"Line {i} says {i * i} about the {subject}.\n" for i in range(characters))
    return "".join(lines)[:characters]


def start(model: str, transfer: dict[str, Any] | None, **options: Any) -> Any:
    """A ``vllm.LLM``; ``transfer`` is its kv_transfer_config, None for no connector."""
    from vllm import LLM

    return LLM(
        model,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
        enforce_eager=True,  # starts faster; leave it out in production
        disable_log_stats=False,  # times and counters
        **options,
    )


def ask(llm: Any, prompt: str, max_tokens: int = 16) -> Answer:
    """Send one greedy request."""
    from vllm import SamplingParams

    def external() -> int:
        return sum(metric.value for metric in llm.get_metrics() if metric.name == HITS)

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    before, started = external(), time.perf_counter()
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    total, hit = time.perf_counter() - started, external() - before
    prompt_tokens, tokens = len(output.prompt_token_ids), list(output.outputs[0].token_ids)
    return Answer(prompt_tokens, tokens, hit, output.metrics.first_token_latency, total)


def stop(llm: Any) -> None:
    """End the engine, with time for LMCache to write what it holds: vLLM's default is 5 s."""
    llm.llm_engine.engine_core.shutdown(timeout=30)


def finish(problems: list[str]) -> None:
    """Say how it went and end with exit code 1 when something did."""
    for problem in problems:
        typer.secho(f"FAILED: {problem}", fg="red")
    if problems:
        raise typer.Exit(1)
    typer.secho("OK", fg="green")
