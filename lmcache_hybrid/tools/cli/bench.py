# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench``: the benchmarks of a checkout, which a wheel leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import typer

ROOT = Path(__file__).parents[2]
# Options, --help too, are those of the benchmark.
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

bench = typer.Typer(
    help="Measure on this machine; needs a checkout with its environment (make venv).",
    no_args_is_help=True,
)


@bench.command(context_settings=_PASSED_ON)
def performance(context: typer.Context) -> None:
    """Times and bandwidths beside their limits, with real engines: half an hour."""
    _run("performance", context.args)


@bench.command(context_settings=_PASSED_ON)
def reuse(context: typer.Context) -> None:
    """What of seven traces of prompts is hit, without an engine: three minutes."""
    _run("reuse", context.args)


@bench.command(context_settings=_PASSED_ON)
def scale(context: typer.Context) -> None:
    """What one Valkey serves of one engine, and of a thousand."""
    _run("scale", context.args)


@bench.command(context_settings=_PASSED_ON)
def weights(context: typer.Context) -> None:
    """What the identity of 50 GB of weights costs at start-up."""
    _run("weights", context.args)


def _run(name: str, arguments: list[str]) -> None:
    """Raises typer.Exit with the benchmark's exit code, 2 where there is no checkout."""
    if not (ROOT / "benchmarks" / name).is_dir():
        typer.echo(
            "The benchmarks are not part of the wheel; clone the repository, run make venv "
            f"there, and then .venv/bin/lmcache-hybrid bench {name}.",
            err=True,
        )
        raise typer.Exit(2)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    raise typer.Exit(done.returncode)
