# SPDX-License-Identifier: Apache-2.0
"""Tables of the file of :mod:`benchmarks.peers`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.figures import markdown, replace
from benchmarks.peers.arms import ARMS, BASE, Arm

PAGE_MARKER = "peers"
RIGHT = (
    "",
    "wrong answers, one at a time",
    "differing answers, 4 at a time",
    "hit share, large steps",
    "hit share, small steps",
    "MB stored",
    "hits after a restart of the engine",
    "and of the server",
    "answers from damaged records",
)
FAST = (
    "",
    "first token over vLLM's own hit",
    "from files or Redis after a restart",
    "4 at once: first token",
    "requests a second",
    "tokens hit",
)
STEPS = ("large_steps", "small_steps")
Figures = Mapping[str, Any]


def fill(page: Path, figures: Figures) -> None:
    """Put the tables into ``page``, and below them what they were measured on."""
    parts = [markdown(RIGHT, right(figures)), markdown(FAST, fast(figures)), made(figures)]
    replace(page, PAGE_MARKER, "\n\n".join(part for part in parts if part))


def tables(figures: Figures) -> Iterator[Table]:
    """The same for a terminal."""
    for head, rows in ((RIGHT, right(figures)), (FAST, fast(figures))):
        table = Table(*head, box=SIMPLE, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row)
        if rows:
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
    return [
        [_title(arm, row), *_right(arm, row["probe"])]
        for arm, row in (*alone, *others)
        if "probe" in row
    ]


def _is_base(name: str) -> bool:
    return name.startswith(f"{BASE} ")


def _title(arm: Arm, row: Figures) -> str:
    """vLLM alone was measured in each environment."""
    return row["title"] if arm.connector else f"{row['title']}, beside LMCache {row['lmcache']}"


def _right(arm: Arm, probe: Figures) -> list[str]:
    if "large_steps" not in probe:
        return [f"does not run: `{probe['failed']}`", *[""] * (len(RIGHT) - 2)]
    cells = []
    for way in ("one_at_a_time", "four_at_a_time"):
        judged = [probe[steps][way] for steps in STEPS if steps in probe]
        wrong, answers = (sum(each[what] for each in judged) for what in ("wrong", "answers"))
        cells.append(f"{wrong} of {answers}")
    for steps in STEPS:
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
    names = {"computed": "computed", "wrong": "wrong", "error": "error", "right": "hit"}
    return ", ".join(f"{found[key]} {name}" for key, name in names.items() if found[key])


def fast(figures: Figures) -> list[list[str]]:
    """One row for each arm that was timed."""
    known = figures["arms"]
    timed = [
        row for name, row in known.items() if _is_base(name) and "rounds" in row.get("speed", ())
    ]
    rows = [_alone(row) for row in timed]
    for _, row in arms(figures):
        base, run = known.get(f"{BASE} {row['lmcache']}", {}), row.get("speed", {})
        if "rounds" in run and "rounds" in base.get("speed", ()):
            first = [_over(run["first_token"]), _from_store(row.get("store"))]
            rows.append([row["title"], *first, *_speed(run, base["speed"])])
    return rows


def _alone(row: Figures) -> list[str]:
    """vLLM without a connector, with a pool for everything: what the ratios are to."""
    run = row["speed"]
    return [
        _title(ARMS[BASE], row),
        f"{median(run['first_token']['own_ms']):.0f} ms",
        "",
        f"{median(run['median_ttft_ms']):.0f} ms",
        f"{median(run['request_throughput']):.2f}",
        f"{sum(run['vllm_hit_tokens']) / sum(run['prompt_tokens']):.0%}",
    ]


def _over(token: Figures) -> str:
    """The store's hit over vLLM's own in the same engine: medians, then the fastest of each."""
    pairs = zip(token["stored_ms"], token["stored_hits"], strict=True)
    found, own = [ms for ms, hit in pairs if hit], token["own_ms"]
    if not found:
        return "no hit"
    return f"{median(found) / median(own):.2f} (fastest {min(found) / min(own):.2f})"


def _from_store(part: Figures | None) -> str:
    """After a restart of all processes; "" where nothing outlives them."""
    if part is None:
        return ""
    if "failed" in part:
        return f"does not run: `{part['failed']}`"
    pairs = zip(part["stored_ms"], part["stored_hits"], strict=True)
    found = [ms for ms, hit in pairs if hit]
    if not found:
        return "no hit"
    return f"{median(found):.0f} ms; {median(found) / median(part['own_ms']):.2f}"


def _speed(run: Figures, base: Figures) -> list[str]:
    """Ratios to vLLM alone, within each round."""
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
    timed = f"; times: medians of 7 hits and of {rounds} rounds" if rounds else ""
    large, small = model["limits"]
    return (
        f"`{command}`; {', '.join(dates)}; {', '.join(sorted(machines))}; {model['family']} of "
        f"8 layers, bfloat16, N = {model['block_size']}; `--max-num-batched-tokens` {large} and "
        f"{small}{timed}."
    )


def _dated(part: Any) -> bool:
    return isinstance(part, Mapping) and "date" in part
