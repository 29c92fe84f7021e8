# SPDX-License-Identifier: Apache-2.0
"""Messages of a keep: the scheduler lets every rank evict the records of a prompt last."""

import msgspec

from lmcache_hybrid.protocol.prefix import Prefix


class KeepRequest(msgspec.Struct, frozen=True, array_like=True):
    """One call of a keep. The first finds out which backends have room, the second keeps.

    Attributes:
        prefix: of what is kept, with its last boundary where that lies inside a block.
        boundaries: in blocks; hits there are kept, as is one at the boundary inside a block.
        salt: digest of the request's cache_salt, whose share it takes; empty without one.
        seconds: from now on; 0 to keep none of its records any longer.
        share: of a backend's bytes that kept records of all salts may take.
        backends: that keep; None to keep nothing, and only find out which have room.
        number: of the keep. With 0 seconds, only what it alone keeps is kept no longer; 0 for all.
        stays: then pages of so many blocks, and a hit at this boundary in blocks, stay kept.
    """

    prefix: Prefix
    boundaries: tuple[int, ...]
    salt: bytes
    seconds: float
    share: float
    backends: tuple[str, ...] | None = None
    number: int = 0
    stays: tuple[int, int] = (0, 0)


class KeepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says to one call.

    Attributes:
        full: by each backend that evicts by this package's order, why it has no room; "" if it has.
        failure: why nothing is known of it.
    """

    full: dict[str, str] = {}
    failure: str = ""
