# SPDX-License-Identifier: Apache-2.0
"""What libraries log while a check runs; often the only place where they tell a reason."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Collect warnings and errors of the loggers that exist now and whose names start so.

    LMCache's loggers do not pass on what they log, so each needs an ear of its own.
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
