# SPDX-License-Identifier: Apache-2.0
"""``purge``: delete records of a store, after showing which."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmcache_hybrid.core.digests import Digester
from lmcache_hybrid.core.sizes import GIB, KIB, MIB, TIB, size_text
from lmcache_hybrid.storage.folder.least_used import least_used
from lmcache_hybrid.storage.key_names import printable, readable_name
from lmcache_hybrid.tools.cli.inspect import (
    UNITS,
    ConfigOption,
    KeyOption,
    StoreArgument,
    digester_of,
    open_stores,
    print_rows,
    progress,
    refusals,
)
from lmcache_hybrid.tools.cli.terminal import live_line
from lmcache_hybrid.tools.stored.audit import AuditResult, Status, judge, verify
from lmcache_hybrid.tools.stored.folder_store import FolderStore
from lmcache_hybrid.tools.stored.record_store import Names, RecordStore
from lmcache_hybrid.tools.stored.summary import summarise

# A shorter beginning could fit another fingerprint by chance.
FEWEST_DIGITS = 4
SIZES = {"k": 1000, "Ki": KIB, "M": 10**6, "Mi": MIB}
SIZES |= {"G": 10**9, "Gi": GIB, "T": 10**12, "Ti": TIB}

Show = Callable[[Iterator[AuditResult]], Iterator[AuditResult]]


@dataclass(frozen=True)
class Choice:
    """Selects the records to delete: those that meet every condition that is set.

    Attributes:
        model: as keys have it.
        fingerprints: prefixes, one of which must match.
        seconds: min age.
        digester: checks the payloads if only ``damaged`` records are wanted.
        max_bytes: delete only down to this size of the store, least recently used first.
    """

    model: str | None
    fingerprints: tuple[str, ...]
    seconds: float | None
    damaged: bool
    other_version: bool
    digester: Digester
    max_bytes: int | None

    def of(self, store: RecordStore, show: Show) -> Iterator[AuditResult]:
        """Yield the records to delete.

        Args:
            show: passes on records and shows progress.
        """
        if self.max_bytes is None:
            yield from show(self._meeting(store))
            return
        size = sum(verdict.entry.taken for verdict in show(map(judge, store.entries())))
        yield from least_used(lambda: self._whole(store, show), size - self.max_bytes)

    def _whole(self, store: RecordStore, show: Show) -> Iterator[AuditResult]:
        # Records being written are the newest anyway.
        return (v for v in show(self._meeting(store)) if v.status != Status.UNFINISHED)

    def _meeting(self, store: RecordStore) -> Iterator[AuditResult]:
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


@refusals()
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
    max_size: Annotated[
        str | None,
        typer.Option(
            help="Only as many, least recently used first, as bring the folder down to this: "
            "500GB, 1.5TB, 200GiB."
        ),
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
    """Delete the records that meet all conditions. Lists them and asks first.

    Running engines then miss them. Exit code 2: nothing was deleted, because
    there is no terminal and no --yes, or because other models may have the
    same name.
    """
    choice = _choice(
        model, tuple(fingerprint or ()), older_than, max_size, damaged, other_version, key_file
    )
    unsure = model is not None and choice.model != model and not fingerprint
    for opened in open_stores(store, lmcache_config):
        _check_size(opened, choice)
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
                typer.echo(f"Deleted {_delete(opened, chosen)} of {what}.")


def _choice(
    model: str | None,
    fingerprints: tuple[str, ...],
    older_than: str | None,
    max_size: str | None,
    damaged: bool,
    other_version: bool,
    key_file: Path | None,
) -> Choice:
    """Check the conditions.

    Raises:
        typer.BadParameter: one that would choose other records than meant.
    """
    for option, values in (
        ("--model", (model,)),
        ("--fingerprint", fingerprints),
        ("--older-than", (older_than,)),
        ("--max-size", (max_size,)),
    ):
        for value in values:
            if value is not None and not value.strip():
                # An unset variable of a script must not delete more.
                raise typer.BadParameter(f"{option} {value!r} is empty, name what to delete")
    for value in fingerprints:
        if not re.fullmatch(rf"[0-9a-fA-F]{{{FEWEST_DIGITS},16}}", value):
            raise typer.BadParameter(
                f"--fingerprint {value!r} is not a fingerprint; give {FEWEST_DIGITS} to 16 of the "
                "hex digits that `inspect` shows"
            )
    if damaged and other_version:
        raise typer.BadParameter("a record is --damaged or of --other-version, give one of them")
    if damaged and max_size:
        raise typer.BadParameter("--damaged deletes all damaged records, leave out --max-size")
    if key_file is not None and not damaged:
        raise typer.BadParameter("--key-file is read with --damaged only, add it or leave it out")
    if not (model or fingerprints or older_than or max_size or damaged or other_version):
        raise typer.BadParameter(
            "name what to delete: --model, --fingerprint, --older-than, --max-size, --damaged or "
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
        digester_of(key_file),
        _bytes(max_size) if max_size else None,
    )


def _check_size(store: RecordStore, choice: Choice) -> None:
    if choice.max_bytes is not None and not isinstance(store, FolderStore):
        _refuse(
            f"{store.name} evicts by itself: set maxmemory and an allkeys- policy there; "
            "--max-size is for folders"
        )


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMGT]|[KMGT]i)B?", text)
    if found is None:
        raise typer.BadParameter(f"--max-size {text!r} is not a size; write 500GB, 1.5TB or 200GiB")
    return int(float(found[1]) * SIZES[found[2]])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None:
        raise typer.BadParameter(f"--older-than {text!r} is not an age; write 30m, 12h, 7d or 2w")
    return int(found[1]) * UNITS[found[2]]


def _show(store: RecordStore, choice: Choice, chosen: Names) -> str:
    """Print the fingerprints of the chosen records and add their names to ``chosen``.

    Returns:
        Their size and place, as text.
    """

    def added(verdicts: Iterator[AuditResult]) -> Iterator[AuditResult]:
        for verdict in verdicts:
            chosen.add(verdict.entry.where)
            yield verdict

    with progress(False) as show:
        rows = summarise(added(choice.of(store, show)))
    if rows:
        print_rows(store, rows)
    size = size_text(sum(row.bytes for row in rows))
    return f"{len(chosen)} records ({size}) in {store.name}"


def _delete(store: RecordStore, chosen: Names) -> int:
    console = Console(stderr=True)
    with live_line(console, "Deleting", disable=not console.is_terminal) as say:

        def shown() -> Iterator[str]:
            for number, where in enumerate(chosen, 1):
                say(f"{number} of {len(chosen)} records")
                yield where

        return store.delete(shown())


def _agreed(what: str) -> bool:
    """Ask whether to delete ``what``.

    Raises:
        typer.Abort: the answer is no.
        typer.Exit: 2, with a message: there is no terminal.
    """
    if not sys.stdin.isatty():
        _refuse(f"There is no terminal to ask on whether to delete {what}; add --yes")
    return typer.confirm(f"Delete {what}?", abort=True)


def _refuse(why: str) -> None:
    typer.echo(printable(f"Nothing was deleted. {why}."), err=True)
    raise typer.Exit(2)
