# SPDX-License-Identifier: Apache-2.0
"""Records sealed with a key: who can write to a store cannot write a record."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch
import xxhash
from typer.testing import CliRunner

from lmcache_hybrid.config.own_options import KEY_FILE_KEY
from lmcache_hybrid.core.digests import PLAIN, SEAL_BYTES, KeyedDigester
from lmcache_hybrid.core.errors import ConfigError, DamagedError, RecordError
from lmcache_hybrid.core.secret_files import MAX_KEY, read_key
from lmcache_hybrid.storage import lmcache_store, record_format
from lmcache_hybrid.storage.record_format import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    HEADER_BYTES,
    check,
    chunks_of,
    digests_of,
    open_record,
    payload_bytes,
    record_bytes,
    seal,
)
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker_side import make_worker

from .helpers import payload_of
from .lmcache_settings import assert_one_sentence, options
from .store_box import (  # noqa: F401
    FINGERPRINT,
    KEYS,
    SIZE,
    box,
    every_kind,
    outside,
    valkey,
)
from .stored.commands import store_of

SECRET = bytes(range(32))
MINE, OTHERS = KeyedDigester(SECRET), KeyedDigester(SECRET[::-1])
SEAL_AT = record_format._FIELDS.size + record_format._CHECKSUM.size


def sealed(payload=b"payload!", key=KEYS[0], digester=MINE) -> bytearray:
    data = bytearray(record_bytes(len(payload)))
    data[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    digests = digests_of(memoryview(payload), digester)
    seal(memoryview(data), key, FINGERPRINT, digests, digester)
    return data


def load(data: bytes, key=KEYS[0], digester=MINE) -> bytes:
    """Open a record and check its payload, as a load does."""
    view = memoryview(data)
    digests = open_record(view, key, FINGERPRINT, digester)
    payload = view[HEADER_BYTES : HEADER_BYTES + payload_bytes(len(data))]
    for number, chunk in enumerate(chunks_of(payload)):
        check(chunk, digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], digester)
    return bytes(payload)


def moved(data: bytes, key) -> bytearray:
    """A record under another key: the header rewritten as anybody can, the rest as it was."""
    own = sealed(bytes(payload_bytes(len(data))), key, PLAIN)
    forged = bytearray(data)
    forged[: record_format._FIELDS.size - 16] = own[
        : record_format._FIELDS.size - 16
    ]  # the digests stay
    fields = bytes(forged[: record_format._FIELDS.size])
    struct.pack_into("<Q", forged, record_format._FIELDS.size, xxhash.xxh3_64_intdigest(fields))
    return forged


# A record alone


def test_a_sealed_record_is_read_with_its_key_only():
    assert load(sealed()) == b"payload!"
    for wrong in (OTHERS, PLAIN):
        with pytest.raises(RecordError):
            load(sealed(), digester=wrong)


@pytest.mark.parametrize("writer", [PLAIN, OTHERS], ids=["no key", "another key"])
def test_what_others_write_is_refused(writer):
    with pytest.raises(RecordError, match="^seal"):
        load(sealed(digester=writer))


def test_a_record_cannot_be_moved_to_another_key():
    """Same payload, same digests, a header that says the other key: without a key it passes."""
    for key in KEYS[1:]:
        assert load(moved(sealed(digester=PLAIN), key), key, PLAIN) == b"payload!"
        with pytest.raises(RecordError, match="^seal"):
            load(moved(sealed(), key), key)


def test_a_seal_of_another_record_does_not_fit():
    one, two = sealed(b"payload1"), sealed(b"payload2")
    one[SEAL_AT : SEAL_AT + SEAL_BYTES] = two[SEAL_AT : SEAL_AT + SEAL_BYTES]
    with pytest.raises(RecordError, match="^seal"):
        load(one)


def test_a_payload_with_plain_digests_is_refused():
    """Header and seal are real, payload and digests are the attacker's."""
    data = sealed()
    forged = sealed(b"attacker", digester=PLAIN)
    with pytest.raises(RecordError, match="^checksum"):
        load(data[:HEADER_BYTES] + forged[HEADER_BYTES:])


def test_chunks_of_one_key_cannot_change_places():
    one, two = b"a" * CHUNK_BYTES, b"b" * CHUNK_BYTES
    data, other = sealed(one + two), sealed(two + one)
    with pytest.raises(RecordError, match="^checksum"):
        load(data[:HEADER_BYTES] + other[HEADER_BYTES:])


def test_every_flipped_bit_that_means_something_is_found():
    data = sealed()
    for bit in range(8 * len(data)):
        if SEAL_AT + SEAL_BYTES <= bit // 8 < HEADER_BYTES:
            continue
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            load(broken)


def test_one_key_per_purpose():
    """So that a digest that the store shows for one thing is of no use for another."""
    data = b"x" * 40
    assert len({MINE.chunk(data), MINE.digests(data), MINE.seal(data)[8:24]}) == 3
    assert MINE.chunk(data) != OTHERS.chunk(data) and MINE.key_id != OTHERS.key_id
    # Chunks of other records could be put together for one that needs no key.
    assert len({digester.digests(data) for digester in (MINE, OTHERS, PLAIN)}) == 3
    assert SECRET not in (MINE.key_id, MINE._chunks, MINE._digests, MINE._headers)


def test_records_of_other_keys_have_other_names():
    """Engines with and without a key, or with others, do not even look each other's records up."""
    names = {digester.name(FINGERPRINT) for digester in (MINE, OTHERS, PLAIN)}
    assert len(names) == 3 and {len(name) for name in names} == {len(FINGERPRINT)}
    assert MINE.name(FINGERPRINT) == KeyedDigester(SECRET).name(FINGERPRINT)


def test_pages_are_copied_and_checked_with_the_key():
    memory = {"a": torch.arange(3 * 8, dtype=torch.uint8).view(3, 8)}
    pages, out = GroupPages(["a"], memory), torch.empty(8, dtype=torch.uint8)
    digests = pages.gather(1, out, MINE)
    assert digests == digests_of(memoryview(out.numpy()), MINE)
    pages.scatter(2, out, digests, MINE)
    assert torch.equal(memory["a"][2], memory["a"][1])
    for call in (
        lambda: pages.check_payload(out, digests_of(memoryview(out.numpy())), MINE),
        lambda: pages.scatter(2, out, digests_of(memoryview(out.numpy())), MINE),
    ):
        with pytest.raises(RecordError, match="^checksum"):
            call()


# LMCache's own backends


@every_kind
def test_stores_read_what_they_sealed(box, kind):  # noqa: F811
    filled = box(kind, digester=MINE).write()
    assert all(filled.raw(key)[SEAL_AT : SEAL_AT + 8] == MINE.key_id for key in KEYS)
    for key, data in zip(KEYS, filled.read()):
        assert torch.equal(data, payload_of(key, SIZE))


@every_kind
@pytest.mark.parametrize("attack", ["written anew", "moved", "put under another key"])
def test_a_store_that_others_write_to_gives_no_wrong_bytes(box, kind, attack):  # noqa: F811
    """Each is a whole record of the right key and fingerprint to an engine without a key."""
    filled = box(kind, digester=MINE).write()
    if attack == "written anew":
        forged = sealed(bytes(SIZE), KEYS[1], PLAIN)
    elif attack == "moved":
        forged = moved(filled.raw(KEYS[0]), KEYS[1])
    else:
        forged = sealed(bytes(SIZE), KEYS[1], OTHERS)
    filled.overwrite(KEYS[1], bytes(forged))
    with pytest.raises(DamagedError, match="^seal"):
        filled.read()
    assert filled.store.locate([KEYS[1]]) == {}, "it would be promised and fail again"


# The key file


def key_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640], ids=oct)
def test_the_setting_names_the_key(tmp_path, mode):
    path = key_file(tmp_path, mode=mode)
    assert options(**{KEY_FILE_KEY: str(path)}).digester.key_id == MINE.key_id
    assert options().digester is PLAIN


def test_a_mounted_secret_is_a_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(key_file(tmp_path))
    assert read_key("x", str(link)) == SECRET


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660, 0o777], ids=oct)
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match="chmod 600") as error:
        options(**{KEY_FILE_KEY: str(key_file(tmp_path, mode=mode))})
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    "content", [b"", SECRET[:31], bytes(MAX_KEY + 1)], ids=["empty", "short", "long"]
)
def test_what_is_no_key_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="a key has") as error:
        options(**{KEY_FILE_KEY: str(key_file(tmp_path, content))})
    assert_one_sentence(str(error.value))
    assert content.hex() not in str(error.value) or not content


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_a_key_file_that_is_no_file_is_refused(tmp_path, what):
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError) as error:
        options(**{KEY_FILE_KEY: str(path)})
    assert_one_sentence(str(error.value))
    assert str(error.value).startswith(f"{KEY_FILE_KEY}={str(path)!r}")


# `verify`


def verified(store: str, *arguments: str) -> dict:
    result = CliRunner().invoke(app, ["verify", store, "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    (found,) = json.loads(result.stdout)
    return found


@outside
def test_verify_needs_the_key_and_deletes_nothing_without_it(box, kind, tmp_path):  # noqa: F811
    filled = box(kind, digester=MINE).write()
    where = store_of(filled)
    count = len(KEYS)
    assert verified(where, "--key-file", str(key_file(tmp_path)))["counts"] == {"good": count}
    other = str(key_file(tmp_path, SECRET[::-1]))
    for arguments in ((), ("--key-file", other)):
        found = verified(where, "--delete-damaged", *arguments)
        assert found["counts"] == {"unreadable": count} and found["deleted"] == 0
        assert MINE.key_id.hex() in found["bad"][0]["reason"]
    filled.overwrite(KEYS[1], bytes(moved(filled.raw(KEYS[0]), KEYS[1])))
    found = verified(where, "--key-file", str(key_file(tmp_path)))
    assert found["counts"] == {"good": count - 1, "damaged": 1}


@outside
def test_purge_finds_damaged_records_with_the_key(box, kind, tmp_path):  # noqa: F811
    filled = box(kind, digester=MINE).write()
    where, key = store_of(filled), str(key_file(tmp_path))
    filled.overwrite(KEYS[1], bytes(moved(filled.raw(KEYS[0]), KEYS[1])))
    purge = ["purge", where, "--damaged", "--yes"]
    assert "Nothing to delete" in CliRunner().invoke(app, purge).output
    assert "Deleted 1 of 1" in CliRunner().invoke(app, [*purge, "--key-file", key]).output
    counts = verified(where, "--key-file", key)["counts"]
    assert counts == {"good": len(KEYS) - 1}


def test_purge_takes_a_key_for_damaged_records_only(tmp_path):
    arguments = ["purge", str(tmp_path), "--older-than", "1d", "--key-file", str(tmp_path / "k")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "--damaged" in result.output


# The engine


class _Opened(Exception):
    """Ends the start-up of an engine once its store is asked for."""


def test_an_engine_opens_its_store_with_the_key(tmp_path, monkeypatch):
    def opened(
        engine, model, fingerprint, max_payload, digester=PLAIN, replicas=None, residency=None
    ):
        raise _Opened(fingerprint, digester, replicas)

    monkeypatch.setattr(lmcache_store, "LMCacheStore", opened)
    vllm_config = Namespace(model_config=Namespace(model="m"))
    own, pages = options(**{KEY_FILE_KEY: str(key_file(tmp_path))}), {0: Namespace(block_bytes=8)}
    replicas = Replicas(frozenset({3}), b"alike on all of.", 0, bytes(16))
    with pytest.raises(_Opened) as error:
        make_worker(None, vllm_config, None, pages, own, "cpu", FINGERPRINT, replicas)
    fingerprint, digester, shared = error.value.args
    assert digester.key_id == MINE.key_id
    assert fingerprint == MINE.name(FINGERPRINT)
    assert shared.fingerprint == MINE.name(replicas.fingerprint) != replicas.fingerprint


# The figures in the docs


def test_figures_on_the_page_are_the_measured_ones():
    from benchmarks.digests.__main__ import TABLE, table

    docs = Path(__file__).parents[2] / "docs"
    (said,) = TABLE.findall((docs / "security.md").read_text())
    assert said == table(json.loads((docs / "generated/digests.json").read_text()))
