# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.serve: ask servers in turns with ``vllm bench serve``."""

import random
import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import header, page_of, read, write
from benchmarks.progress import shown
from benchmarks.serve import report
from benchmarks.serve.client import Workload, ask
from benchmarks.serve.options import CONCURRENCY, Arms, Concurrency, RenderOnly, Rounds, chosen
from benchmarks.serve.servers import Arm, Server

ARMS = ("unlimited", "quarter", "ram")
ALL_ARMS = ",".join(ARMS)
LMCACHE = {"local_cpu": True, "max_local_cpu_size": 4}
OPTIONS = {"max-model-len": 16_384, "max-num-batched-tokens": 2_048}
WARM_UP = 4
# Of 640 tokens: six pages, and states of three groups at 1,920 and at 3,840.
BLOCKS_PER_PREFIX = 12
# What vLLM asks for to start with a context of 16,384 tokens.
LEAST_BLOCKS = 36


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/serve.json"),
    arms: Arms = ALL_ARMS,
    concurrency: Concurrency = CONCURRENCY,
    rounds: Rounds = 5,
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes of 4,096 tokens.")] = 12,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each prefix.")] = 4,
    share: Annotated[
        float, typer.Option(help="Of the prefixes, how many the small pools hold.")
    ] = 0.25,
    render_only: RenderOnly = False,
) -> None:
    """Measure first tokens and throughput of servers whose cache holds more or less.

    unlimited: vLLM, a pool for all prefixes. quarter: vLLM, a pool for a quarter of them.
    ram: that pool, with LMCache's RAM. C is the number of requests in flight.
    """
    if not render_only:
        _write(out, arms, concurrency, rounds, Workload(prefixes, prompts, 4096, 128, 16), share)
    figures = read(out)
    page = page_of(out, "performance.md")
    if page.exists():
        report.fill(page, figures)
    for table in report.tables(figures):
        Console().print(table)


def _write(
    out: Path, arms: str, concurrency: str, rounds: int, workload: Workload, share: float
) -> None:
    """Measure, and write the JSON file."""
    asked = chosen(arms, ARMS, "arm")
    blocks = max(LEAST_BLOCKS, round(share * workload.prefixes * BLOCKS_PER_PREFIX))
    at_once = [int(count) for count in concurrency.split(",")]
    model, runs = _measure(asked, at_once, rounds, workload, blocks)
    figures = {
        **header("benchmarks.serve"),
        "model": model,
        "client": shlex.join(["vllm", "bench", "serve", *workload.arguments]),
        "small_pool_blocks": blocks,
        "rounds": rounds,
        "runs": runs,
        "ratios": report.ratios(runs),
    }
    write(out, figures)


def _measure(
    arms: tuple[str, ...], at_once: list[int], rounds: int, workload: Workload, blocks: int
) -> tuple[dict, dict]:
    """What tells the model from others, and {arm: {concurrency: {figure: list over rounds}}}."""
    from benchmarks.performance.model import make_model

    runs: dict = {arm: {str(count): {} for count in at_once} for arm in arms}
    with (
        shown() as progress,
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
        ExitStack() as stack,
    ):
        folder = Path(temporary)
        task = progress.add_task("starting servers", total=len(arms) * (1 + rounds * len(at_once)))
        model = make_model(folder)
        settings = {
            "unlimited": Arm(),
            "quarter": Arm(blocks),
            "ram": Arm(blocks, LMCACHE),
        }
        options = {"dtype": model.dtype, **OPTIONS}
        servers = {
            arm: stack.enter_context(Server(arm, settings[arm], model.folder, folder, options))
            for arm in arms
        }
        for server in servers.values():
            server.wait()
        for arm, server in servers.items():
            progress.update(task, description=f"filling caches: {arm}")
            ask(server.url, model.folder, workload, WARM_UP, folder)
            progress.advance(task)
        for round_ in range(rounds):
            for count in at_once:
                for arm in random.Random(f"{round_} {count}").sample(arms, len(arms)):
                    progress.update(task, description=f"{arm}, {count} at once")
                    server = servers[arm]
                    before = server.counts()
                    answer = ask(server.url, model.folder, workload, count, folder)
                    after = server.counts()
                    counts = {name: after[name] - before[name] for name in after}
                    _check(arm, counts)
                    values = {name: answer[name] for name in report.FIGURES} | counts
                    for name, value in values.items():
                        runs[arm][str(count)].setdefault(name, []).append(value)
                    progress.advance(task)
    return model.record, runs


def _check(arm: str, counts: dict[str, float]) -> None:
    """Hits came from where they are meant to. Raises AssertionError."""
    local = counts["vllm_hit_tokens"] / counts["prompt_tokens"]
    external = counts["external_hit_tokens"] / counts["prompt_tokens"]
    assert counts["recomputed_tokens"] == 0, f"{arm}: loads failed"
    if arm == "ram":
        assert external > 0.2, f"LMCache brought {external:.0%} of the tokens"
        assert local + external > 0.85, f"{arm} computed {1 - local - external:.0%}"
    else:
        assert external == 0, f"{arm} has no connector"
        right = local > 0.85 if arm == "unlimited" else local < 0.7
        assert right, f"{arm} had {local:.0%} of the tokens in vLLM's cache"


if __name__ == "__main__":
    typer.run(main)
