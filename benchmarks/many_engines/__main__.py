# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.many_engines: many engines' stores on one Redis, folder or bucket.

Ends with 1 if a record was lost or damaged.
"""

import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.figures import header, read, replace, write
from benchmarks.many_engines import report
from benchmarks.many_engines.engine import Seen, Settings
from benchmarks.many_engines.processes import started, total
from benchmarks.many_engines.stores import KINDS, Store, kind_of, opened
from benchmarks.progress import shown
from benchmarks.serve.options import chosen

PAGE = "scale.md"


def main(
    store: Annotated[str, typer.Option(help="redis, fs or s3; several separated by commas.")] = (
        "redis"
    ),
    engines: Annotated[int, typer.Option(help="How many share it.", min=1)] = 200,
    seconds: Annotated[float, typer.Option(help="That they make requests.", min=1)] = 600,
    requests_per_second: Annotated[float, typer.Option(help="Of each engine.", min=0.001)] = 0.5,
    hit_share: Annotated[
        float, typer.Option(help="Of them, those for what an engine has stored.", min=0, max=1)
    ] = 0.5,
    prompts: Annotated[int, typer.Option(help="That each engine keeps stored.", min=1)] = 8,
    blocks: Annotated[int, typer.Option(help="Of a prompt.", min=1)] = 8,
    payload: Annotated[int, typer.Option(help="Bytes of a record's pages.", min=1)] = 1 << 16,
    url: Annotated[str, typer.Option(help="remote_url of a store of yours.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="JSON file; its page's table is written, too.")
    ] = None,
    render_only: Annotated[bool, typer.Option(help="Only print and write the table.")] = False,
) -> None:
    """Have engines look up, load and save prompts in one store, and check every byte loaded."""
    import benchmarks.quiet  # noqa: F401  # for the engines only: a test imports this file

    kinds = (kind_of(url),) if url else chosen(store, KINDS, "store")
    figures: dict[str, Any] = read(out) if out and out.exists() else {"runs": {}}
    for kind in () if render_only else kinds:
        with opened(kind, url) as place:
            settings = Settings(
                place.url,
                place.extra,
                place.environment,
                engines,
                requests_per_second,
                hit_share,
                prompts,
                blocks,
                payload,
                secrets.token_hex(4),
            )
            found = measured(place, settings, seconds)
        figures["runs"][kind] = {
            **header("benchmarks.many_engines"),
            **found,
        }
        if out:
            write(out, figures)
    if out and (page := out.absolute().parent.with_name(PAGE)).exists():
        replace(page, "many", report.markdown(figures["runs"]))
    Console().print(report.table(figures["runs"]))
    wrong = {kind: run for kind, run in figures["runs"].items() if report.is_wrong(run)}
    for kind, run in wrong.items():
        print(f"{kind}: {run['lost']} prompts lost, {run['damaged']} records damaged")
    raise typer.Exit(1 if wrong else 0)


def measured(place: Store, settings: Settings, seconds: float) -> dict[str, Any]:
    """Run the engines and check everything that is stored at the end."""
    with shown() as progress:
        task = progress.add_task("Engines made", total=settings.engines)
        with started(settings, lambda: progress.advance(task)) as run:
            task = progress.add_task("Seconds of requests", total=round(seconds))
            counted = [time.monotonic()]

            def tick() -> None:
                progress.advance(task)
                if place.port and time.monotonic() - counted[0] > 20:  # walks all processes' files
                    run.count_connections(place.port)
                    counted[0] = time.monotonic()

            began = time.monotonic()
            seen = run.run(seconds, tick)
            took = time.monotonic() - began
            if place.port:
                run.count_connections(place.port)
            checked = run.check()
            connections = run.connections if place.port else None
    evicted = place.evicted()
    return figures_of(settings, seen, checked, took) | {
        "connections": connections,
        "evicted": evicted,
    }


def figures_of(
    settings: Settings, seen: list[Seen], checked: list[Seen], seconds: float
) -> dict[str, Any]:
    """Rates and times of the run; losses and damage of the check at its end, too."""
    counts, last = total(seen), total(checked)
    lookups = sorted(each for one in seen for each in one.lookups)
    return {
        "engines": settings.engines,
        "seconds": round(seconds, 1),
        "asked_requests": settings.requests,
        "hit_share": settings.hit_share,
        "prompts": settings.prompts,
        "blocks": settings.blocks,
        "payload": settings.payload,
        "counts": dict(sorted(counts.items())),
        "requests": counts["requests"] / seconds,
        "lookups": counts["lookups"] / seconds,
        "lookup_ms": {
            "p50": 1e3 * report.percentile(lookups, 50),
            "p99": 1e3 * report.percentile(lookups, 99),
            "most": 1e3 * report.percentile(lookups, 100),
        },
        "read": sum(each.read for each in seen) / seconds,
        "written": sum(each.written for each in seen) / seconds,
        "checked": last["hits"],
        "lost": counts["lost"] + last["lost"],
        "damaged": counts["damaged"] + last["damaged"],
    }


if __name__ == "__main__":
    typer.run(main)
