# SPDX-License-Identifier: Apache-2.0
"""Tables of the file of :mod:`benchmarks.peers`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.peers.arms import ARMS, BASE, Arm
from benchmarks.reuse.report import replace

PAGE_MARKER = "peers"
RIGHT = (
    "",
    "wrong answers",
    "hit share, large steps",
    "hit share, small steps",
    "MB stored",
    "hits after a restart of the engine",
    "and of the server",
    "damaged records",
)
FAST = (
    "",
    "first token over vLLM's own hit",
    "first read after a restart",
    "4 at once: first token",
    "requests a second",
    "tokens hit",
)
Figures = Mapping[str, Any]


def fill(page: Path, figures: Figures) -> None:
    """Put both tables into ``page``, and below them what they were measured on."""
    text = "\n\n".join([_markdown(RIGHT, right(figures)), _markdown(FAST, fast(figures))])
    replace(page, PAGE_MARKER, f"{text}\n\n{made(figures)}")


def tables(figures: Figures) -> Iterator[Table]:
    """The same for a terminal."""
    for head, rows in ((RIGHT, right(figures)), (FAST, fast(figures))):
        table = Table(*head, box=SIMPLE, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row)
        yield table


def arms(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Name and figures of each arm that was measured, in the order of :data:`ARMS`."""
    known = figures["arms"]
    for name in ARMS:
        if name in known:
            yield name, known[name]


def right(figures: Figures) -> list[list[str]]:
    """One row for each arm: what it answered, found again and stored."""
    alone = [(ARMS[BASE], row) for name, row in figures["arms"].items() if _is_base(name)]
    others = [(ARMS[name], row) for name, row in arms(figures)]
    return [[_title(arm, row), *_right(arm, row["probe"])] for arm, row in (*alone, *others)]


def _is_base(name: str) -> bool:
    return name.startswith(f"{BASE} ")


def _title(arm: Arm, row: Figures) -> str:
    """vLLM alone was measured in each environment."""
    return row["title"] if arm.connector else f"{row['title']}, beside LMCache {row['lmcache']}"


def _right(arm: Arm, probe: Figures) -> list[str]:
    if "large_steps" not in probe:
        return [f"does not run: `{probe['failed']}`", *[""] * (len(RIGHT) - 2)]
    judged = [
        probe[steps][way]
        for steps in ("large_steps", "small_steps")
        if steps in probe
        for way in ("one_at_a_time", "four_at_a_time")
    ]
    wrong, answers = (sum(each[what] for each in judged) for what in ("wrong", "answers"))
    cells = [f"{wrong} of {answers}"]
    for steps in ("large_steps", "small_steps"):
        share = probe.get(steps, {}).get("hit_share")
        cells.append("" if share is None else f"{share:.0%}")
    cells.append(f"{probe['stored_bytes'] / 1e6:.0f}" if "stored_bytes" in probe else "")
    both = probe.get("restart")
    engine = probe.get("engine_restart") if arm.server else both
    cells.append(_share(engine))
    cells.append(_share(both) if arm.server else "no server" if arm.connector else "")
    cells.append(_damaged(probe))
    if "failed" in probe:
        cells[-1] += f"; then `{probe['failed']}`"
    return cells


def _share(later: Figures | None) -> str:
    if later is None:
        return ""
    hits = [hit > 0 for hit in later["hits"]]
    says = later.get("server_says")
    no = f"no: `{says}`" if says else "no"
    return "yes" if all(hits) else f"{sum(hits)} of {len(hits)}" if any(hits) else no


def _damaged(probe: Figures) -> str:
    if "damaged" not in probe:
        return ""
    found = probe["damaged"]
    names = {"computed": "computed", "wrong": "**wrong answer**", "error": "error", "right": "hit"}
    return ", ".join(f"{found[key]} {name}" for key, name in names.items() if found[key])


def fast(figures: Figures) -> list[list[str]]:
    """One row for each arm that runs: how long it takes."""
    rows = []
    known = figures["arms"]
    for name, row in known.items():
        if _is_base(name) and "first_token" in row.get("probe", {}):
            rows.append(_alone(row))
    for _, row in arms(figures):
        probe, base = row.get("probe", {}), known.get(f"{BASE} {row['lmcache']}", {})
        if "first_token" not in probe:
            continue
        token = probe["first_token"]
        own = median(token["own_ms"])
        hit = _median_hit(token["stored_ms"], token["stored_hits"])
        again = probe.get("restart")
        read = _median_hit(again["ms"], again["hits"]) if again else None
        cells = [_ratio(hit, own), _ratio(read, own)]
        rows.append([row["title"], *cells, *_speed(row.get("speed", {}), base.get("speed", {}))])
    return rows


def _alone(row: Figures) -> list[str]:
    """vLLM without a connector, with a pool for everything: what the ratios are to."""
    own, run = median(row["probe"]["first_token"]["own_ms"]), row.get("speed", {})
    cells = [f"{own:.0f} ms", ""]
    if "request_throughput" in run:
        cells += [f"{median(run['median_ttft_ms']):.0f} ms"]
        cells += [f"{median(run['request_throughput']):.2f}"]
        cells += [f"{sum(run['vllm_hit_tokens']) / sum(run['prompt_tokens']):.0%}"]
    else:
        cells += ["", "", ""]
    return [_title(ARMS[BASE], row), *cells]


def _median_hit(values: list[float], hits: list[int]) -> float | None:
    found = [value for value, hit in zip(values, hits, strict=True) if hit]
    return median(found) if found else None


def _ratio(value: float | None, own: float) -> str:
    return "no hit" if value is None else f"{value / own:.2f} ({value:.0f} ms)"


def _speed(run: Figures, base: Figures) -> list[str]:
    """Ratios to vLLM alone, with a pool for everything, within each round."""
    if "request_throughput" not in run or "request_throughput" not in base:
        return [f"`{run['failed']}`" if "failed" in run else "", "", ""]
    cells = []
    for figure in ("median_ttft_ms", "request_throughput"):
        ratios = [a / b for a, b in zip(run[figure], base[figure])]
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    hits = sum(run["vllm_hit_tokens"]) + sum(run["external_hit_tokens"])
    return [*cells, f"{hits / sum(run['prompt_tokens']):.0%}"]


def made(figures: Figures) -> str:
    """How the figures came about."""
    model, command = figures["model"], figures["command"]
    dates = sorted(
        {part["date"] for row in figures["arms"].values() for part in row.values() if _dated(part)}
    )
    machines = {
        part["machine"] for row in figures["arms"].values() for part in row.values() if _dated(part)
    }
    counts = {
        row["speed"]["rounds"]
        for row in figures["arms"].values()
        if "rounds" in row.get("speed", {})
    }
    rounds = " or ".join(str(count) for count in sorted(counts))
    large, small = model["limits"]
    return (
        f"`{command}`; {', '.join(dates)}; {', '.join(sorted(machines))}; {model['family']} of "
        f"8 layers, bfloat16, N = {model['block_size']}; `--max-num-batched-tokens` {large} and "
        f"{small}; medians of 7 hits and of {rounds} rounds."
    )


def _dated(part: Any) -> bool:
    return isinstance(part, Mapping) and "date" in part


def _markdown(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
