# SPDX-License-Identifier: Apache-2.0
"""``inspect``, ``verify`` and ``purge``: stores seen from outside an engine."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lmcache_hybrid.errors import ConfigError, StoreError
from lmcache_hybrid.stored.audit import Status, Verdict, judge, verify
from lmcache_hybrid.stored.keys import printable, readable_name
from lmcache_hybrid.stored.source import Source, open_source
from lmcache_hybrid.stored.summary import Row, summarise

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# Bad records printed one by one; --json has all of them.
SHOWN = 20
BATCH = 500

StoreArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE", help="A folder (fs:// or local_disk), fs://HOST:PORT/PATH, or a Redis URL."
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--lmcache-config", help="LMCache's YAML: look into every store that it names."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def inspect_store(
    store: StoreArgument = None, lmcache_config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Show what a store holds, by model, rank and fingerprint. Payloads are not read."""
    results = []
    for source in sources(store, lmcache_config):
        with refusals():
            rows = summarise(judge(entry) for entry in source.entries())
        results.append((source, rows))
        if not as_json:
            _print_rows(source, rows)
    if as_json:
        print(json.dumps([_described(s) | {"rows": list(map(asdict, r))} for s, r in results]))


def verify_store(
    store: StoreArgument = None,
    lmcache_config: ConfigOption = None,
    as_json: JsonOption = False,
    delete_damaged: Annotated[
        bool, typer.Option("--delete-damaged", help="Delete what is damaged.")
    ] = False,
) -> None:
    """Read every record and check it as an engine does.

    Exit code 1 if damaged or unreadable ones are left.
    """
    results, left = [], 0
    for source in sources(store, lmcache_config):
        counts: dict[str, int] = {}
        bad: list[Verdict] = []
        with refusals(), progress(as_json) as show:
            for verdict in show(verify(source, entry) for entry in source.entries()):
                counts[verdict.status.value] = counts.get(verdict.status.value, 0) + 1
                if verdict.status in (Status.DAMAGED, Status.UNREADABLE):
                    bad.append(verdict)
            damaged = [verdict.entry for verdict in bad if verdict.status == Status.DAMAGED]
            deleted = source.delete(damaged) if delete_damaged else 0
        left += len(bad) - (len(damaged) if delete_damaged else 0)
        results.append((source, counts, bad, deleted))
    if as_json:
        print(json.dumps([_described(s) | _verified(c, b, d) for s, c, b, d in results]))
    else:
        for result in results:
            _print_verified(*result)
    raise typer.Exit(1 if left else 0)


def purge_store(
    store: StoreArgument = None,
    lmcache_config: ConfigOption = None,
    model: Annotated[
        str | None, typer.Option(help="Only of this model: its name, folder, or last part.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Only of fingerprints that start so; `inspect` shows them.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only older than this: 30m, 12h, 7d, 2w.")
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Only damaged ones; reads every byte.")
    ] = False,
    other_version: Annotated[
        bool, typer.Option("--other-version", help="Only of another record version.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete records that all of the given conditions fit. A running engine misses them."""
    for option, value in (
        ("--model", model),
        ("--fingerprint", fingerprint),
        ("--older-than", older_than),
    ):
        if value is not None and not value.strip():
            # An unset variable of a script must not widen what goes.
            raise typer.BadParameter(f"{option} {value!r} is empty, name what to delete")
    if damaged and other_version:
        raise typer.BadParameter("a record is --damaged or of --other-version, give one of them")
    if not (model or fingerprint or older_than or damaged or other_version):
        raise typer.BadParameter(
            "name what to delete: --model, --fingerprint, --older-than, --damaged or "
            "--other-version"
        )
    seconds = _seconds(older_than) if older_than else None

    def fits(source: Source) -> Iterator[Verdict]:
        for entry in source.entries():
            if model and entry.key.model != readable_name(model):
                continue
            if fingerprint and not entry.key.fingerprint.startswith(fingerprint.lower()):
                continue
            if seconds is not None and (entry.age is None or entry.age < seconds):
                continue
            verdict = verify(source, entry) if damaged else judge(entry)
            if damaged and verdict.status != Status.DAMAGED:
                continue
            if other_version and verdict.status != Status.OTHER_VERSION:
                continue
            yield verdict

    for source in sources(store, lmcache_config):
        with refusals(), progress(False) as show:
            chosen = [verdict.entry for verdict in show(fits(source))]
        size = decimal(sum(entry.taken for entry in chosen))
        what = f"{len(chosen)} records ({size}) in {source.name}"
        if not chosen:
            typer.echo(f"Nothing to delete in {source.name}.")
        elif dry_run:
            typer.echo(f"Would delete {what}.")
        elif yes or typer.confirm(f"Delete {what}?", abort=True):
            with refusals():
                typer.echo(f"Deleted {source.delete(chosen)} of {what}.")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None:
        raise typer.BadParameter(f"--older-than {text!r} is no age; write 30m, 12h, 7d or 2w")
    return int(found[1]) * UNITS[found[2]]


def sources(store: str | None, lmcache_config: Path | None) -> Iterator[Source]:
    """Every store that the command names, each closed before the next is opened.

    Raises:
        typer.Exit: 2 for a wrong name, 1 for a store that cannot be reached; said so.
    """
    if (store is None) == (lmcache_config is None):
        raise typer.BadParameter("name one STORE, or --lmcache-config with the stores in it")
    with refusals():
        names = [store] if store is not None else _configured(lmcache_config)
    for name in names:
        with refusals():
            source = open_source(name)
        try:
            yield source
        finally:
            source.close()


def _configured(path: Path | None) -> list[str]:
    assert path is not None
    from lmcache_hybrid.stored.configured import stores_of

    return stores_of(path)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn our errors into one sentence and an exit code: 2 for usage, 1 for the store."""
    try:
        yield
    except (ConfigError, StoreError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[Iterator[Verdict]], Iterator[Verdict]]]:
    """Gives a function that passes verdicts on, and shows on standard error how many."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("Reading")

        def show(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
            size = 0
            for count, verdict in enumerate(verdicts, 1):
                size += verdict.entry.taken
                bar.update(task, description=f"{count} records, {decimal(size)}")
                yield verdict

        yield show


# Output


def age_of(seconds: float | None) -> str:
    """In the largest unit that fits: ``3 d``."""
    if seconds is None:
        return "?"
    unit = next((unit for unit in "dhm" if seconds >= UNITS[unit]), "s")
    return f"{seconds // UNITS[unit]:.0f} {unit}"


def _print_rows(source: Source, rows: list[Row]) -> None:
    console = Console()
    console.print(Text(source.name, "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    table.add_column("rank")
    table.add_column("fingerprint", no_wrap=True)
    right = "records", "size", "prompts", "states", "deepest", "newest", "oldest"
    for name in (*right, "damaged", "other version"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            Text(printable(row.model)),
            row.rank,
            row.fingerprint,
            str(row.records),
            decimal(row.bytes),
            f"{row.prompts}+",
            str(row.resumable),
            str(row.deepest),
            age_of(row.youngest),
            age_of(row.oldest),
            Text(str(row.damaged), "red" if row.damaged else ""),
            str(row.other_version),
        )
    console.print(table)
    unfinished = sum(row.unfinished for row in rows)
    notes = [*source.notes]
    if unfinished:
        notes.append(f"{unfinished} records are being written.")
    if source.foreign:
        notes.append(f"{source.foreign} files or values of others are left alone.")
    if any(row.damaged for row in rows):
        notes.append("`lmcache-hybrid purge STORE --damaged` deletes what is damaged.")
    for note in notes:
        console.print(Text(note))


def _print_verified(
    source: Source, counts: dict[str, int], bad: list[Verdict], deleted: int
) -> None:
    console = Console()
    for verdict in bad[:SHOWN]:
        console.print(Text(f"{printable(verdict.entry.where)}: {printable(verdict.reason)}"))
    if len(bad) > SHOWN:
        console.print(f"... and {len(bad) - SHOWN} more.")
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    console.print(Text(f"{source.name}: {told or 'no records'}."))
    if deleted:
        console.print(f"Deleted {deleted} damaged records.")


def _described(source: Source) -> dict:
    return {"store": source.name, "notes": source.notes, "foreign": source.foreign}


def _verified(counts: dict[str, int], bad: list[Verdict], deleted: int) -> dict:
    told = [{"where": v.entry.where, "status": v.status, "reason": v.reason} for v in bad]
    return {"counts": counts, "bad": told, "deleted": deleted}
