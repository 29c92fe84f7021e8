# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.user_bench: what ``lmcache-hybrid bench`` prints for the demo's model."""

import os
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.figures import page_of, read, replace
from lmcache_hybrid.tools.bench.report import print_table
from lmcache_hybrid.tools.bench.run import Measured

FAMILY = "qwen3_next"
# As a user writes them, see docs/performance.md.
MODEL, FLAGS = "demo/model", ("--max-model-len", "8192")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0,1"}
COLUMNS = 100


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/bench.json"),
    render_only: Annotated[bool, typer.Option(help="Only write the page's screen.")] = False,
) -> None:
    """Run the command on the demo's model, and show what it prints on the page."""
    if not render_only:
        measure(out.absolute())
    shown = screen(read(out))
    page = page_of(out, "performance.md")
    if page.exists():
        replace(page, "bench", shown)
    print(shown)


def measure(out: Path) -> None:
    """Run the command in a folder of its own."""
    from lmcache_hybrid.tools.tiny_models import make_model

    with tempfile.TemporaryDirectory() as folder:
        make_model(FAMILY, Path(folder) / MODEL)
        command = Path(sys.executable).with_name("lmcache-hybrid")
        subprocess.run(
            [command, "bench", MODEL, "--out", out, "--", *FLAGS],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            check=True,
        )


def screen(figures: dict[str, Any]) -> str:
    """What the command printed, as a block of Markdown."""
    console = Console(file=StringIO(), width=COLUMNS, highlight=False)
    print_table(console, [Measured(**each) for each in figures["rounds"]])
    assert isinstance(console.file, StringIO)
    return f"```\n{console.file.getvalue()}```"


if __name__ == "__main__":
    typer.run(main)
