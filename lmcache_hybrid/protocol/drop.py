# SPDX-License-Identifier: Apache-2.0
"""Messages of a drop: the scheduler lets every rank remove the records of a prompt."""

import math

import msgspec

from lmcache_hybrid.protocol.prefix import Prefix


class DropRequest(msgspec.Struct, frozen=True, array_like=True):
    """One call of a drop. Calls are repeated until every rank is past the last block.

    Attributes:
        prefix: of the prompt, with all its boundaries inside a block past ``start``.
        start: in tokens; records that end there or before stay.
        end: blocks of the prompt, a partly filled one included.
        step: that a rank must have begun: then all earlier saves are with its store.
        block: where to go on; None to remove nothing, and only find out whether that is possible.
        deadline: as in :class:`.lookup.LookupRequest`.
    """

    prefix: Prefix
    start: int
    end: int
    step: int
    block: int | None = None
    deadline: float = math.inf


class DropResult(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says to one call.

    Attributes:
        block: where to go on.
        removed: records that were removed, by backend.
        waits: for writes in flight; the call must be repeated.
        refusal: why nothing may be removed now; "" if it may.
        failure: why records could not be removed; "" if they could.
    """

    block: int = 0
    removed: dict[str, int] = {}
    waits: bool = False
    refusal: str = ""
    failure: str = ""
