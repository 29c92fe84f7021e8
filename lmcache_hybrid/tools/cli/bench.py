# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench``: the benchmarks of a checkout, which a wheel leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import typer

ROOT = Path(__file__).parents[3]
# Modules of benchmarks/.
BENCHMARKS = {
    "performance": "Times and bandwidths beside their limits, with real engines: forty minutes.",
    "reuse": "Hit rates over eight traces of prompts, without an engine: six minutes.",
    "serve": "Servers with more or less cache, asked by vLLM's own client: twenty minutes.",
    "scale": "How a Valkey server keeps up with one engine, and with a thousand.",
    "steps": "Time of the scheduler side in each step of prompts of 3,000 and of 30,000 blocks.",
    "weights": "Start-up time that the digest of 50 GB of weights takes.",
}

bench = typer.Typer(
    help="Measure on this machine; needs a checkout with its environment (make venv).",
    no_args_is_help=True,
)


def _run(name: str, arguments: list[str]) -> None:
    """Run a benchmark with its own options; ends with its exit code.

    Raises:
        typer.Exit: always; 2 where there is no checkout.
    """
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


def _add(name: str, what: str) -> None:
    # --help, too, is the benchmark's.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @bench.command(name, help=what, context_settings=settings)
    def command(context: typer.Context) -> None:
        _run(name, context.args)


for _name, _what in BENCHMARKS.items():
    _add(_name, _what)
