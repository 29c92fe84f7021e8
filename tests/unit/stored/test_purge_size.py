# SPDX-License-Identifier: Apache-2.0
"""``purge --max-size`` on folders that LMCache filled."""

import os
import time

import pytest

from ..store_box import KEYS, MODEL
from .commands import FINGERPRINT_HEX, run, store_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
folders = pytest.mark.parametrize("kind", ["disk", "fs"])
OTHER = bytes(16)


def left(filled) -> list:
    return [key for key in KEYS if filled.path(key).exists()]


def size_of(filled) -> int:
    return sum(file.stat().st_size for file in filled.folder.iterdir())


def used(filled, keys, hours: float) -> None:
    """Have records look as if they were last used so long ago, all at one time."""
    then = time.time() - 3600 * hours
    for key in keys:
        os.utime(filled.path(key), (then, then))


def kilobytes(size: float) -> str:
    return f"{size / 1000:.6f}kB"


@folders
def test_the_least_recently_used_go(box, kind):
    filled = box(kind).write()
    size = size_of(filled)
    used(filled, KEYS, 1)
    used(filled, KEYS[2:3], 3)
    used(filled, KEYS[:1], 2)
    purge = ["purge", store_of(filled), "--yes", "--max-size"]
    assert "Nothing to delete" in run(*purge, kilobytes(size))
    assert "Would delete 1 records" in run(*purge, kilobytes(size - 1), "--dry-run")
    assert left(filled) == KEYS
    assert "Deleted 1 of 1" in run(*purge, kilobytes(size - 1))
    assert left(filled) == [KEYS[0], KEYS[1], KEYS[3]]
    assert "Deleted 1 of 1" in run(*purge, kilobytes(0.51 * size))
    assert left(filled) == [KEYS[1], KEYS[3]]
    # Used in the same minute, the state goes first.
    assert "Deleted 1 of 1" in run(*purge, kilobytes(0.3 * size))
    assert left(filled) == [KEYS[1]]
    assert "Deleted 1 of 1" in run(*purge, "0GB")
    assert left(filled) == []


def test_with_other_conditions_no_more_goes_than_meets_all(box):
    filled = box("fs").write()
    other = box("fs", fingerprint=OTHER).write()
    half = size_of(filled) / 2
    used(filled, KEYS, 0)
    used(other, KEYS, 2)
    purge = ["purge", store_of(filled), "--yes", "--max-size"]
    # The folder's size counts everything, what goes only those that meet the condition.
    assert "Nothing to delete" in run(*purge, kilobytes(2 * half), "--fingerprint", FINGERPRINT_HEX)
    assert "Nothing to delete" in run(*purge, "0GB", "--older-than", "3h")
    assert "Deleted 2 of 2" in run(*purge, kilobytes(1.5 * half), "--older-than", "1h")
    assert left(filled) == KEYS and left(other) == KEYS[:2]
    assert "Deleted 2 of 2" in run(*purge, kilobytes(half), "--fingerprint", FINGERPRINT_HEX)
    assert left(filled) == left(other) == KEYS[:2]
    assert "Deleted 4 of 4" in run(*purge, "0GB", "--model", MODEL)


def test_foreign_files_neither_count_nor_go_and_what_is_being_written_stays(box):
    filled = box("fs").write()
    size = size_of(filled)
    foreign, writing = filled.folder / "notes.txt", filled.path(KEYS[0]).with_suffix(".tmp")
    foreign.write_bytes(bytes(10**6))
    purge = ["purge", store_of(filled), "--yes", "--max-size"]
    assert "Nothing to delete" in run(*purge, kilobytes(size))
    writing.write_bytes(b"half")
    run(*purge, "0GB")
    assert set(filled.folder.iterdir()) == {foreign, writing}


def test_redis_is_told_its_limit_itself(box):
    filled = box("redis").write()
    told = run("purge", store_of(filled), "--yes", "--max-size", "1GB", exit_code=2)
    assert "Nothing was deleted" in told and "maxmemory" in told
    assert list(filled.store.locate(KEYS)) == KEYS


@pytest.mark.parametrize(
    "size",
    ["", " ", "500", "GB", "1.GB", "-1GB", "1PB", "1e3GB", "nanGB", "1 000GB", "9999999999GB"],
)
def test_refuses_what_is_no_size(tmp_path, size):
    assert run("purge", str(tmp_path), "--max-size", size, "--yes", exit_code=2).strip()


@pytest.mark.parametrize(
    "text, expected",
    [("500GB", 5 * 10**11), ("1.5T", 15 * 10**11), ("2 GiB", 2 << 30), ("3kB", 3000)],
)
def test_sizes(text, expected):
    from lmcache_hybrid.tools.cli.purge import _bytes

    assert _bytes(text) == expected
