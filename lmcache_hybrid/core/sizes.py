# SPDX-License-Identifier: Apache-2.0
"""Sizes in binary units, which LMCache's ``*_size`` options count in as well."""

KIB, MIB, GIB, TIB = (1 << power for power in (10, 20, 30, 40))


def size_text(size: float) -> str:
    """``size`` bytes for people: ``3.8 MiB``."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} bytes"
