# SPDX-License-Identifier: Apache-2.0
"""``purge``: delete records of a store, after showing which."""

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from lmcache_hybrid.core.digests import PLAIN, Digester
from lmcache_hybrid.storage.key_names import printable, readable_name
from lmcache_hybrid.tools.cli.inspect import (
    UNITS,
    ConfigOption,
    KeyOption,
    StoreArgument,
    digester_of,
    open_stores,
    progress,
    refusals,
    table_of,
)
from lmcache_hybrid.tools.stored.audit import Status, Verdict, judge, verify
from lmcache_hybrid.tools.stored.record_store import Names, RecordStore
from lmcache_hybrid.tools.stored.summary import summarise

# A shorter beginning could fit another fingerprint by chance.
FEWEST_DIGITS = 4


@dataclass(frozen=True)
class Choice:
    """Which records to delete: those that meet every condition that is set.

    Attributes:
        model: as keys have it.
        fingerprints: beginnings, one of which must match.
        seconds: least age.
        digester: checks the payloads where only ``damaged`` records are wanted.
    """

    model: str | None
    fingerprints: tuple[str, ...]
    seconds: float | None
    damaged: bool
    other_version: bool
    digester: Digester = PLAIN

    def of(self, store: RecordStore) -> Iterator[Verdict]:
        for entry in store.entries():
            if self.model and entry.key.model != self.model:
                continue
            if self.fingerprints and not entry.key.fingerprint.startswith(self.fingerprints):
                continue
            if self.seconds is not None and (entry.age is None or entry.age < self.seconds):
                continue
            verdict = verify(store, entry, self.digester) if self.damaged else judge(entry)
            if self.damaged and verdict.status != Status.DAMAGED:
                continue
            if self.other_version and verdict.status != Status.OTHER_VERSION:
                continue
            yield verdict


def purge_store(
    store: StoreArgument = None,
    lmcache_config: ConfigOption = None,
    model: Annotated[
        str | None, typer.Option(help="Only this model, by the name that `inspect` shows.")
    ] = None,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(help="Only fingerprints that begin so, as `inspect` shows them; repeatable."),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only records older than this: 30m, 12h, 7d, 2w.")
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Only damaged records; reads every byte.")
    ] = False,
    other_version: Annotated[
        bool, typer.Option("--other-version", help="Only records of another version.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    key_file: KeyOption = None,
) -> None:
    """Delete the records that meet all conditions, after showing them and asking.

    A running engine then misses them. Exit code 2: nothing was deleted, because there was
    no terminal to ask on, or because the model's name may be another model's, too.
    """
    choice = _choice(model, tuple(fingerprint or ()), older_than, damaged, other_version)
    if key_file is not None and not damaged:
        raise typer.BadParameter("--key-file is read with --damaged only, add it or leave it out")
    choice = replace(choice, digester=digester_of(key_file))
    unsure = model is not None and choice.model != model and not fingerprint
    for opened in open_stores(store, lmcache_config):
        with closing(Names()) as chosen:
            what = _show(opened, choice, chosen)
            if not chosen:
                typer.echo(f"Nothing to delete in {opened.name}.")
            elif unsure:
                _refuse(
                    f"Names of records have only the last part of a model's name, {choice.model}, "
                    "so these may be of other models, too"
                    "; select them by --fingerprint, or write the last part alone for all of them."
                )
            elif dry_run:
                typer.echo(f"Would delete {what}.")
            elif yes or _agreed(what):
                with refusals():
                    typer.echo(f"Deleted {opened.delete(chosen)} of {what}.")


def _choice(
    model: str | None,
    fingerprints: tuple[str, ...],
    older_than: str | None,
    damaged: bool,
    other_version: bool,
) -> Choice:
    """Check the conditions.

    Raises:
        typer.BadParameter: one that would choose other records than was meant.
    """
    for option, values in (
        ("--model", (model,)),
        ("--fingerprint", fingerprints),
        ("--older-than", (older_than,)),
    ):
        for value in values:
            if value is not None and not value.strip():
                # An unset variable of a script must not widen what goes.
                raise typer.BadParameter(f"{option} {value!r} is empty, name what to delete")
    for value in fingerprints:
        if not re.fullmatch(rf"[0-9a-fA-F]{{{FEWEST_DIGITS},16}}", value):
            raise typer.BadParameter(
                f"--fingerprint {value!r} is none, give {FEWEST_DIGITS} to 16 of the digits that "
                "`inspect` shows"
            )
    if damaged and other_version:
        raise typer.BadParameter("a record is --damaged or of --other-version, give one of them")
    if not (model or fingerprints or older_than or damaged or other_version):
        raise typer.BadParameter(
            "name what to delete: --model, --fingerprint, --older-than, --damaged or "
            "--other-version"
        )
    name = None if model is None else readable_name(model)
    if name == "":
        raise typer.BadParameter(f"--model {model!r} has no name, write it as `inspect` does")
    return Choice(
        name,
        tuple(value.lower() for value in fingerprints),
        _seconds(older_than) if older_than else None,
        damaged,
        other_version,
    )


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None:
        raise typer.BadParameter(f"--older-than {text!r} is no age; write 30m, 12h, 7d or 2w")
    return int(found[1]) * UNITS[found[2]]


def _show(store: RecordStore, choice: Choice, chosen: Names) -> str:
    """Print the fingerprints of what is chosen and add its names to ``chosen``.

    Returns:
        How much it is, and where.
    """

    def added(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
        for verdict in verdicts:
            chosen.add(verdict.entry.where)
            yield verdict

    with refusals(), progress(False) as show:
        rows = summarise(added(show(choice.of(store))))
    if rows:
        console = Console()
        console.print(Text(store.name, "bold"))
        console.print(table_of(rows))
    size = decimal(sum(row.bytes for row in rows))
    return f"{len(chosen)} records ({size}) in {store.name}"


def _agreed(what: str) -> bool:
    """Ask whether ``what`` shall be deleted.

    Raises:
        typer.Abort: no.
        typer.Exit: 2, there is nobody to ask; said so.
    """
    if not sys.stdin.isatty():
        _refuse(f"There is no terminal to ask on whether to delete {what}; add --yes")
    return typer.confirm(f"Delete {what}?", abort=True)


def _refuse(why: str) -> None:
    typer.echo(printable(f"Nothing was deleted. {why}."), err=True)
    raise typer.Exit(2)
