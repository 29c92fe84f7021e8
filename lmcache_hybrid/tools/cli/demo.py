# SPDX-License-Identifier: Apache-2.0
"""The main job in a few minutes: store prompts, restart the engine, answer from the store."""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_hybrid.core.sizes import size_text
from lmcache_hybrid.tools.accept.compare import Answer
from lmcache_hybrid.tools.accept.engine import Engine, EngineError, tail
from lmcache_hybrid.tools.cli.terminal import live_line, need_host
from lmcache_hybrid.tools.texts import texts

FLAGS = ("--max-model-len", "16384", "--enforce-eager")
# Kept apart from the demo's prompts: the first request includes start-up work.
SALT, WARM_UP = "demo", "warm-up"
ANSWER_TOKENS = 16
LOG_LINES = 30
console = Console()


def run_engine(model: Path, store: Path, asked: list[str], what: str, log: Path) -> list[Answer]:
    """Start an engine on ``store`` in a process of its own, ask all prompts, stop it.

    Raises:
        typer.Exit: the engine died; the end of its log has been printed.
    """
    config = store / "lmcache.yaml"
    settings: dict[str, object] = {"local_cpu": False, "max_local_cpu_size": 1}
    settings |= {"local_disk": str(store / "records"), "max_local_disk_size": 4}
    config.write_text(json.dumps(settings))  # JSON is YAML
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    environment |= {"LMCACHE_CONFIG_FILE": str(config), "LMCACHE_TRACK_USAGE": "false"}
    answers: list[Answer] = []
    starting = f"{what}: starting (20 to 60 seconds)"
    try:
        with (
            live_line(console, starting, keep=True) as say,
            Engine(str(model), FLAGS, log, environment) as engine,
        ):
            engine.ask([tokens_of(WARM_UP)], WARM_UP, save=False)
            for number, prompt in enumerate(asked):
                say(f"{what}: {number} of {len(asked)} prompts")
                answers += engine.ask([tokens_of(prompt)], SALT, True, ANSWER_TOKENS)
            say(f"{what}: {len(asked)} prompts, stopping")
    except EngineError as error:
        console.print(f"{what} ended: {error}", style="red", markup=False)
        if not error.refused:
            console.print(f"The end of {log}:\n{tail(log, LOG_LINES)}", markup=False)
        raise typer.Exit(1) from error
    return answers


def tokens_of(text: str) -> list[int]:
    """Tokenize for a tiny model, whose tokens are bytes."""
    return list(text.encode())


def report(asked: list[str], cold: list[Answer], restored: list[Answer]) -> bool:
    """Print the table; returns whether every answer was the same and every prompt hit."""
    table = Table(title="First engine (cold) against second engine (restored from disk)")
    for name in ("prompt", "tokens", "hit tokens", "cold, ms", "restored, ms", "same tokens"):
        table.add_column(name, justify="right")
    lengths = [len(tokens_of(prompt)) for prompt in asked]
    for index, (before, after) in enumerate(zip(cold, restored, strict=True)):
        table.add_row(
            str(index),
            str(lengths[index]),
            str(after.cached),
            f"{before.first_token_seconds * 1e3:.0f}",
            f"{after.first_token_seconds * 1e3:.0f}",
            "yes" if before.tokens == after.tokens else "[red]NO[/]",
        )
    console.print(table)
    same = sum(b.tokens == a.tokens for b, a in zip(cold, restored, strict=True))
    hit = sum(answer.cached for answer in restored)
    good = same == len(cold) and all(answer.cached for answer in restored)
    good = good and not any(answer.cached for answer in cold)
    console.print(
        f"{'[green]OK' if good else '[red]FAILED'}[/]: {same} of {len(cold)} answers are the same; "
        f"{hit} of {sum(lengths)} prompt tokens came from the store after the restart."
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
        size = size_text(sum(file.stat().st_size for file in records))
        console.print(f"The store holds {len(records)} records, {size}.")
        restored = run_engine(model, folder, asked, "Second engine", log)
        good = report(asked, cold, restored)
        if store is not None:
            console.print(f"Model, records and log are in {folder}.")
    if not good:
        raise typer.Exit(1)
