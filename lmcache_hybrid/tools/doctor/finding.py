# SPDX-License-Identifier: Apache-2.0
"""Findings of the checks, and the warnings that libraries log while they run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
        check: its subject, in a word or two.
        message: one sentence.
        fix: what to do; empty if nothing, or if the message says it.
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
    """Format an error as one line without a full stop; for pydantic's, each complaint."""
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


class _Ear(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split()).rstrip(".")
        if message not in self._heard:
            self._heard.append(message)


@contextmanager
def listen(*prefixes: str) -> Iterator[list[str]]:
    """Collect the warnings and errors of all present loggers whose names begin with a prefix.

    LMCache's loggers do not propagate, so each gets a handler of its own.
    """
    heard: list[str] = []
    ear = _Ear(heard)
    loggers = [
        logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith(prefixes)
    ]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(ear)
