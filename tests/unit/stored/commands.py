# SPDX-License-Identifier: Apache-2.0
"""Runs ``inspect``, ``verify`` and ``purge``; makes records old, or hostile."""

import json
import os
import struct

import xxhash
from typer.testing import CliRunner

from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.record_format import HEADER_BYTES
from lmcache_hybrid.tools.cli import app

from ..store_box import FINGERPRINT, KEYS, Box, N

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


def resealed(**fields) -> bytes:
    """A header with a right checksum and any values, as a hostile writer would make it."""
    values = dict(
        magic=record_format.MAGIC, version=record_format.VERSION,
        kind=0, group=0, boundary=N, length=8,
        fingerprint=bytes.fromhex("0123456789abcdef") + bytes(8),
        block_hash=bytes(7) + b"\xab" + b"h" * 24,
        tags=record_format.tags_digest(()), checksum=bytes(16),
    )  # fmt: skip
    values.update(fields)
    packed = struct.pack("<8sHBBQQ16s32s16s16s", *values.values())
    whole = packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))
    return whole.ljust(HEADER_BYTES, b"\0")


HOSTILE_NAME = "m@1@0@ab@uint8@hybrid%a0-0123456789abcdef"
