# SPDX-License-Identifier: Apache-2.0
"""The tables of :mod:`benchmarks.serve.cold`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.performance.report import named
from benchmarks.reuse.report import replace
from benchmarks.serve.report import BASE, SHOWN, spread

HEAD = ("requests at once", *SHOWN.values(), "computed", "from LMCache", "prefixes computed again")


def _rows(family: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each arm; ratios to vLLM with a pool for everything, taken within each round."""
    for count, arms in family["runs"].items():
        for arm, run in arms.items():
            cells = []
            for name in SHOWN:
                if arm == BASE or BASE not in arms:
                    unit = " a second" if "throughput" in name else " ms"
                    cells.append(f"{median(run[name]):.3g}{unit}")
                else:
                    ratios = [one / other for one, other in zip(run[name], arms[BASE][name])]
                    cells.append(
                        "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**spread(ratios))
                    )
            asked = sum(run["prompt_tokens"])
            local, external = sum(run["vllm_hit_tokens"]), sum(run["external_hit_tokens"])
            cells += [f"{(asked - local - external) / asked:.0%}", f"{external / asked:.0%}"]
            yield [f"{count}, {arm}", *cells, f"{median(run['again']):.1f}"]


def _model(family: Mapping[str, Any]) -> str:
    pools = ", ".join(f"{size} at {count}" for count, size in family["small_pool_blocks"].items())
    return f"{named(family['model'])}; blocks of the small pools: {pools}"


def fill(page: Path, figures: Mapping[str, Any]) -> None:
    """Put the tables into ``page``."""
    parts = []
    for family in figures["families"].values():
        lines = [list(HEAD), ["---", *["---:"] * (len(HEAD) - 1)], *_rows(family)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"{_model(family)}:\n\n{table}")
    made = f"`{figures['command']}`, medians of {figures['rounds']}"
    parts.append(f"{made}; {figures['date']}; {figures['machine']}.")
    replace(page, "cold", "\n\n".join(parts))


def tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """The same for a terminal."""
    for name, family in figures["families"].items():
        table = Table(*HEAD, title=f"{name}: new prefixes", box=SIMPLE, padding=(0, 1, 0, 0))
        for row in _rows(family):
            table.add_row(*row)
        yield table
