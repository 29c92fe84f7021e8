# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid`` on the command line."""

from typing import Annotated

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

app = typer.Typer(
    help="LMCache prefix caching for hybrid (attention + recurrent) models in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # URLs with passwords are among them
)
app.command()(demo)
app.command()(doctor)
app.command()(accept)
app.command("inspect")(inspect_store)
app.command("verify")(verify_store)
app.command("purge")(purge_store)
app.command()(plan)
app.add_typer(bench, name="bench")


@app.command()
def version(
    repairs: Annotated[
        bool, typer.Option("--repairs", help="List what is replaced in vLLM and LMCache, and why.")
    ] = False,
) -> None:
    """Print the versions of this package, vLLM and LMCache, and whether they fit."""
    from lmcache_hybrid.upstream import versions

    vllm, lmcache = (found or "not installed" for found in versions.found())
    print(f"lmcache-hybrid {__version__}, vLLM {vllm}, LMCache {lmcache}")
    if repairs:
        _list_repairs(Console(highlight=False))
    problem = versions.unsupported() or versions.changed()
    if problem is not None:
        print(problem)
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
    console.print("\nA VLLM_PLUGINS that does not name lmcache_hybrid switches all of it off.\n")
