# SPDX-License-Identifier: Apache-2.0
"""What lossless compression saves, and the table of it."""

import zlib
from pathlib import Path

import pytest

from benchmarks.figures import read
from benchmarks.lossless import __main__ as lossless

ROOT = Path(__file__).parents[2]


def test_bytes_are_counted_before_and_after():
    payloads = [bytes(4000), bytes(range(256))]
    found = lossless.compressed((zlib.compress, zlib.decompress), payloads)
    assert found["bytes"] == 4256
    assert found["compressed"] == sum(len(zlib.compress(each)) for each in payloads)
    assert min(found["compress"], found["restore"]) > 0


def test_what_comes_back_changed_is_no_lossless_compression():
    with pytest.raises(AssertionError, match="not lossless"):
        lossless.compressed((zlib.compress, lambda data: b"x"), [b"y"])


def test_the_page_shows_the_file():
    figures = read(ROOT / "docs/generated/lossless.json")
    table = lossless.table(figures)
    assert table in (ROOT / "docs/design.md").read_text()
    for row in figures["rows"]:
        assert f"| {row['family']} | {row['dtype']} | {row['what']} | {row['by']} |" in table
