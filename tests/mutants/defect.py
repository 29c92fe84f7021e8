# SPDX-License-Identifier: Apache-2.0
"""A real mistake that somebody could make here."""

from collections.abc import Mapping
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


def each_of(mistakes: Mapping[str, Mapping[str, tuple[str, str]]]) -> tuple[Defect, ...]:
    """Mistakes of one edit each: {file: {name: (text that occurs once, its replacement)}}."""
    return tuple(
        one(name, file, *edit) for file, named in mistakes.items() for name, edit in named.items()
    )
