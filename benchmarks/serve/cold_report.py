# SPDX-License-Identifier: Apache-2.0
"""Writes the JSON file of :mod:`benchmarks.serve.cold`, and its tables."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.figures import markdown, read, replace, write
from benchmarks.performance.report import named
from benchmarks.serve.report import BASE, SHOWN, spread

HEAD = (
    "requests at once, arm",
    *SHOWN.values(),
    "computed",
    "from LMCache",
    "prefixes computed again",
)


def keep(out: Path, family: str, model: Mapping[str, Any], part: Mapping[str, Any]) -> None:
    """Write one part into the file, in place of those whose arms it has with as many requests.

    Parts with another model of the family are dropped.
    """
    figures = read(out) if out.exists() else {"families": {}}
    known = figures["families"].get(family, {})
    parts = [
        each
        for each in (known["parts"] if known.get("model") == model else [])
        if each["at_once"] != part["at_once"] or not each["runs"].keys() <= part["runs"].keys()
    ]
    parts = sorted([*parts, part], key=lambda each: each["at_once"])
    figures["families"][family] = {"model": model, "parts": parts}
    write(out, figures)


def _rows(family: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each arm; ratios to vLLM with a pool for everything, taken within each round."""
    for part in family["parts"]:
        count, arms = part["at_once"], part["runs"]
        for arm, run in arms.items():
            cells = []
            for name in SHOWN:
                if arm == BASE or BASE not in arms:
                    unit = " a second" if "throughput" in name else " ms"
                    value = median(run[name])
                    cells.append(f"{value:{'.3g' if value < 999.5 else ',.0f'}}{unit}")
                else:
                    ratios = [one / other for one, other in zip(run[name], arms[BASE][name])]
                    cells.append(
                        "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**spread(ratios))
                    )
            asked = sum(run["prompt_tokens"])
            local, external = sum(run["vllm_hit_tokens"]), sum(run["external_hit_tokens"])
            cells += [f"{(asked - local - external) / asked:.0%}", f"{external / asked:.0%}"]
            yield [f"{count}, {arm}", *cells, f"{median(run['again']):.1f}"]


def fill(page: Path, figures: Mapping[str, Any]) -> None:
    """Put the tables into ``page``, each with what it was measured on, part by part."""
    blocks = []
    for family in figures["families"].values():
        table = markdown(HEAD, _rows(family))
        made = "\n".join(map(_made, family["parts"]))
        blocks.append(f"{named(family['model'])}:\n\n{table}\n\n{made}")
    replace(page, "cold", "\n\n".join(blocks))


def _made(part: Mapping[str, Any]) -> str:
    return (
        f"- {part['at_once']} at once: `{part['command']}`, medians of {part['rounds']}; "
        f"small pools of {part['small_pool_blocks']} blocks; {part['date']}; {part['machine']}."
    )


def tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """The same for a terminal."""
    for name, family in figures["families"].items():
        table = Table(*HEAD, title=f"{name}: new prefixes", box=SIMPLE, padding=(0, 1, 0, 0))
        for row in _rows(family):
            table.add_row(*row)
        yield table
