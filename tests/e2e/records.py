# SPDX-License-Identifier: Apache-2.0
"""Damage to the bytes of a record, and the shelves on which a store keeps its records.

Only the fault itself is put in; vLLM, LMCache and this package run as they are.
"""

import random
import struct
from pathlib import Path
from typing import Protocol

import xxhash

from lmcache_hybrid.storage import record_format
from tests.bucket import Bucket


def is_state(record: Path) -> bool:
    """By the group's label in the record's name; every family has a state group 0 or 1."""
    return "%s0-" in record.name or "%s1-" in record.name


def flipped(data: bytes, at: int = -1) -> bytes:
    """Flip one bit."""
    broken = bytearray(data)
    broken[at] ^= 1
    return bytes(broken)


def flipped_in_header(data: bytes) -> bytes:
    return flipped(data, 20)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def foreign(data: bytes) -> bytes:
    """Random bytes of the same length."""
    return random.Random(0).randbytes(len(data))


def of_another_version(data: bytes) -> bytes:
    """A valid header of the next record version."""
    fields = bytearray(data[: record_format._FIELDS.size])
    struct.pack_into("<H", fields, len(record_format.MAGIC), record_format.VERSION + 1)
    checksum = record_format._CHECKSUM.pack(xxhash.xxh3_64_intdigest(bytes(fields)))
    return bytes(fields) + checksum + data[len(fields) + len(checksum) :]


class Shelf(Protocol):
    """Reads and writes a store's records behind LMCache's back.

    Names hold the record's label: ``%s0-`` for the state of group 0, ``%a2-`` for
    the attention pages of group 2.
    """

    def names(self) -> set[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class RamShelf:
    """LMCache's hot cache, inside the engine. A shorter value is filled up with zeros."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def names(self) -> set[str]:
        return set(self._engine.call("fault", name="records"))

    def read(self, name: str) -> bytes:
        return bytes.fromhex(self._engine.call("fault", name="read", record=name))

    def write(self, name: str, data: bytes) -> None:
        self._engine.call("fault", name="write", record=name, data=data.hex())

    def remove(self, name: str) -> None:
        self._engine.call("fault", name="remove", record=name)


class DiskShelf:
    """The files of ``local_disk``."""

    suffix = ".pt"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> set[str]:
        return {file.name for file in self.folder.glob(f"*{self.suffix}")}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class FolderShelf(DiskShelf):
    """The files of ``fs://``; LMCache writes a few bytes of its own before each record."""

    suffix = ".data"

    def read(self, name: str) -> bytes:
        return super().read(name)[self._own(name) :]

    def write(self, name: str, data: bytes) -> None:
        super().write(name, super().read(name)[: self._own(name)] + data)

    def _own(self, name: str) -> int:
        return super().read(name).index(record_format.MAGIC)


class RedisShelf:
    """The values in a Redis server; LMCache keeps a second one with each record's size."""

    def __init__(self, client) -> None:
        self.client = client

    def names(self) -> set[str]:
        return {key.decode().removesuffix("kv_bytes") for key in self.client.keys("*kv_bytes")}

    def read(self, name: str) -> bytes:
        return self.client.get(name + "kv_bytes")

    def write(self, name: str, data: bytes) -> None:
        self.client.set(name + "kv_bytes", data)

    def remove(self, name: str) -> None:
        self.client.delete(name + "kv_bytes", name + "metadata")


class BucketShelf:
    """The objects of a bucket, one for each record."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def names(self) -> set[str]:
        return set(self._bucket.names())

    def read(self, name: str) -> bytes:
        return self._bucket.read(name)

    def write(self, name: str, data: bytes) -> None:
        self._bucket.write(name, data)

    def remove(self, name: str) -> None:
        self._bucket.remove(name)
