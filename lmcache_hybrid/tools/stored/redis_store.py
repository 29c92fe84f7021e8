# SPDX-License-Identifier: Apache-2.0
"""Records in Redis, each the value of ``KEYkv_bytes``.

Keys are listed with SCAN and a pattern and read in pipelines, so nothing here blocks a server for
longer than a page of keys takes.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO

import redis

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.core.errors import StoreError
from lmcache_hybrid.storage.key_names import VALUE, parse_key, printable
from lmcache_hybrid.storage.record_format import HEADER_BYTES
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

    Holds only one page of keys in memory.
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
        """Keep our reads from counting as uses, which would change the eviction order."""
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
            for names in self._pages():
                for entry in self._described(names):
                    ours += 1
                    yield entry
            self.foreign = max(0, self._keys() - ours)

    def _keys(self) -> int:
        if isinstance(self._client, redis.RedisCluster):
            return self._client.dbsize(target_nodes=redis.RedisCluster.PRIMARIES)
        return self._client.dbsize()

    def _pages(self) -> Iterator[list[str]]:
        """Yield pages of our keys' names without VALUE.

        SCAN may return a key twice while a server resizes its table, when its number of keys
        doubles or shrinks to an eighth meanwhile. Then it counts twice.
        """
        for keys in pages(self._client.scan_iter(PATTERN + VALUE, PAGE)):
            names = (key.decode("utf-8", "surrogateescape").removesuffix(VALUE) for key in keys)
            yield [name for name in dict.fromkeys(names) if parse_key(name)]

    def _described(self, names: list[str]) -> Iterator[Entry]:
        answers = self._ask(
            command
            for name in names
            for command in (
                # First, because the others may count as a use.
                ("OBJECT", "IDLETIME", _bytes(name + VALUE)),
                ("EXISTS", _bytes(name + VALUE)),
                ("STRLEN", _bytes(name + VALUE)),
                ("GETRANGE", _bytes(name + VALUE), 0, HEADER_BYTES - 1),
            )
        )
        for name, (idle, *others) in zip(names, answers_of(answers, 4)):
            there, size, head = map(self._string, others)
            if None in (size, head) or not there:
                continue  # not strings: not ours; or gone by now
            key = parse_key(name)
            assert key is not None
            age = None if isinstance(idle, Exception) or idle is None else float(idle)
            yield Entry(key, name, size, size, age, head, None)

    @contextmanager
    def open(self, entry: Entry) -> Iterator[BinaryIO]:
        # In one piece: an engine may rewrite the key between two reads.
        with self._answers():
            value = self._client.get(_bytes(entry.where + VALUE))
        if value is None:
            raise FileNotFoundError(entry.where)
        yield io.BytesIO(value)

    def delete(self, wheres: Iterable[str]) -> int:
        return sum(self._delete(page) for page in pages(wheres))

    def _delete(self, page: list[str]) -> int:
        # One command each: in a cluster they lie on different nodes.
        with self._answers():
            removed = self._ask(("UNLINK", _bytes(where + VALUE)) for where in page)
        for answer in removed:
            if isinstance(answer, Exception):
                raise StoreError(
                    f"{self.name} does not delete ({printable(str(answer))}); allow UNLINK."
                )
        return sum(map(bool, removed))

    def close(self) -> None:
        self._client.close()

    def _string(self, answer: Any) -> Any:
        """Return an answer about a string; None if the value is not a string.

        Raises:
            StoreError: the server refuses, so nothing is known of its records.
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
    """Yield PAGE items at a time."""
    rest = iter(items)
    while page := list(islice(rest, PAGE)):
        yield page


def answers_of(answers: list[Any], count: int) -> Iterator[tuple]:
    """Yield the answers of a pipeline, ``count`` for each key."""
    return zip(*[iter(answers)] * count)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
