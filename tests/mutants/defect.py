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


def gone(old: str) -> tuple[str, str]:
    """The text is missing."""
    return old, ""


def passes(old: str) -> tuple[str, str]:
    """Nothing is done in place of the text, which is whole lines."""
    return old, f"{_indent(old)}pass\n"


def never(old: str) -> tuple[str, str]:
    """A condition, up to its colon, never holds."""
    return old, f"{_indent(old)}if False:\n"


def always(old: str) -> tuple[str, str]:
    """A condition, up to its colon, always holds."""
    return old, f"{_indent(old)}if True:\n"


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))]
