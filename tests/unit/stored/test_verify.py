# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` makes of damage, and of what an engine is writing."""

import os
import struct

import pytest

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.folder.record_files import WRAPPER_BYTES, WRITING, check_wrapper
from lmcache_hybrid.tools.stored import audit
from lmcache_hybrid.tools.stored.audit import Status
from lmcache_hybrid.tools.stored.opening import open_store

from ..store_box import KEYS, OTHER_LENGTH, SAME_LENGTH, N, outside
from .commands import FINGERPRINT_HEX, aged, aged_all, row_of, run, run_json, store_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@outside
@pytest.mark.parametrize("damage", {**SAME_LENGTH, **OTHER_LENGTH})
def test_verify_finds_what_an_engine_would_refuse(box, kind, damage):
    filled = box(kind).write()
    broken = {**SAME_LENGTH, **OTHER_LENGTH}[damage](filled.raw(KEYS[1]))
    filled.overwrite(KEYS[1], broken)
    aged_all(filled)
    result = run_json("verify", store_of(filled), exit_code=1)
    assert result["counts"] == {"good": 3, "damaged": 1}
    assert f"{int.from_bytes(KEYS[1].block_hash[:8], 'big'):x}" in result["bad"][0]["where"]
    text = run("verify", store_of(filled), exit_code=1)
    assert "3 good" in text and "1 damaged" in text
    # Payloads are not read by inspect; sizes, headers and LMCache's own header are.
    in_payload = "payload" in damage or damage == "digest bit"
    assert row_of(filled)["damaged"] == (0 if in_payload else 1)
    told = f"0/2 {FINGERPRINT_HEX}: 1 damaged" in run("inspect", store_of(filled))
    assert told is not in_payload

    assert "Deleted 1 damaged" in run("verify", store_of(filled), "--delete-damaged")
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3}
    # What is good is found by LMCache as before.
    assert list(box(kind).store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]


@outside
def test_a_record_under_anothers_name_is_damaged(box, kind):
    """Header and digests fit; but no engine would take it for what the name says."""
    keys = [RecordKey(ATTENTION, 3, bytes(range(i, i + 32)), N) for i in (0, 1)]
    filled = box(kind).write(keys)
    filled.overwrite(keys[0], filled.raw(keys[1]))
    result = run_json("verify", store_of(filled), exit_code=1)
    assert result["bad"][0]["reason"] == "name: holds another block"


def other_version(data: bytes) -> bytes:
    """As an older release left it."""
    old = bytearray(data)
    struct.pack_into("<H", old, 8, record_format.VERSION - 1)
    return bytes(old)


@outside
def test_another_version_is_not_damaged(box, kind):
    filled = box(kind).write()
    filled.overwrite(KEYS[0], other_version(filled.raw(KEYS[0])))
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3, "other version": 1}
    assert row_of(filled)["other_version"] == 1
    assert "Deleted 1 of" in run("purge", store_of(filled), "--other-version", "--yes")
    assert row_of(filled)["records"] == 3


def test_a_damaged_header_of_lmcache(box):
    """The record is whole, but LMCache would read another length of it."""
    filled = box("fs").write()
    wrong = struct.pack("7i", 77, 1, 6, 1, 1, 1, 77)
    whole = filled.path(KEYS[0]).read_bytes()
    filled.path(KEYS[0]).write_bytes(wrong + whole[WRAPPER_BYTES:])
    assert row_of(filled)["damaged"] == 1
    result = run_json("verify", store_of(filled), exit_code=1)
    assert result["bad"][0]["reason"].startswith("wrapper: LMCache's header says 77 bytes")


def test_a_hash_that_is_no_sha256(box):
    """Its header holds a digest of it, which the name does not show."""
    filled = box("fs").write([RecordKey(ATTENTION, 3, b"sixteen bytes ..", N)])
    assert run_json("verify", store_of(filled))["counts"] == {"good": 1}


# What is being written


def test_a_file_that_is_being_written(box):
    filled = box("disk").write()
    filled.overwrite(KEYS[0], filled.raw(KEYS[0])[:-5])
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3, "unfinished": 1}
    assert "1 records are being written" in run("inspect", store_of(filled))
    assert "Nothing to delete" in run("purge", store_of(filled), "--damaged")
    aged(filled, KEYS[0])
    assert run_json("verify", store_of(filled), exit_code=1)["counts"]["damaged"] == 1


def test_what_a_killed_engine_left_in_a_shared_folder(box):
    filled = box("fs").write()
    left = filled.path(KEYS[0]).with_suffix(".tmp")
    left.write_bytes(filled.path(KEYS[0]).read_bytes()[:100])
    assert row_of(filled)["unfinished"] == 1
    os.utime(left, (0, 0))
    assert row_of(filled)["damaged"] == 1
    assert "Deleted 1 of" in run("purge", store_of(filled), "--damaged", "--yes")
    assert not left.exists() and row_of(filled)["records"] == 4


def test_a_cut_value_in_redis_is_damaged(box):
    """It is written at once, so nobody is still writing it."""
    filled = box("redis").write()
    filled.overwrite(KEYS[0], filled.raw(KEYS[0])[:-1])
    assert row_of(filled)["damaged"] == 1 and row_of(filled)["unfinished"] == 0


def test_a_record_that_goes_away_is_neither_good_nor_damaged(box):
    filled = box("fs").write()
    opened = open_store(store_of(filled))
    entries = list(opened.entries())
    filled.remove(KEYS[0])
    verdicts = [audit.verify(opened, entry).status for entry in entries]
    assert sorted(verdicts) == [Status.GONE] + [Status.GOOD] * 3
    assert opened.delete(entry.where for entry in entries) == 3


def test_a_file_that_the_disk_does_not_give_back(box, monkeypatch):
    """A broken disk is told, but no reason to delete."""
    filled = box("fs").write()

    def broken(data, key, digester):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(audit, "_check_payload", broken)
    result = run_json("verify", store_of(filled), "--delete-damaged", exit_code=1)
    assert result["counts"] == {"unreadable": 4} and result["deleted"] == 0
    assert "Input/output error" in result["bad"][0]["reason"]


def test_lmcaches_own_header_is_understood(box):
    """Should LMCache change it, this fails and not the operator."""
    filled = box("fs").write(KEYS[:1])
    stored = filled.path(KEYS[0]).read_bytes()
    assert WRAPPER_BYTES == filled.metadata_bytes
    check_wrapper(stored[:WRAPPER_BYTES], len(stored) - WRAPPER_BYTES)
    with pytest.raises(RecordError, match="^wrapper"):
        check_wrapper(stored[:WRAPPER_BYTES], len(stored))


def test_verify_removes_nothing_unless_it_is_told_to(box):
    filled = box("disk").write()
    others = [filled.folder / name for name in (f"{WRITING}1.tmp", "notes.txt")]
    for path in others:
        path.write_bytes(b"x")
        os.utime(path, (1e9, 1e9))
    aged_all(filled)
    run("verify", store_of(filled))
    assert all(path.exists() for path in others)
