# SPDX-License-Identifier: Apache-2.0
"""Errors of this package."""

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_hybrid.core.keys import RecordKey

# Numbers of an OSError where a disk, its inodes or a quota are used up.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class ConfigError(ValueError):
    """Bad configuration, found at start-up.

    Its arguments are sentences, each with a setting, its value and the fix.
    """

    def __str__(self) -> str:
        return " ".join(self.args)


class UnknownContentError(Exception):
    """It is unknown what pages would hold, so nothing may be stored or loaded.

    The message says why and what to change, as a part of a sentence.
    """


class UnknownWeightsError(UnknownContentError):
    """It is unknown which weights were loaded."""


class UnknownCodeError(UnknownContentError):
    """It is unknown which code computes a model."""


class UnknownPagesError(UnknownContentError):
    """It is unknown how pages are laid out."""


class StoreError(Exception):
    """A store cannot be opened. The message is one sentence with the fix."""


class RemovalError(Exception):
    """Records could not be removed from a backend.

    Attributes:
        backend: LMCache's name of it.
    """

    def __init__(self, backend: str, error: Exception) -> None:
        super().__init__(f"{backend}: {error!r}")
        self.backend = backend


class RecordError(Exception):
    """Stored bytes that are not the record asked for. They never reach the cache.

    Attributes:
        reason: one word for counters: ``short``, ``magic``, ``version``, ``header``,
            ``fingerprint``, ``key``, ``length``, ``checksum``, ``seal`` or ``wrapper``; seen from
            outside an engine also ``name``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    @property
    def kind(self) -> str:
        """The record's kind for counters: ``state``, ``attention``, or ``none`` where unknown."""
        return "none"


class DamagedError(RecordError):
    """The bytes stored under ``key`` are not its record."""

    def __init__(self, key: "RecordKey", error: RecordError) -> None:
        super().__init__(error.reason, error.detail)
        self.key = key

    @property
    def kind(self) -> str:
        return self.key.kind_name


class LoadError(Exception):
    """A load fails, and its tokens are computed instead. The message says why.

    Attributes:
        reason: one word for counters: ``gone``, ``unreadable``, ``unreachable``, ``no_room``,
            ``unpinned``, ``unhealthy``, ``length``, ``adapter``, ``asleep``, ``slow`` or ``error``.
        kind: of the record at fault, for counters: ``state``, ``attention`` or ``none``.
    """

    def __init__(self, message: str, reason: str = "error", key: "RecordKey | None" = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.kind = "none" if key is None else key.kind_name


class SlowError(LoadError):
    """Computing is expected to be done before the load.

    Attributes:
        seconds: estimate for the whole load; 0 if unknown.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("slower than recomputing", "slow")
        self.seconds = seconds


class UnwantedError(LoadError):
    """The load's request has ended: not counted as a failure."""


class NoRoomError(LoadError):
    """No memory to read into right now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "no_room")
