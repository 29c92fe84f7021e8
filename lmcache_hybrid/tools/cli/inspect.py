# SPDX-License-Identifier: Apache-2.0
"""``inspect`` and ``verify``: stores seen from outside an engine."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmcache_hybrid.core.digests import PLAIN, Digester, KeyedDigester
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.core.secret_files import read_key
from lmcache_hybrid.core.sizes import size_text
from lmcache_hybrid.storage.key_names import printable
from lmcache_hybrid.tools.cli.terminal import live_line
from lmcache_hybrid.tools.stored.audit import AuditResult, Status, judge, verify
from lmcache_hybrid.tools.stored.opening import open_store, stores_of
from lmcache_hybrid.tools.stored.record_store import Names, RecordStore
from lmcache_hybrid.tools.stored.summary import Row, summarise

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
BAD = (Status.DAMAGED, Status.UNREADABLE)
# Bad records printed one by one; --json has all of them.
SHOWN = 20

StoreArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE",
        help="A folder (fs:// or local_disk), fs://HOST:PORT/PATH, file:///PATH, or a URL of "
        "Redis, a Redis cluster or sentinels.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--lmcache-config", help="LMCache's YAML: look into every store that it names."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


KeyOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="The engines' lmcache.hybrid_key_file, for sealed records."),
]


@contextmanager
def refusals() -> Iterator[None]:
    """Turn our errors into one sentence and an exit code: 2 for usage, 1 for the store."""
    try:
        yield
    except (ConfigError, StoreError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


@refusals()
def inspect_store(
    store: StoreArgument = None, lmcache_config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Show what a store holds, by model, rank and fingerprint. Payloads are not read."""
    results = []
    for opened in open_stores(store, lmcache_config):
        rows = summarise(map(judge, opened.entries()))
        results.append((opened, rows))
        if not as_json:
            _print_rows(opened, rows)
    if as_json:
        print(json.dumps([_described(s) | {"rows": list(map(asdict, r))} for s, r in results]))


@refusals()
def verify_store(
    store: StoreArgument = None,
    lmcache_config: ConfigOption = None,
    as_json: JsonOption = False,
    delete_damaged: Annotated[
        bool, typer.Option("--delete-damaged", help="Delete damaged records.")
    ] = False,
    key_file: KeyOption = None,
) -> None:
    """Read every record and check it as an engine does.

    Exit code 0: all records are good, 1: damaged or unreadable records
    are left, 2: there is no record to check.
    """
    digester = digester_of(key_file)
    results, left, found = [], 0, 0
    for opened in open_stores(store, lmcache_config):
        counts: Counter[Status] = Counter()
        bad: list[AuditResult] = []
        with progress(as_json) as show, closing(Names()) as damaged:
            for verdict in show(verify(opened, entry, digester) for entry in opened.entries()):
                counts[verdict.status] += 1
                if verdict.status in BAD and (as_json or len(bad) < SHOWN):
                    bad.append(verdict)
                if verdict.status == Status.DAMAGED and delete_damaged:
                    damaged.add(verdict.entry.where)
            deleted = opened.delete(damaged) if delete_damaged else 0
        left += sum(counts[status] for status in BAD) - len(damaged)
        found += counts.total()
        results.append((opened, counts, bad, deleted))
    if as_json:
        print(json.dumps([_described(s) | _verified(c, b, d) for s, c, b, d in results]))
    else:
        for result in results:
            _print_verified(*result)
    raise typer.Exit(1 if left else 0 if found else 2)


def digester_of(key_file: Path | None) -> Digester:
    """Make the digester that checks records, with the key of ``--key-file`` if given.

    Raises:
        ConfigError: the file contains no key.
    """
    return PLAIN if key_file is None else KeyedDigester(read_key("--key-file", str(key_file)))


def open_stores(store: str | None, lmcache_config: Path | None) -> Iterator[RecordStore]:
    """Open every store that the command names, each closed before the next is opened.

    Raises:
        ConfigError, StoreError: a wrong name, a store that cannot be reached.
    """
    if store is not None and lmcache_config is None:
        names = [store]
    elif store is None and lmcache_config is not None:
        names = stores_of(lmcache_config)
    else:
        raise typer.BadParameter("name one STORE, or --lmcache-config with the stores in it")
    for name in names:
        with closing(open_store(name)) as opened:
            yield opened


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[Iterator[AuditResult]], Iterator[AuditResult]]]:
    """Yield a function that passes on verdicts, and shows their number on standard error."""
    console = Console(stderr=True)
    with live_line(console, "Reading", disable=quiet or not console.is_terminal) as say:

        def show(verdicts: Iterator[AuditResult]) -> Iterator[AuditResult]:
            size = 0
            for count, verdict in enumerate(verdicts, 1):
                size += verdict.entry.taken
                say(f"{count} records, {size_text(size)}")
                yield verdict

        yield show


# Output


def age_of(seconds: float | None) -> str:
    """Format an age in the largest unit that fits: ``3 d``."""
    if seconds is None:
        return "?"
    unit = next((unit for unit in "dhm" if seconds >= UNITS[unit]), "s")
    return f"{seconds // UNITS[unit]:.0f} {unit}"


def _print_rows(store: RecordStore, rows: list[Row]) -> None:
    print_rows(store, rows)
    if not rows:
        Console().print("No records.")
    unfinished = sum(row.unfinished for row in rows)
    notes = [*store.notes]
    if unfinished:
        notes.append(f"{unfinished} records are being written.")
    if store.foreign:
        notes.append(
            f"{store.foreign} files or values that lmcache-hybrid did not write are skipped."
        )
    if any(row.damaged for row in rows):
        notes.append("`lmcache-hybrid purge STORE --damaged` deletes what is damaged.")
    for note in notes:
        Console().print(Text(note))


def print_rows(store: RecordStore, rows: list[Row]) -> None:
    """Print the names of store and models, a line per fingerprint, and its unusable records."""
    console = Console()
    console.print(Text(store.name, "bold"))
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        console.print(Text(printable(model), overflow="fold"))
        console.print(_table_of(mine))
        for row in mine:
            counts = {"damaged": row.damaged, "of another version": row.other_version}
            told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            if told:
                console.print(Text(f"{row.rank} {row.fingerprint}: {told}", "red"))


def _table_of(rows: list[Row]) -> Table:
    """Make a table of 80 columns; the model's name may be long and has its own line."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank")
    table.add_column("fingerprint", no_wrap=True)
    for name in ("records", "size", "prompts", "states", "deepest", "newest", "oldest"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row.rank,
            row.fingerprint,
            str(row.records),
            size_text(row.bytes),
            f"{row.prompts}+",
            f"{'~' if row.estimated else ''}{row.resumable}",
            str(row.deepest),
            age_of(row.youngest),
            age_of(row.oldest),
        )
    return table


def _print_verified(
    store: RecordStore, counts: Counter[Status], bad: list[AuditResult], deleted: int
) -> None:
    console = Console()
    for verdict in bad:
        console.print(Text(f"{printable(verdict.entry.where)}: {printable(verdict.reason)}"))
    if more := sum(counts[status] for status in BAD) - len(bad):
        console.print(f"... and {more} more.")
    told = ", ".join(f"{count} {status.value}" for status, count in sorted(counts.items()))
    console.print(Text(f"{store.name}: {told or 'no records'}."))
    if not told:
        for note in store.notes:
            console.print(Text(note))
    if deleted:
        console.print(f"Deleted {deleted} damaged records.")


def _described(store: RecordStore) -> dict:
    return {"store": store.name, "notes": store.notes, "foreign": store.foreign}


def _verified(counts: Counter[Status], bad: list[AuditResult], deleted: int) -> dict:
    told = [{"where": v.entry.where, "status": v.status, "reason": v.reason} for v in bad]
    return {"counts": counts, "bad": told, "deleted": deleted}
