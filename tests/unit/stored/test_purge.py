# SPDX-License-Identifier: Apache-2.0
"""``purge`` shows what it would delete and asks; a model's name is never guessed."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_hybrid.storage.key_names import MODEL_NAME_LENGTH, readable_name
from lmcache_hybrid.tools.stored import record_store
from lmcache_hybrid.tools.stored.record_store import Names

from ..store_box import KEYS, MODEL, outside
from .commands import FINGERPRINT_HEX, aged, row_of, run, run_json, store_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ROOT = Path(__file__).parents[3]
OTHER = bytes(16)


def records(filled) -> int:
    return sum(row["records"] for row in run_json("inspect", store_of(filled))["rows"])


@outside
def test_purge_by_model_age_and_fingerprint(box, kind):
    filled = box(kind).write()
    aged(filled, KEYS[0])
    store = store_of(filled)
    for fits_none in (
        ["--model", "other"],
        ["--model", MODEL[:-1]],
        ["--older-than", "91d"],
        ["--fingerprint", "ffff"],
        ["--model", "other", "--older-than", "1s"],
        ["--model", "other", "--fingerprint", FINGERPRINT_HEX],
        ["--damaged"],
        ["--other-version"],
    ):
        assert "Nothing to delete" in run("purge", store, *fits_none, "--yes")
    assert "Would delete 1 records" in run("purge", store, "--older-than", "89d", "--dry-run")
    assert row_of(filled)["records"] == 4
    assert "Deleted 1 of 1 records" in run("purge", store, "--older-than", "12w", "-y")
    assert row_of(filled)["records"] == 3
    prefix = FINGERPRINT_HEX[:4].upper()
    where = f"some/{MODEL}"
    assert "Deleted 3" in run("purge", store, "--model", where, "--fingerprint", prefix, "--yes")
    assert run_json("inspect", store)["rows"] == []


# A name that fits several models


@outside
@pytest.mark.parametrize(
    "model", ["org1/foo", "/run1/foo", "./foo", "foo/", "/models/org1/foo/"], ids=str
)
def test_a_model_that_records_do_not_name_in_full_is_not_guessed(box, kind, model):
    """org1/foo and org2/foo have the same name in their keys."""
    filled = box(kind, model=readable_name("org1/foo")).write()
    box(kind, model=readable_name("org2/foo"), fingerprint=OTHER).write(KEYS[:2])
    for more in ([], ["--yes"], ["--dry-run"], ["--older-than", "0s", "--yes"]):
        told = run("purge", store_of(filled), "--model", model, *more, exit_code=2)
        # Both are shown, with what tells them apart.
        assert FINGERPRINT_HEX in told and "0" * 16 in told
        assert "Nothing was deleted" in told and "--fingerprint" in told
    assert records(filled) == 6
    mine = ["--model", model, "--fingerprint", FINGERPRINT_HEX]
    assert "Deleted 4 of 4" in run("purge", store_of(filled), *mine, "--yes")
    assert records(filled) == 2


def test_names_that_were_cut_are_not_guessed(box):
    long = "m" * MODEL_NAME_LENGTH
    filled = box("fs", model=readable_name(long + "-v1")).write()
    assert "may be of other models" in run(
        "purge", store_of(filled), "--model", long + "-v2", "--yes", exit_code=2
    )
    assert records(filled) == 4
    assert "Deleted 4" in run("purge", store_of(filled), "--model", long, "--yes")


def test_a_name_as_inspect_shows_it_is_every_model_of_that_name(box):
    filled = box("fs", model="foo").write()
    box("fs", model="foo", fingerprint=OTHER).write(KEYS[:2])
    box("fs", model="foo", fingerprint=bytes([255]) * 16).write(KEYS[:1])
    box("fs", model="foo2").write(KEYS[:1])
    # A tensor-parallel engine has a fingerprint for each rank.
    both = ["--fingerprint", FINGERPRINT_HEX, "--fingerprint", "0000"]
    told = run("purge", store_of(filled), "--model", "foo", *both, "--dry-run")
    assert "Would delete 6 records" in told
    assert "Deleted 7 of 7" in run("purge", store_of(filled), "--model", "foo", "--yes")
    assert records(filled) == 1


# Shown and asked


@outside
def test_what_would_go_is_shown_by_fingerprint(box, kind):
    filled = box(kind).write()
    box(kind, fingerprint=OTHER).write(KEYS[:2])
    aged(filled, KEYS[0])
    told = run("purge", store_of(filled), "--older-than", "0s", "--dry-run")
    for expected in (MODEL, FINGERPRINT_HEX, "0" * 16, "90 d", "Would delete 6 records"):
        assert expected in told
    # What does not go is not shown.
    told = run("purge", store_of(filled), "--older-than", "60d", "--dry-run")
    assert FINGERPRINT_HEX in told and "0" * 16 not in told and "Would delete 1 " in told


def test_without_a_terminal_nothing_is_deleted(box):
    filled = box("fs").write()
    # An answer that comes through a pipe is not the operator's.
    told = run("purge", store_of(filled), "--model", MODEL, answer="y\n", exit_code=2)
    assert "Nothing was deleted" in told and "--yes" in told and FINGERPRINT_HEX in told
    assert records(filled) == 4


@pytest.mark.parametrize("answer, left, code", [("n", 4, 1), ("", 4, 1), ("y", 0, 0)])
def test_on_a_terminal_it_asks(box, answer, left, code):
    filled = box("fs").write()
    ours, theirs = pty.openpty()
    program = "from lmcache_hybrid.tools.cli import app; app()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "purge", store_of(filled), "--model", MODEL],
        cwd=ROOT,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        told, _ = process.communicate()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code and "Delete 4 records" in told and FINGERPRINT_HEX in told
    assert len(list(filled.folder.iterdir())) == left


@pytest.mark.parametrize(
    "args",
    [
        ["purge", "."],
        ["purge", ".", "--yes"],
        ["purge", ".", "--older-than", "soon"],
        ["purge", ".", "--damaged", "--other-version"],
        ["purge", ".", "--damaged", "--max-size", "1GB", "--yes"],
        ["purge", ".", "--model", "", "--older-than", "7d", "--yes"],
        ["purge", ".", "--model", " ", "--yes"],
        ["purge", ".", "--model", "/", "--yes"],
        ["purge", ".", "--model", "m", "--fingerprint", "", "--yes"],
        ["purge", ".", "--fingerprint", "abc", "--yes"],
        ["purge", ".", "--fingerprint", "abcg", "--yes"],
        ["purge", ".", "--fingerprint", "abcd", "--fingerprint", "", "--yes"],
        ["purge", ".", "--model", "m", "--older-than", " ", "--yes"],
    ],
    ids=" ".join,
)
def test_usage_errors(args):
    assert run(*args, exit_code=2).strip()


def test_names_beyond_memory_come_from_a_file(monkeypatch):
    monkeypatch.setattr(record_store, "IN_MEMORY_BYTES", 100)
    given = [f"/srv/{i}\n\udcff\"@'" for i in range(50)]
    chosen = Names()
    assert not chosen
    for name in given:
        chosen.add(name)
    assert len(chosen) == 50 and list(chosen) == given == list(chosen)
    chosen.close()
