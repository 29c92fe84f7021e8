# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        check: what was looked at, in a word or two.
        message: one sentence.
        fix: what to do; empty where nothing is to be done, or the message says it.
    """

    check: str
    status: Status
    message: str
    fix: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, Status.OK, message)


def warning(check: str, message: str, fix: str = "") -> Finding:
    return Finding(check, Status.WARNING, message, fix)


def error(check: str, message: str, fix: str = "") -> Finding:
    return Finding(check, Status.ERROR, message, fix)


def skipped(check: str, message: str, fix: str = "") -> Finding:
    return Finding(check, Status.SKIPPED, message, fix)


def one_line(failure: BaseException) -> str:
    """The message of an error as one line; of pydantic's, what the validator said."""
    errors = getattr(failure, "errors", None)
    if callable(errors):
        try:
            return errors()[0]["msg"].removeprefix("Value error, ")
        except (LookupError, TypeError):
            pass
    return " ".join(str(failure).split()) or type(failure).__name__
