# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid`` on the command line."""

import typer

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
def version() -> None:
    """Print the versions of this package, vLLM and LMCache, and whether they fit."""
    from lmcache_hybrid.upstream import versions

    vllm, lmcache = (found or "not installed" for found in versions.found())
    print(f"lmcache-hybrid {__version__}, vLLM {vllm}, LMCache {lmcache}")
    problem = versions.unsupported() or versions.changed()
    if problem is not None:
        print(problem)
        raise typer.Exit(1)
