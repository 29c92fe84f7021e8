# SPDX-License-Identifier: Apache-2.0
"""``inspect`` on stores that LMCache itself has filled, and what it refuses to look into."""

import json

import pytest
import yaml

from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.folder.record_files import WRAPPER_BYTES
from lmcache_hybrid.storage.key_names import parse_key, readable_name

from ..store_box import KEYS, MODEL, N, outside
from .commands import FINGERPRINT_HEX, LONG_AGO, aged, row_of, run, run_json, store_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Names


@pytest.mark.parametrize("tags", [(), (("user", "a"), ("team", "b/c")), (("u", ""),)], ids=str)
def test_names_of_lmcaches_keys_are_understood(box, tags):
    key = box("ram").store.engine_key(RecordKey(STATE, 2, b"\x0f" * 32, N, tags)).to_string()
    parsed = parse_key(key)
    assert (parsed.model, parsed.world_size, parsed.rank) == (MODEL, 2, 0)
    assert (parsed.label, parsed.fingerprint) == ("s2", FINGERPRINT_HEX)
    assert parsed.tags == record_format.tags_digest(tags)
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


# What a store holds


@outside
def test_inspect_shows_what_lmcache_wrote(box, kind):
    filled = box(kind).write()
    row = row_of(filled)
    assert (row["model"], row["rank"], row["fingerprint"]) == (MODEL, "0/2", FINGERPRINT_HEX)
    assert (row["records"], row["states"], row["resumable"]) == (4, 1, 1)
    assert (row["prompts"], row["deepest"]) == (1, 3 * N)
    assert row["damaged"] == row["other_version"] == row["unfinished"] == 0
    wrapper = WRAPPER_BYTES if kind == "fs" else 0
    assert row["bytes"] == 4 * (record_format.record_bytes(1000) + wrapper)
    assert 0 <= row["youngest"] <= row["oldest"] < 60
    text = run("inspect", store_of(filled))
    assert MODEL in text and FINGERPRINT_HEX in text and "damaged" not in text
    assert ("local_disk keeps its index in memory" in text) is (kind == "disk")


@pytest.mark.parametrize("command", [("inspect",), ("purge", "--older-than", "0s", "--dry-run")])
def test_80_columns_are_enough_for_a_long_name(box, command):
    filled = box("fs", model=readable_name("Qwen/Qwen3-Next-80B-A3B-Instruct")).write()
    name, *words = command
    text = run(name, store_of(filled), *words).partition(store_of(filled))[2]
    assert "Qwen3-Next-80B-A3B-Instruct\n" in text
    table = [line for line in text.splitlines() if FINGERPRINT_HEX in line or "rank" in line]
    assert len(table) == 2 and all(len(line.rstrip()) <= 80 for line in table)
    assert table[0].split()[0] == "rank" and table[1].split()[:2] == ["0/2", FINGERPRINT_HEX]


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_models_ranks_and_layouts_have_rows_of_their_own(box, kind):
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
def test_prompts_are_counted_where_they_differ(box, kind):
    """Three prompts share their first block; two have a second one of their own."""
    keys = [RecordKey(ATTENTION, 3, bytes([9]) * 32, N)]
    keys += [RecordKey(ATTENTION, 3, bytes([i]) * 31 + b"x", 2 * N) for i in range(2)]
    # The same hash with another tag is another prompt.
    keys.append(RecordKey(ATTENTION, 3, bytes([0]) * 31 + b"x", 2 * N, (("user", "a-b/c"),)))
    row = row_of(box(kind).write(keys))
    assert (row["records"], row["prompts"], row["resumable"]) == (4, 3, 0)
    assert row["damaged"] == 0  # a slash in a tag is no damage


@outside
def test_a_boundary_is_resumable_with_the_states_of_all_groups(box, kind):
    keys = [RecordKey(STATE, group, bytes([1]) * 32, N) for group in (0, 1)]
    keys.append(RecordKey(STATE, 0, bytes([2]) * 32, 2 * N))
    row = row_of(box(kind).write(keys))
    assert (row["states"], row["resumable"]) == (3, 1)


@outside
def test_ages(box, kind):
    filled = box(kind).write()
    aged(filled, KEYS[0])
    row = row_of(filled)
    assert row["youngest"] < 60 and LONG_AGO <= row["oldest"] < LONG_AGO + 60
    assert "90 d" in run("inspect", store_of(filled))
    # Looking is no use: the server's own eviction must not be misled.
    assert row_of(filled)["oldest"] >= LONG_AGO


def test_a_configuration_names_several_stores(box, tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_REMOTE_URL", raising=False)
    redis = box("redis").write(KEYS[:2])
    disk = box("disk").write()
    file = tmp_path / "lmcache.yaml"
    settings = {"local_disk": f"file://{disk.folder}", "remote_url": store_of(redis)}
    file.write_text(yaml.safe_dump(settings))
    first, second = json.loads(run("inspect", "--lmcache-config", str(file), "--json"))
    assert [first["rows"][0]["records"], second["rows"][0]["records"]] == [4, 2]
    assert "4 good" in run("verify", "--lmcache-config", str(file))


def test_fs_urls(box):
    filled = box("fs").write()
    for url in (f"fs://localhost:0{filled.folder}", f"{filled.folder},{filled.folder}/"):
        assert run_json("inspect", url)["rows"]


# What cannot be looked into


@pytest.mark.parametrize(
    "args",
    [
        ["inspect"],
        ["inspect", ".", "--lmcache-config", "x.yaml"],
        ["inspect", "/no/such/folder"],
        ["inspect", f"/{'a' * 300}"],
        ["inspect", "s3://bucket"],
        ["inspect", "valkey://localhost:6379"],
        ["inspect", "fs://localhost:0"],
        ["inspect", "fs://[localhost/x"],
        ["verify", "--lmcache-config", "/no/such/file.yaml"],
    ],
    ids=lambda args: " ".join(args)[:60],
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


# Nothing there


@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_a_folder_above_the_records_names_it(box, kind):
    filled = box(kind).write()
    above = str(filled.folder.parent)
    hint = f"Records are in {filled.folder}: name that folder."
    text = run("inspect", above)
    assert "No records." in text and hint in text
    text = run("verify", above, exit_code=2)
    assert "no records" in text and hint in text
    assert run_json("verify", above, exit_code=2)["notes"] == [hint]
    assert hint not in run("inspect", str(filled.folder))


@outside
def test_what_holds_no_records_was_not_verified(box, kind, tmp_path):
    """A wrong name must not read as a good store."""
    filled = box(kind)
    filled.folder.mkdir(exist_ok=True) if filled.folder else None
    assert "No records." in run("inspect", store_of(filled))
    assert "no records" in run("verify", store_of(filled), exit_code=2)
    filled.write()
    assert "good" in run("verify", store_of(filled))
