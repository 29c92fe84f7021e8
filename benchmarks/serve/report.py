# SPDX-License-Identifier: Apache-2.0
"""Ratios to the arm "unlimited" within each round, and the tables of them."""

import statistics
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.figures import markdown, replace
from benchmarks.performance.report import named

BASE = "unlimited"
# Of vLLM's client, as it names them.
FIGURES = (
    "median_ttft_ms",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "request_throughput",
)
SHOWN = {
    "median_ttft_ms": "first token",
    "request_throughput": "throughput",
    "median_itl_ms": "between tokens",
}


def ratios(runs: dict) -> dict:
    """Ratios to :data:`BASE`: {arm: {concurrency: {figure: median, lowest, highest}}}.

    Args:
        runs: {arm: {concurrency: {figure: list over rounds}}}.
    """
    if BASE not in runs:
        return {}
    return {
        arm: {
            concurrency: {
                name: spread([a / b for a, b in zip(values[name], runs[BASE][concurrency][name])])
                for name in FIGURES
            }
            for concurrency, values in by_concurrency.items()
        }
        for arm, by_concurrency in runs.items()
        if arm != BASE
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def tables(figures: dict) -> list[Table]:
    """The ratios, and what every arm measured."""
    return [table for table in (_ratios(figures), _measured(figures)) if table.row_count]


def fill(page: Path, figures: dict) -> None:
    """Put the ratios into ``page``."""
    head = ["requests at once", *SHOWN.values(), "tokens from LMCache"]
    rows = []
    for arm, by_concurrency in figures["ratios"].items():
        for concurrency, values in by_concurrency.items():
            cells = [
                "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**values[n]) for n in SHOWN
            ]
            run = figures["runs"][arm][concurrency]
            share = sum(run["external_hit_tokens"]) / sum(run["prompt_tokens"])
            rows.append([f"{concurrency}, {arm}", *cells, f"{share:.0%}"])
    made = f"`{figures['command']}`, medians of {figures['rounds']}"
    model = named(figures.get("model"))
    replace(
        page,
        "serve",
        f"{markdown(head, rows)}\n\n{made}; {figures['date']}; {figures['machine']}; {model}.",
    )


def _table(title: str, *head: str) -> Table:
    table = Table("arm", "C", *head, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _ratios(figures: dict) -> Table:
    table = _table("Ratios to the arm unlimited", *SHOWN.values())
    for arm, by_concurrency in figures["ratios"].items():
        for concurrency, values in by_concurrency.items():
            cells = [
                "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**values[name])
                for name in SHOWN
            ]
            table.add_row(arm, concurrency, *cells)
    return table


def _measured(figures: dict) -> Table:
    """Medians over rounds; queue and prefill are means over requests, as the server has them."""
    head = ("TTFT ms", "queue", "prefill", "ITL ms", "req/s", "computed", "vLLM", "LMCache")
    table = _table("Medians; where the prompt tokens came from", *head)
    for arm, by_concurrency in figures["runs"].items():
        for concurrency, values in by_concurrency.items():
            ttft, itl, rate = (
                statistics.median(values[name])
                for name in ("median_ttft_ms", "median_itl_ms", "request_throughput")
            )
            queue, prefill = (1000 * mean(values, part) for part in ("queue", "prefill"))
            asked = sum(values["prompt_tokens"])
            local = sum(values["vllm_hit_tokens"]) / asked
            external = sum(values["external_hit_tokens"]) / asked
            cells = [f"{ttft:.0f}", f"{queue:.0f}", f"{prefill:.0f}", f"{itl:.1f}", f"{rate:.2f}"]
            cells += [f"{share:.0%}" for share in (1 - local - external, local, external)]
            table.add_row(arm, concurrency, *cells)
    return table


def mean(values: dict, part: str) -> float:
    """Seconds per observation of a histogram, over all rounds; 0 for none."""
    return sum(values[f"{part}_seconds"]) / max(1.0, sum(values[f"{part}_count"]))
