# SPDX-License-Identifier: Apache-2.0
"""A real mistake that somebody could make here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One planted mistake.

    Attributes:
        name: what goes wrong.
        edits: (file, text that must occur exactly once, its replacement).
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]


def one(name: str, file: str, old: str, new: str) -> Defect:
    """A mistake of one edit."""
    return Defect(name, ((file, old, new),))
