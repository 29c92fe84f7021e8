# SPDX-License-Identifier: Apache-2.0
"""The main job in a few minutes: store prompts, restart the engine, answer from the store."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_hybrid.tools.cli.terminal import live_line, need_host
from lmcache_hybrid.tools.subprocesses import start_module
from lmcache_hybrid.tools.texts import texts

ENGINE = "lmcache_hybrid.tools.cli.demo_engine"
console = Console()


@dataclass(frozen=True)
class Reply:
    """One prompt's answer; see :mod:`lmcache_hybrid.tools.cli.demo_engine`."""

    tokens: int
    hit: int
    first_token_seconds: float
    output: list[int]


def run_engine(model: Path, store: Path, prompts: list[str], what: str, log: Path) -> list[Reply]:
    """Start an engine on ``store`` in a process of its own, ask all prompts, stop it.

    Raises:
        typer.Exit: the engine died; the end of its log has been printed.
    """
    config = store / "lmcache.yaml"
    # JSON is YAML.
    config.write_text(
        json.dumps(
            {
                "local_cpu": False,
                "max_local_cpu_size": 1,
                "local_disk": str(store / "records"),
                "max_local_disk_size": 4,
            }
        )
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "LMCACHE_CONFIG_FILE": str(config),
        "LMCACHE_TRACK_USAGE": "false",
    }
    with log.open("ab") as log_file:
        process, lines = start_module(ENGINE, log_file, environment, own_session=False)
    assert process.stdin is not None
    json.dump({"model": str(model), "prompts": prompts}, process.stdin)
    process.stdin.close()
    replies: list[Reply] = []
    starting = f"{what}: starting (20 to 60 seconds)"
    with lines, live_line(console, starting, keep=True) as say:
        for line in lines:
            message = json.loads(line)
            if "ready" not in message:
                replies.append(Reply(**message))
            say(f"{what}: {len(replies)} of {len(prompts)} prompts")
        say(f"{what}: {len(replies)} prompts, stopping")
        code = process.wait()
    if code != 0 or len(replies) != len(prompts):
        console.print(f"[red]{what} ended with exit code {code}. The end of {log}:[/]")
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), markup=False)
        raise typer.Exit(1)
    return replies


def report(cold: list[Reply], restored: list[Reply]) -> bool:
    """Print the table; whether every answer was the same and every prompt was hit."""
    table = Table(title="First engine (cold) against second engine (restored from disk)")
    for name in ("prompt", "tokens", "hit tokens", "cold [ms]", "restored [ms]", "same tokens"):
        table.add_column(name, justify="right")
    for index, (before, after) in enumerate(zip(cold, restored, strict=True)):
        table.add_row(
            str(index),
            str(before.tokens),
            str(after.hit),
            f"{before.first_token_seconds * 1e3:.0f}",
            f"{after.first_token_seconds * 1e3:.0f}",
            "yes" if before.output == after.output else "[red]NO[/]",
        )
    console.print(table)
    same = sum(b.output == a.output for b, a in zip(cold, restored, strict=True))
    hit = sum(reply.hit for reply in restored)
    total = sum(reply.tokens for reply in restored)
    good = same == len(cold) and all(reply.hit for reply in restored)
    good = good and not any(reply.hit for reply in cold)
    console.print(
        f"{'[green]OK' if good else '[red]FAILED'}[/]: {same} of {len(cold)} answers are the same; "
        f"{hit} of {total} prompt tokens came from the store after the restart."
    )
    return good


def demo(
    family: Annotated[
        str, typer.Option(help="Model family; a tiny random-weight model of it is made.")
    ] = "qwen3_next",
    prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 8,
    store: Annotated[
        Path | None, typer.Option(help="Empty folder that keeps model, records and log.")
    ] = None,
) -> None:
    """Store prompts from one engine, restart, answer them from the disk store.

    Exit code 1 when any answer differs or nothing was hit.
    """
    need_host(1)
    from lmcache_hybrid.tools.tiny_families import FAMILIES
    from lmcache_hybrid.tools.tiny_models import make_model

    offered = [name for name, known in FAMILIES.items() if known.cpu]
    if family not in offered:
        raise typer.BadParameter(f"{family!r} is none of {', '.join(offered)}")
    with tempfile.TemporaryDirectory(prefix="lmcache-hybrid-demo-") as scratch:
        folder = Path(scratch) if store is None else store
        if (folder / "records").exists():
            raise typer.BadParameter(f"{folder} already holds records; name an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        console.print(f"Making a tiny {family} model, and texts from Python's documentation.")
        model = make_model(family, folder / "model")
        asked, log = texts(prompts), folder / "engines.log"
        cold = run_engine(model, folder, asked, "First engine", log)
        records = list((folder / "records").glob("*.pt"))
        size = sum(file.stat().st_size for file in records)
        console.print(f"The store holds {len(records)} records, {size / 1e6:.1f} MB.")
        restored = run_engine(model, folder, asked, "Second engine", log)
        good = report(cold, restored)
        if store is not None:
            console.print(f"Model, records and log are in {folder}.")
    if not good:
        raise typer.Exit(1)
