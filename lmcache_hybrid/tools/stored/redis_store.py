# SPDX-License-Identifier: Apache-2.0
"""Values of LMCache's Redis connector: ``KEYkv_bytes`` and ``KEYmetadata``.

Keys are listed with SCAN and a pattern and asked for in pipelines, so nothing here holds
up a server for longer than a page of keys takes.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO

import redis

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.core.errors import StoreError
from lmcache_hybrid.storage.folder.record_files import WRAPPER_BYTES
from lmcache_hybrid.storage.key_names import METADATA, VALUE, parse_key, printable
from lmcache_hybrid.storage.record import HEADER_BYTES
from lmcache_hybrid.tools.stored.record_store import Entry
from lmcache_hybrid.tools.stored.redis_client import ERRORS, connect

PATTERN = "*@uint8@hybrid%*"
PAGE = 500
TOUCHED = (
    "This server has no CLIENT NO-TOUCH: looking at a record counts as its use, so the "
    "next look shows ages since this one."
)


class RedisStore:
    """Records in one Redis or Valkey database, or in all primaries of a cluster.

    Keys are never kept: what is held in memory is one page of them.
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            StoreError: the server cannot be reached, or refuses us.
        """
        self.name = printable(without_password(url))
        self.notes: list[str] = []
        self.foreign = 0
        self._client = connect(url, self._greet)

    def _greet(self, connection: Any) -> None:
        """Keep our reads from counting as uses, by which servers evict."""
        connection.send_command("CLIENT", "NO-TOUCH", "ON")
        try:
            connection.read_response()
        except redis.ResponseError:
            if TOUCHED not in self.notes:
                self.notes.append(TOUCHED)

    def entries(self) -> Iterator[Entry]:
        self.foreign = 0
        ours = 0
        with self._answers():
            for names in self._pages(VALUE):
                for entry in self._described(names):
                    ours += 1 + (entry.wrapper is not None)
                    yield entry
            for names in self._pages(METADATA):
                for entry in self._alone(names):
                    ours += 1
                    yield entry
            self.foreign = max(0, self._keys() - ours)

    def _keys(self) -> int:
        if isinstance(self._client, redis.RedisCluster):
            return self._client.dbsize(target_nodes=redis.RedisCluster.PRIMARIES)
        return self._client.dbsize()

    def _pages(self, suffix: str) -> Iterator[list[str]]:
        """Names of our keys without ``suffix``.

        SCAN may name a key twice while a server resizes its table, which it does when its
        number of keys doubles or shrinks to an eighth meanwhile. Then it is counted twice.
        """
        for keys in pages(self._client.scan_iter(PATTERN + suffix, PAGE)):
            names = (key.decode("utf-8", "surrogateescape").removesuffix(suffix) for key in keys)
            yield [name for name in dict.fromkeys(names) if parse_key(name)]

    def _described(self, names: list[str]) -> Iterator[Entry]:
        answers = self._ask(
            command
            for name in names
            for command in (
                # First, as the others may count as a use.
                ("OBJECT", "IDLETIME", _bytes(name + VALUE)),
                ("EXISTS", _bytes(name + VALUE)),
                ("STRLEN", _bytes(name + VALUE)),
                ("GETRANGE", _bytes(name + VALUE), 0, HEADER_BYTES - 1),
                ("STRLEN", _bytes(name + METADATA)),
                ("GETRANGE", _bytes(name + METADATA), 0, WRAPPER_BYTES),
            )
        )
        for name, (idle, there, size, head, extra, wrapper) in zip(names, answers_of(answers, 6)):
            answered = [self._string(answer) for answer in (there, size, head, extra, wrapper)]
            if not there or None in answered:
                continue  # gone by now, or no string: not LMCache's
            key = parse_key(name)
            assert key is not None
            yield Entry(
                key,
                name,
                size,
                size + extra,
                None if isinstance(idle, Exception) or idle is None else float(idle),
                head,
                wrapper if extra else None,
                None if extra else "a value whose metadata is missing",
            )

    def _alone(self, names: list[str]) -> Iterator[Entry]:
        """Describe metadata without a value: Redis evicted that, or somebody deleted it."""
        answers = self._ask(
            command
            for name in names
            for command in (
                ("EXISTS", _bytes(name + VALUE)),
                ("OBJECT", "IDLETIME", _bytes(name + METADATA)),
                ("STRLEN", _bytes(name + METADATA)),
            )
        )
        for name, (value, idle, size) in zip(names, answers_of(answers, 3)):
            if self._string(value) or not self._string(size):
                continue
            key = parse_key(name)
            assert key is not None
            age = None if isinstance(idle, Exception) or idle is None else float(idle)
            yield Entry(key, name, 0, size, age, b"", None, "metadata whose value is missing")

    @contextmanager
    def open(self, entry: Entry) -> Iterator[BinaryIO]:
        # In one piece: an engine may write the key anew between two reads.
        with self._answers():
            value = self._client.get(_bytes(entry.where + VALUE))
        if value is None:
            raise FileNotFoundError(entry.where)
        yield io.BytesIO(value)

    def delete(self, wheres: Iterable[str]) -> int:
        return sum(self._delete(page) for page in pages(wheres))

    def _delete(self, page: list[str]) -> int:
        # One command each: in a cluster the two may lie on different nodes.
        names = (_bytes(where + part) for where in page for part in (METADATA, VALUE))
        with self._answers():
            removed = self._ask(("UNLINK", name) for name in names)
        for answer in removed:
            if isinstance(answer, Exception):
                raise StoreError(
                    f"{self.name} does not delete ({printable(str(answer))}); allow UNLINK."
                )
        return sum(any(pair) for pair in answers_of(removed, 2))

    def close(self) -> None:
        self._client.close()

    def _string(self, answer: Any) -> Any:
        """Return an answer about a string; None where the value is no string.

        Raises:
            StoreError: the server refuses to say, so nothing is known of its records.
        """
        if not isinstance(answer, Exception):
            return answer
        if str(answer).startswith("WRONGTYPE"):
            return None
        raise StoreError(
            f"{self.name} refuses to be looked into ({printable(str(answer))}); allow EXISTS, "
            "STRLEN, GETRANGE and GET."
        )

    def _ask(self, commands: Iterable[tuple]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=False)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            raise StoreError(
                f"{self.name} stopped answering ({printable(str(error))}); try again."
            ) from error


def pages(items: Iterable[Any]) -> Iterator[list[Any]]:
    """PAGE items at a time."""
    rest = iter(items)
    while page := list(islice(rest, PAGE)):
        yield page


def answers_of(answers: list[Any], count: int) -> Iterator[tuple]:
    """The answers of a pipeline, ``count`` for each key."""
    return zip(*[iter(answers)] * count)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
