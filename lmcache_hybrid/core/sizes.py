# SPDX-License-Identifier: Apache-2.0
"""Sizes in binary units, which LMCache's ``*_size`` options count in as well."""

import math

KIB, MIB, GIB, TIB = (1 << power for power in (10, 20, 30, 40))


def size_text(size: float) -> str:
    """``size`` bytes for people: ``3.8 MiB``."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} bytes"


def in_gib(size: float) -> str:
    """``size`` bytes as the number of a ``*_size`` option: ``3.8``, ``0.0020``."""
    number = size / GIB
    digits = 1 - math.floor(math.log10(number)) if 0 < number < 1 else 1
    return f"{number:.{digits}f}"
