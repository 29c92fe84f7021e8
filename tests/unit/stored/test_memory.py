# SPDX-License-Identifier: Apache-2.0
"""Stores of any size are looked into with the same memory."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_hybrid.core.keys import STATE
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.tools.stored import record_store, summary
from tests.marks import slow

from .commands import N, resealed, run, run_json

FEW, MANY = 500, 4000
# Less than a name, or one entry of a set.
BYTES_PER_RECORD = 30


def fill(folder: Path, start: int, stop: int) -> None:
    """State records of two groups, every second boundary with both."""
    for number in range(start, stop):
        for group in range(1 + number % 2):
            head = resealed(
                kind=STATE,
                group=group,
                boundary=N,
                length=8,
                block_hash=struct.pack(">QQ", number, number) + b"h" * 16,
            )
            name = f"m@1@0@{number:x}@uint8@hybrid%s{group}-0123456789abcdef.data"
            size = record_format.record_bytes(8)
            wrapper = struct.pack("7i", size, 1, 6, 1, 1, 1, size)
            (folder / name).write_bytes(wrapper + (head + b"p" * 8).ljust(size, b"d"))


def peak(function: Callable[[], object]) -> int:
    """Most bytes that Python objects took while it ran."""
    tracemalloc.start()
    function()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.parametrize(
    "command, code",
    [
        (["inspect"], 0),
        *slow(
            (["verify"], 1),  # every payload is damaged
            (["purge", "--older-than", "0s", "--dry-run"], 0),
            (["purge", "--damaged", "--dry-run"], 0),
            (["purge", "--max-size", "1kB", "--dry-run"], 0),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_memory_does_not_grow_with_the_records(tmp_path, monkeypatch, command, code):
    monkeypatch.setattr(summary, "SAMPLE", 100)
    monkeypatch.setattr(record_store, "IN_MEMORY_BYTES", 1000)
    fill(tmp_path, 0, FEW)
    job = lambda: run(command[0], str(tmp_path), *command[1:], exit_code=code)  # noqa: E731
    job()  # what is loaded or cached once
    before = peak(job)
    fill(tmp_path, FEW, MANY)
    assert peak(job) - before < BYTES_PER_RECORD * len(os.listdir(tmp_path))


def test_many_resumable_boundaries_are_estimated(tmp_path, monkeypatch):
    fill(tmp_path, 0, 1000)
    (row,) = run_json("inspect", str(tmp_path))["rows"]
    assert (row["records"], row["resumable"], row["estimated"]) == (1500, 500, False)
    assert row["prompts"] == 1000
    monkeypatch.setattr(summary, "SAMPLE", 400)
    (row,) = run_json("inspect", str(tmp_path))["rows"]
    assert row["estimated"] and 350 < row["resumable"] < 650
    assert f"~{row['resumable']}" in run("inspect", str(tmp_path))
