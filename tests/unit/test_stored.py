# SPDX-License-Identifier: Apache-2.0
"""``inspect``, ``verify`` and ``purge`` on stores that LMCache itself has filled."""

import json
import os
import struct

import pytest
import torch
import xxhash
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lmcache.utils import CacheEngineKey
from typer.testing import CliRunner

from lmcache_hybrid.core.errors import RecordError
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage import record
from lmcache_hybrid.storage.key_names import parse_key, readable_name
from lmcache_hybrid.storage.record import HEADER_BYTES
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.stored import audit
from lmcache_hybrid.tools.stored.audit import Status, judge
from lmcache_hybrid.tools.stored.opening import open_store
from lmcache_hybrid.tools.stored.record_store import WRAPPER_BYTES, Entry, check_wrapper

from .test_lmcache_store import (  # noqa: F401
    FINGERPRINT,
    KEYS,
    MODEL,
    OTHER_LENGTH,
    SAME_LENGTH,
    Box,
    N,
    blocked_loops,
    box,
    flip,
    outside,
    valkey,
)

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FINGERPRINT_HEX = FINGERPRINT[:8].hex()
LONG_AGO = 90 * 86400


def run(*args: str, exit_code: int = 0, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, args, input=answer, env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def run_json(*args: str, exit_code: int = 0) -> dict:
    (only,) = json.loads(run(*args, "--json", exit_code=exit_code))
    return only


def store_of(filled: Box) -> str:
    if filled.kind == "redis":
        return filled.manager.config.remote_url
    return str(filled.folder)


def row_of(filled: Box) -> dict:
    (row,) = run_json("inspect", store_of(filled))["rows"]
    return row


def aged(filled: Box, key: RecordKey, seconds: int = LONG_AGO) -> None:
    """Make a record look old."""
    if filled.kind == "redis":
        for part in ("kv_bytes", "metadata"):
            name = filled.store.engine_key(key).to_string() + part
            if (dump := filled.redis.dump(name)) is not None:
                filled.redis.restore(name, 0, dump, replace=True, idletime=seconds)
    else:
        written = filled.path(key).stat().st_mtime - seconds
        os.utime(filled.path(key), (written, written))


def aged_all(filled: Box) -> None:
    for key in KEYS:
        aged(filled, key)


# Names


@pytest.mark.parametrize("tags", [(), (("user", "a"), ("team", "b/c")), (("u", ""),)], ids=str)
def test_names_of_lmcaches_keys_are_understood(box, tags):  # noqa: F811
    key = box("ram").store.engine_key(RecordKey(STATE, 2, b"\x0f" * 32, N, tags)).to_string()
    parsed = parse_key(key)
    assert (parsed.model, parsed.world_size, parsed.rank) == (MODEL, 2, 0)
    assert (parsed.label, parsed.fingerprint) == ("s2", FINGERPRINT_HEX)
    assert parsed.tags == record.tags_digest(tags)
    assert parsed.block_hash == int.from_bytes(b"\x0f" * 8, "big")
    assert parse_key(key.replace("/", "-")) == parsed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "m@1@0@ab@uint8",
        "m@1@0@ab@bfloat16@hybrid%a0-0123456789abcdef",
        "m@1@0@ab@uint8@tag%a0-0123456789abcdef",
        "m@1@0@ab@uint8@hybrid%a0-0123456789abcde",
        "m@1@0@ab@uint8@hybrid%x0-0123456789abcdef",
        "m@1@0@xy@uint8@hybrid%a0-0123456789abcdef",
        "@1@0@ab@uint8@hybrid%a0-0123456789abcdef",
        "m@1@0@ab@uint8@hybrid%a0-0123456789abcdef@loose",
        "m@1@0@ab@uint8@hybrid%a0-0123456789abcdef\n",
    ],
)
def test_other_names_are_not_ours(name):
    assert parse_key(name) is None


def test_a_models_readable_name():
    assert readable_name("org/Qwen3-Next@x") == "Qwen3-Next-x"
    assert len(readable_name("/models/" + "m" * 100)) == 64


# inspect


@outside
def test_inspect_shows_what_lmcache_wrote(box, kind):  # noqa: F811
    filled = box(kind).write()
    row = row_of(filled)
    assert (row["model"], row["rank"], row["fingerprint"]) == (MODEL, "0/2", FINGERPRINT_HEX)
    assert (row["records"], row["states"], row["resumable"]) == (4, 1, 1)
    assert (row["prompts"], row["deepest"]) == (1, 3 * N)
    assert row["damaged"] == row["other_version"] == row["unfinished"] == 0
    wrapper = 0 if kind == "disk" else WRAPPER_BYTES
    assert row["bytes"] == 4 * (record.record_bytes(1000) + wrapper)
    assert 0 <= row["youngest"] <= row["oldest"] < 60
    text = run("inspect", store_of(filled))
    assert MODEL in text and FINGERPRINT_HEX in text and "damaged" in text
    assert ("local_disk keeps its index in memory" in text) is (kind == "disk")


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_models_ranks_and_layouts_have_rows_of_their_own(box, kind):  # noqa: F811
    filled = box(kind).write()
    box(kind, rank=1).write(KEYS[:2])
    box(kind, fingerprint=bytes(16)).write(KEYS[:1])
    box(kind, model="other").write(KEYS[:3])
    rows = run_json("inspect", store_of(filled))["rows"]
    assert {(r["model"], r["rank"], r["fingerprint"]): r["records"] for r in rows} == {
        (MODEL, "0/2", FINGERPRINT_HEX): 4,
        (MODEL, "1/2", FINGERPRINT_HEX): 2,
        (MODEL, "0/2", "0" * 16): 1,
        ("other", "0/2", FINGERPRINT_HEX): 3,
    }


@outside
def test_prompts_are_counted_where_they_differ(box, kind):  # noqa: F811
    """Three prompts share their first block; two have a second one of their own."""
    keys = [RecordKey(ATTENTION, 3, bytes([9]) * 32, N)]
    keys += [RecordKey(ATTENTION, 3, bytes([i]) * 31 + b"x", 2 * N) for i in range(2)]
    # The same hash with another tag is another prompt.
    keys.append(RecordKey(ATTENTION, 3, bytes([0]) * 31 + b"x", 2 * N, (("user", "a-b/c"),)))
    row = row_of(box(kind).write(keys))
    assert (row["records"], row["prompts"], row["resumable"]) == (4, 3, 0)
    assert row["damaged"] == 0  # a slash in a tag is no damage


@outside
def test_a_boundary_is_resumable_with_the_states_of_all_groups(box, kind):  # noqa: F811
    keys = [RecordKey(STATE, group, bytes([1]) * 32, N) for group in (0, 1)]
    keys.append(RecordKey(STATE, 0, bytes([2]) * 32, 2 * N))
    row = row_of(box(kind).write(keys))
    assert (row["states"], row["resumable"]) == (3, 1)


@outside
def test_ages(box, kind):  # noqa: F811
    filled = box(kind).write()
    aged(filled, KEYS[0])
    row = row_of(filled)
    assert row["youngest"] < 60 and LONG_AGO <= row["oldest"] < LONG_AGO + 60
    assert "90 d" in run("inspect", store_of(filled))
    # Looking is no use: the server's own eviction must not be misled.
    assert row_of(filled)["oldest"] >= LONG_AGO


def test_a_configuration_names_several_stores(box, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.delenv("LMCACHE_REMOTE_URL", raising=False)
    redis = box("redis").write(KEYS[:2])
    disk = box("disk").write()
    file = tmp_path / "lmcache.yaml"
    settings = {"local_disk": f"file://{disk.folder}", "remote_url": store_of(redis)}
    file.write_text(yaml.safe_dump(settings))
    first, second = json.loads(run("inspect", "--lmcache-config", str(file), "--json"))
    assert [first["rows"][0]["records"], second["rows"][0]["records"]] == [4, 2]
    assert "4 good" in run("verify", "--lmcache-config", str(file))


def test_fs_urls(box):  # noqa: F811
    filled = box("fs").write()
    for url in (f"fs://localhost:0{filled.folder}", f"{filled.folder},{filled.folder}/"):
        assert run_json("inspect", url)["rows"]


# Damage


@outside
@pytest.mark.parametrize("damage", {**SAME_LENGTH, **OTHER_LENGTH})
def test_verify_finds_what_an_engine_would_refuse(box, kind, damage):  # noqa: F811
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

    assert "Deleted 1 damaged" in run("verify", store_of(filled), "--delete-damaged")
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3}
    # What is good is found by LMCache as before.
    assert list(box(kind).store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]


@outside
def test_the_largest_records_are_checked_to_their_end(box, kind):  # noqa: F811
    filled = box(kind).write(KEYS[:1], 4096)
    assert run_json("verify", store_of(filled))["counts"] == {"good": 1}
    filled.overwrite(KEYS[0], flip(HEADER_BYTES + 4095)(filled.raw(KEYS[0])))
    assert run_json("verify", store_of(filled), exit_code=1)["counts"] == {"damaged": 1}


@outside
def test_a_record_under_anothers_name_is_damaged(box, kind):  # noqa: F811
    """Header and digests fit; but no engine would take it for what the name says."""
    keys = [RecordKey(ATTENTION, 3, bytes(range(i, i + 32)), N) for i in (0, 1)]
    filled = box(kind).write(keys)
    filled.overwrite(keys[0], filled.raw(keys[1]))
    result = run_json("verify", store_of(filled), exit_code=1)
    assert result["bad"][0]["reason"] == "name: holds another block"


def other_version(data: bytes) -> bytes:
    """As an older release left it."""
    old = bytearray(data)
    struct.pack_into("<H", old, 8, record.VERSION - 1)
    return bytes(old)


@outside
def test_another_version_is_not_damaged(box, kind):  # noqa: F811
    filled = box(kind).write()
    filled.overwrite(KEYS[0], other_version(filled.raw(KEYS[0])))
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3, "other version": 1}
    assert row_of(filled)["other_version"] == 1
    assert "Deleted 1 of" in run("purge", store_of(filled), "--other-version", "--yes")
    assert row_of(filled)["records"] == 3


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_damaged_header_of_lmcache(box, kind):  # noqa: F811
    """The record is whole, but LMCache would read another length of it."""
    filled = box(kind).write()
    wrong = struct.pack("7i", 77, 1, 6, 1, 1, 1, 77)
    if kind == "redis":
        filled.redis.set(filled.store.engine_key(KEYS[0]).to_string() + "metadata", wrong)
    else:
        whole = filled.path(KEYS[0]).read_bytes()
        filled.path(KEYS[0]).write_bytes(wrong + whole[WRAPPER_BYTES:])
    assert row_of(filled)["damaged"] == 1
    result = run_json("verify", store_of(filled), exit_code=1)
    assert result["bad"][0]["reason"].startswith("wrapper: LMCache's header says 77 bytes")


def test_a_hash_that_is_no_sha256(box):  # noqa: F811
    """Its header holds a digest of it, which the name does not show."""
    filled = box("fs").write([RecordKey(ATTENTION, 3, b"sixteen bytes ..", N)])
    assert run_json("verify", store_of(filled))["counts"] == {"good": 1}


# What is being written


def test_a_file_that_is_being_written(box):  # noqa: F811
    filled = box("disk").write()
    filled.overwrite(KEYS[0], filled.raw(KEYS[0])[:-5])
    assert run_json("verify", store_of(filled))["counts"] == {"good": 3, "unfinished": 1}
    assert "1 records are being written" in run("inspect", store_of(filled))
    assert "Nothing to delete" in run("purge", store_of(filled), "--damaged")
    aged(filled, KEYS[0])
    assert run_json("verify", store_of(filled), exit_code=1)["counts"]["damaged"] == 1


def test_what_a_killed_engine_left_in_a_shared_folder(box):  # noqa: F811
    filled = box("fs").write()
    left = filled.path(KEYS[0]).with_suffix(".tmp")
    left.write_bytes(filled.path(KEYS[0]).read_bytes()[:100])
    assert row_of(filled)["unfinished"] == 1
    os.utime(left, (0, 0))
    assert row_of(filled)["damaged"] == 1
    assert "Deleted 1 of" in run("purge", store_of(filled), "--damaged", "--yes")
    assert not left.exists() and row_of(filled)["records"] == 4


@pytest.mark.parametrize("lost", ["kv_bytes", "metadata"])
def test_half_a_record_in_redis(box, lost):  # noqa: F811
    filled = box("redis").write()
    name = filled.store.engine_key(KEYS[0]).to_string()
    filled.redis.delete(name + lost)
    assert row_of(filled)["unfinished"] == 1 and row_of(filled)["records"] == 3
    aged(filled, KEYS[0])
    assert run_json("verify", store_of(filled), exit_code=1)["counts"] == {"good": 3, "damaged": 1}
    run("verify", store_of(filled), "--delete-damaged")
    assert not filled.redis.exists(name + "kv_bytes", name + "metadata")


# What cannot be looked into


@pytest.mark.parametrize(
    "args",
    [
        ["inspect"],
        ["inspect", ".", "--lmcache-config", "x.yaml"],
        ["inspect", "/no/such/folder"],
        ["inspect", "s3://bucket"],
        ["inspect", "fs://localhost:0"],
        ["inspect", "fs://[localhost/x"],
        ["verify", "--lmcache-config", "/no/such/file.yaml"],
    ],
    ids=" ".join,
)
def test_usage_errors(args):
    assert run(*args, exit_code=2).strip()


def test_ram_cannot_be_looked_into(tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_REMOTE_URL", raising=False)
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_cpu: true\n")
    assert "in RAM can only be seen by their engine" in run(
        "inspect", "--lmcache-config", str(file), exit_code=2
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@127.0.0.1:1/0?password=secret",
        # Not escaped, these signs end the host for a parser of URLs.
        "redis://user:/secret@127.0.0.1:1",
        "redis://user:#secret@127.0.0.1:1",
        "redis://:?secret@127.0.0.1:1",
    ],
)
def test_a_server_that_is_away_is_named_without_its_password(url):
    for command in ("inspect", "verify"):
        text = run(command, url, exit_code=1)
        assert "cannot be used" in text and "127.0.0.1:1" in text and "secret" not in text


# What is not ours


def test_keys_of_others_are_never_touched(box):  # noqa: F811
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
def test_files_of_others_are_never_touched(box, kind, tmp_path):  # noqa: F811
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


def resealed(**fields) -> bytes:
    """A header with a right checksum and any values, as a hostile writer would make it."""
    values = dict(
        magic=record.MAGIC, version=record.VERSION, kind=0, group=0, boundary=N, length=8,
        fingerprint=bytes.fromhex("0123456789abcdef") + bytes(8),
        block_hash=bytes(7) + b"\xab" + b"h" * 24,
        tags=record.tags_digest(()), checksum=bytes(16),
    )  # fmt: skip
    values.update(fields)
    packed = struct.pack("<8sHBBQQ16s32s16s16s", *values.values())
    whole = packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))
    return whole.ljust(HEADER_BYTES, b"\0")


HOSTILE_NAME = "m@1@0@ab@uint8@hybrid%a0-0123456789abcdef"


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
@pytest.mark.parametrize("size", [HEADER_BYTES, record.record_bytes(8), 1 << 40])
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


def test_a_record_that_goes_away_is_neither_good_nor_damaged(box):  # noqa: F811
    filled = box("fs").write()
    source = open_store(store_of(filled))
    entries = list(source.entries())
    filled.remove(KEYS[0])
    verdicts = [audit.verify(source, entry).status for entry in entries]
    assert sorted(verdicts) == [Status.GONE] + [Status.GOOD] * 3
    assert source.delete(entry.where for entry in entries) == 3


def test_a_file_that_the_disk_does_not_give_back(box, monkeypatch):  # noqa: F811
    """A broken disk is told, but no reason to delete."""
    filled = box("fs").write()

    def broken(data, key, digester):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(audit, "_check_payload", broken)
    result = run_json("verify", store_of(filled), "--delete-damaged", exit_code=1)
    assert result["counts"] == {"unreadable": 4} and result["deleted"] == 0
    assert "Input/output error" in result["bad"][0]["reason"]


def test_lmcaches_own_header_is_understood(box):  # noqa: F811
    """Should LMCache change it, this fails and not the operator."""
    filled = box("fs").write(KEYS[:1])
    stored = filled.path(KEYS[0]).read_bytes()
    assert WRAPPER_BYTES == filled.metadata_bytes
    check_wrapper(stored[:WRAPPER_BYTES], len(stored) - WRAPPER_BYTES)
    with pytest.raises(RecordError, match="^wrapper"):
        check_wrapper(stored[:WRAPPER_BYTES], len(stored))
