# SPDX-License-Identifier: Apache-2.0
"""Others' keys and files are left alone, and hostile names and bytes do no harm."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.utils import CacheEngineKey

from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.key_names import parse_key
from lmcache_hybrid.storage.record_format import HEADER_BYTES
from lmcache_hybrid.tools.stored.audit import Status, judge
from lmcache_hybrid.tools.stored.record_store import Entry

from ..store_box import KEYS
from .commands import HOSTILE_NAME, resealed, run, run_json, store_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# What is not ours


def test_keys_of_others_are_never_touched(box):
    filled = box("redis").write()
    name = filled.store.engine_key(KEYS[0]).to_string()
    plain = CacheEngineKey("m", 1, 0, 7, torch.uint8).to_string()
    foreign = {
        "session": b"1",
        plain + "kv_bytes": b"another model's",
        plain + "metadata": b"x",
        "x@uint8@hybrid%y kv_bytes": b"looks alike",
        name.replace("@hybrid%", "@hybrid%z") + "kv_bytes": b"looks alike",
    }
    filled.redis.mset(foreign)
    # Named like ours, but no string: LMCache writes strings only.
    filled.redis.hset(name.replace("@0@", "@7@", 1) + "kv_bytes", "field", "value")
    filled.redis.rpush(name.replace("@0@", "@8@", 1) + "metadata", "element")
    filled.redis.config_resetstat()
    result = run_json("inspect", store_of(filled))
    assert result["foreign"] == len(foreign) + 2 and result["rows"][0]["records"] == 4
    run("verify", store_of(filled), "--delete-damaged")
    run("purge", store_of(filled), "--older-than", "0s", "--yes")
    assert filled.redis.dbsize() == len(foreign) + 2
    assert filled.redis.mget(foreign) == list(foreign.values())
    used = filled.redis.info("commandstats")
    assert "cmdstat_scan" in used
    assert not {"cmdstat_keys", "cmdstat_flushdb", "cmdstat_flushall"} & used.keys()


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_files_of_others_are_never_touched(box, kind, tmp_path):
    filled = box(kind).write()
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    path = filled.path(KEYS[0])
    names = [path.name.replace("@0@", f"@{rank}@", 1) for rank in (5, 6, 7)]
    os.symlink(secret, filled.folder / names[0])
    os.mkfifo(filled.folder / names[1])
    (filled.folder / names[2]).mkdir()
    (filled.folder / "notes.txt").write_text("mine")
    (filled.folder / f"weights{path.suffix}").write_bytes(b"mine")
    result = run_json("inspect", store_of(filled))
    assert result["foreign"] == 5 and result["rows"][0]["records"] == 4
    assert run_json("verify", store_of(filled))["counts"] == {"good": 4}
    run("purge", store_of(filled), "--older-than", "0s", "--yes")
    assert len(list(filled.folder.iterdir())) == 5 and secret.read_bytes() == b"secret"


# Hostile bytes


def test_names_cannot_steer_a_terminal(tmp_path):
    evil = "\x1b]0;pwned\x07[red]\u202e"
    name = f"{evil}@1@0@ab@uint8@hybrid%a0-0123456789abcdef.pt"
    (tmp_path / name).write_bytes(b"no record" * 40)
    os.utime(tmp_path / name, (0, 0))
    for command, code in (("inspect", 0), ("verify", 1)):
        text = run(command, str(tmp_path), exit_code=code)
        assert "?]0;pwned?[red]?" in text and "\x1b" not in text and "\u202e" not in text


def test_names_that_are_no_utf8(tmp_path):
    name = b"\xff\xfe@1@0@ab@uint8@hybrid%a0-0123456789abcdef.pt"
    with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
        file.write(b"short")
    os.utime(os.path.join(os.fsencode(tmp_path), name), (0, 0))
    assert "??" in run("inspect", str(tmp_path))
    assert run_json("verify", str(tmp_path), exit_code=1)["counts"] == {"damaged": 1}
    run("verify", str(tmp_path), "--delete-damaged")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 2**64 - 1},
        {"length": 1 << 40},
        {"boundary": 2**64 - 1},
        {"kind": 255, "group": 255},
        {"length": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [HEADER_BYTES, record_format.record_bytes(8), 1 << 40])
def test_sizes_out_of_a_header_are_not_believed(tmp_path, fields, size):
    """A terabyte of nothing is neither read into memory nor counted as a record."""
    file = tmp_path / f"{HOSTILE_NAME}.pt"
    with file.open("wb") as data:
        data.write(resealed(**fields))
        data.truncate(size)
    os.utime(file, (0, 0))
    assert run_json("verify", str(tmp_path), exit_code=1)["counts"] == {"damaged": 1}
    (row,) = run_json("inspect", str(tmp_path))["rows"]
    assert row["bytes"] == size


@given(st.binary(max_size=300), st.binary(max_size=40), st.integers(0, 2**40))
def test_any_bytes_get_a_verdict(head, wrapper, size):
    key = parse_key(HOSTILE_NAME)
    for wrapped in (None, wrapper):
        entry = Entry(key, "x", size, size, 1e6, head[:HEADER_BYTES], wrapped)
        assert judge(entry).status in (Status.DAMAGED, Status.OTHER_VERSION)
