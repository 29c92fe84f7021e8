# SPDX-License-Identifier: Apache-2.0
"""LMCache's own header around a record in ``fs://`` and Redis (``RemoteMetadata``)."""

import math
import struct

from lmcache_hybrid.core.errors import RecordError

# length, memory format, dtype, four dimensions: of one group of layers, as this package
# configures LMCache. A unit test compares it with LMCache's own.
_WRAPPER = struct.Struct("7i")
WRAPPER_BYTES = _WRAPPER.size
_KV_2LTD, _UINT8 = 1, 6


def check_wrapper(wrapper: bytes, size: int) -> None:
    """Raises RecordError when LMCache would not read a record of ``size`` bytes by it."""
    if len(wrapper) != WRAPPER_BYTES:
        raise RecordError("wrapper", f"LMCache's header has {len(wrapper)} bytes")
    length, memory_format, dtype, *shape = _WRAPPER.unpack(wrapper)
    if (memory_format, dtype) != (_KV_2LTD, _UINT8):
        raise RecordError("wrapper", "LMCache's header names another format")
    if not length == math.prod(shape) == size or min(shape) < 1:
        raise RecordError("wrapper", f"LMCache's header says {length} bytes, there are {size}")
