# SPDX-License-Identifier: Apache-2.0
"""What this package's own connectors do beyond LMCache's interface."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from lmcache_hybrid.storage.buffer import record_shape
from lmcache_hybrid.storage.folder.record_io import Fate

# LMCache's health check writes memory as it finds it: one byte says nothing of a prompt.
CHECKED_BYTES = 1


class RecordConnector(RemoteConnector):
    """A connector to a store of records; :mod:`.adapters` says which class serves which scheme.

    Attributes:
        failed: called, from any thread, with the number of records that were not written.
        written: called, from any thread, with the key of each record that was.
    """

    failed: Callable[[int], None]
    written: Callable[[CacheEngineKey], None]

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        # A store that LMCache's health monitor has switched off stays off until the monitor has
        # written and read a value of this shape and type.
        self.meta_shapes, self.meta_dtypes = [record_shape(CHECKED_BYTES)], [torch.uint8]
        self.failed = lambda records: None
        self.written = lambda key: None

    @property
    @abc.abstractmethod
    def writing(self) -> int:
        """How many values wait to be written, or are being written."""

    @abc.abstractmethod
    def existing(self, keys: Sequence[CacheEngineKey], seconds: float) -> Sequence[bool]:
        """Whether the store holds each value, in as few round trips as it can. Blocks.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """

    def fate(self, key: CacheEngineKey, largest: int, seconds: float) -> Fate:
        """Find out why a value that was promised could not be read. Blocks.

        Args:
            largest: bytes of the largest record.

        Raises:
            Exception: no answer within ``seconds``, or a failure.
        """
        return "unreadable" if self.existing([key], seconds)[0] else "gone"

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        """Values were hit; does not wait. Most stores note by themselves what is read."""

    @abc.abstractmethod
    def delete(self, key: CacheEngineKey, seconds: float) -> None:
        """Delete a value; one that is not there is no error. Blocks.

        Raises:
            Exception: the store did not delete it within ``seconds``.
        """


def unwrapped(connector: Any) -> Any:
    """The connector that does the work, without LMCache's instruments around it."""
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    return connector
