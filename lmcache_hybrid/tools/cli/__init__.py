# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid`` on the command line."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lmcache_hybrid import __version__
from lmcache_hybrid.tools.cli.accept import accept
from lmcache_hybrid.tools.cli.bench import bench
from lmcache_hybrid.tools.cli.demo import demo
from lmcache_hybrid.tools.cli.doctor import doctor
from lmcache_hybrid.tools.cli.inspect import inspect_store, verify_store
from lmcache_hybrid.tools.cli.plan import plan
from lmcache_hybrid.tools.cli.purge import purge_store
from lmcache_hybrid.tools.cli.terminal import TAKES_VLLM_FLAGS, TakesVllmFlags


def _example(words: str) -> str:
    return f"Example: lmcache-hybrid {words}"


app = typer.Typer(
    help="LMCache prefix caching for hybrid (attention + recurrent) models in vLLM.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # URLs with passwords are among them
)
WITH_FLAGS: dict[str, Any] = {"cls": TakesVllmFlags, "context_settings": TAKES_VLLM_FLAGS}
app.command(epilog=_example("demo"))(demo)
app.command(
    **WITH_FLAGS,
    epilog=_example("doctor MODEL --lmcache-config lmcache.yaml -- --tensor-parallel-size 2"),
)(doctor)
app.command(
    **WITH_FLAGS,
    epilog=_example("accept MODEL -- --tensor-parallel-size 2"),
)(accept)
app.command("inspect", epilog=_example("inspect /srv/lmcache"))(inspect_store)
app.command("verify", epilog=_example("verify redis://cache:6379"))(verify_store)
app.command("purge", epilog=_example("purge /srv/lmcache --older-than 7d"))(purge_store)
app.command(epilog=_example("plan Qwen3.6-27B --context 100k --prompts 500"))(plan)
app.command(
    **WITH_FLAGS,
    epilog=_example("bench MODEL -- --tensor-parallel-size 2"),
)(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lmcache-hybrid {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """What stands before a command."""


@app.command(epilog=_example("version --repairs"))
def version(
    repairs: Annotated[
        bool, typer.Option("--repairs", help="List what is replaced in vLLM and LMCache, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Print the versions of this package, vLLM and LMCache, and whether they fit."""
    from lmcache_hybrid.upstream import versions

    vllm, lmcache = versions.found()
    problem = versions.unsupported() or versions.changed()
    if as_json:
        found = {"lmcache-hybrid": __version__, "vllm": vllm, "lmcache": lmcache}
        print(json.dumps({**found, "problem": problem}))
    else:
        print(
            f"lmcache-hybrid {__version__}, vLLM {vllm or 'not installed'}, "
            f"LMCache {lmcache or 'not installed'}"
        )
        if repairs:
            _list_repairs(Console(highlight=False))
        if problem is not None:
            print(problem)
    if problem is not None:
        raise typer.Exit(1)


def _list_repairs(console: Console) -> None:
    """What is replaced at run time, and how to switch it off."""
    from lmcache_hybrid.tools import repairs

    def say(text: str, indent: int) -> None:
        console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    console.print("\nReplaced in vLLM, in each process of an engine:")
    for module, what in repairs.places():
        say(f"vllm_patch.{module}: {what}", 2)
    console.print("\nRepairs of bugs of vLLM and LMCache:")
    for repair in repairs.repairs():
        say(repair.name, 2)
        say(repair.does, 4)
        say(f"Remove when: {repair.remove_when}", 4)
    console.print("\nOf this package, where LMCache would use its own or none:")
    for name, what in repairs.stand_ins():
        say(name, 2)
        say(what, 4)
    console.print("\nA VLLM_PLUGINS that does not name lmcache_hybrid switches all of it off.\n")
