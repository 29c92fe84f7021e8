# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.recipes: write what `lmcache-hybrid plan` says into docs/recipes.md."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import replace
from benchmarks.recipes import report


def main(
    page: Annotated[Path, typer.Option(help="Page to write into.")] = Path("docs/recipes.md"),
) -> None:
    """Compute the recipes anew; nothing is measured."""
    replace(page, "recipes", report.recipes())


if __name__ == "__main__":
    typer.run(main)
