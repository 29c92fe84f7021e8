# SPDX-License-Identifier: Apache-2.0
"""Errors of this package."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_hybrid.record import RecordKey


class ConfigError(ValueError):
    """Bad configuration, found at start-up.

    The message is one sentence with the setting, its value and the fix.
    """


class StoreError(Exception):
    """A store cannot be looked into. The message is one sentence with the fix."""


class RecordError(Exception):
    """Stored bytes that are not the record asked for. They never reach the cache.

    Attributes:
        reason: one word for counters: ``short``, ``magic``, ``version``, ``header``,
            ``fingerprint``, ``key``, ``length`` or ``checksum``; seen from outside an
            engine also ``wrapper`` and ``name``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class DamagedError(RecordError):
    """The payload of a record is damaged.

    Attributes:
        key: of the record.
    """

    def __init__(self, key: "RecordKey", error: RecordError) -> None:
        super().__init__(error.reason, error.detail)
        self.key = key


class LoadError(Exception):
    """A promised load cannot be kept; the request is recomputed. Message: the reason."""


class NoRoomError(LoadError):
    """There is no memory to read into just now."""
