# SPDX-License-Identifier: Apache-2.0
"""What commands that start an engine need."""

import sys

import typer

from lmcache_hybrid.upstream import versions


def need_host(code: int) -> None:
    """End with ``code`` and one sentence where vLLM or LMCache is not installed.

    Raises:
        typer.Exit: it is not.
    """
    problem = versions.absent()
    if problem is not None:
        print(problem, file=sys.stderr)
        raise typer.Exit(code)
