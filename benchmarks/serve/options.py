# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks of servers take on the command line."""

from typing import Annotated

import typer

Arms = Annotated[str, typer.Option(help="Which arms, separated by commas.")]
Concurrency = Annotated[str, typer.Option(help="Requests in flight at most, separated by commas.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each arm, taken in turns.")]
RenderOnly = Annotated[
    bool, typer.Option("--render-only", help="Only print the tables of the JSON file.")
]
CONCURRENCY = "1,4,16"


def chosen(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Each name of a list once; ``typer.BadParameter`` for one that is not known."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"there is no {kind} {', '.join(sorted(unknown))}")
    return names
