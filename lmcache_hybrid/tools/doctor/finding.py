# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
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
    """The message of an error as one line without a full stop; of pydantic's, each complaint."""
    errors = getattr(failure, "errors", None)
    if callable(errors):
        told = "; ".join(map(_complaint, errors()))
    else:
        told = " ".join(str(failure).split())
    return (told or type(failure).__name__).rstrip(".")


def _complaint(error: dict) -> str:
    field = ".".join(map(str, error.get("loc", ())))
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{field}: {message}" if field else message
