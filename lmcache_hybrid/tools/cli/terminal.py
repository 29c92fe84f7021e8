# SPDX-License-Identifier: Apache-2.0
"""Shared by several commands: live progress, MODEL and vLLM's flags, a check for vLLM."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lmcache_hybrid.upstream import versions

Say = Callable[[str], None]

# Arguments of commands that start MODEL, or ask about it.
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Name or folder, as for vllm serve.", show_default=False),
]
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- VLLM FLAGS]", help="Flags of vllm serve.", show_default=False),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--lmcache-config",
        exists=True,
        dir_okay=False,
        help="LMCache's YAML; LMCACHE_CONFIG_FILE by default.",
    ),
]


# For a command with vLLM's flags: unknown options are vLLM's, with and without "--".
TAKES_VLLM_FLAGS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}


class TakesVllmFlags(typer.core.TyperCommand):
    """Takes ``-h`` only as a separate word: typer would also find it in vLLM's ``-dph``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        own = ["--help" if each == "-h" else each for each in args[:end]]
        return super().parse_args(ctx, own + args[end:])


def check_model(model: str) -> None:
    """Refuse a MODEL that cannot be one; vLLM looks up names.

    Raises:
        typer.BadParameter: a flag, or a path that does not exist.
    """
    if model.startswith("-"):
        raise typer.BadParameter(f"{model!r} is not a MODEL, which comes before vLLM's flags")
    if model.startswith(("/", "./", "../", "~")) and not os.path.exists(model):
        raise typer.BadParameter(f"MODEL {model!r} does not exist")


def check_out(out: Path | None) -> None:
    """Refuse an --out that cannot be written, before the work whose result it gets.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    if out is None:
        return
    there = os.path.lexists(out)  # exists() raises where a folder may not be read
    try:
        out.open("a").close()
    except OSError as error:
        raise typer.BadParameter(
            f"--out {str(out)!r} cannot be written ({error.strerror}); name a file in a folder "
            "that this user can write to"
        ) from None
    if not there:
        out.unlink()


def write_out(out: Path, result: Any) -> bool:
    """Write a result as JSON, after it was printed.

    Returns:
        Whether it was written; if not, a sentence on standard error says why.
    """
    text = json.dumps(result, indent=1, allow_nan=False)
    try:
        out.write_text(f"{text}\n")
    except OSError as error:
        print(
            f"--out {str(out)!r} cannot be written ({error.strerror}); the result is printed above "
            "alone.",
            file=sys.stderr,
        )
        return False
    return True


def need_host(code: int) -> None:
    """End with ``code`` and one sentence if vLLM or LMCache is not installed.

    Raises:
        typer.Exit: one is missing.
    """
    problem = versions.absent()
    if problem is not None:
        print(problem, file=sys.stderr)
        raise typer.Exit(code)


@contextmanager
def live_line(
    console: Console, text: str, *, keep: bool = False, disable: bool = False
) -> Iterator[Say]:
    """Show one line with a spinner and the time taken; yields a function that sets its text.

    Args:
        keep: leave the line on the screen at the end.
        disable: show nothing.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=not keep, disable=disable) as bar:
        task = bar.add_task(text)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def progress(console: Console) -> Iterator[Say]:
    """Yield a function that shows progress: one live line, or one line each."""
    started = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(
            f"{time.monotonic() - started:5.0f} s  {text}", markup=False, soft_wrap=True
        )
        return
    with live_line(console, "Starting") as say:
        yield say
