# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that tells a find from a death of another kind."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

# What a slip in the planted text itself would raise, and what only says that something
# did not end: neither shows that a test looks at what the defect breaks.
NO_FIND = (NameError, SyntaxError, ImportError, TimeoutError)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and the parts of groups."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        current = left.pop()
        if current is None or any(current is each for each in seen):
            continue
        seen.append(current)
        yield current
        left += [current.__cause__, None if current.__suppress_context__ else current.__context__]
        left += getattr(current, "exceptions", ())


def is_find(error: BaseException) -> bool:
    """Whether a test that ended with ``error`` has found something."""
    if isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout"):
        return False
    if isinstance(error, NO_FIND):
        return False
    return not any(isinstance(each, (NameError, SyntaxError)) for each in chain(error))


class Watch:
    """Ends the session at the first find; other failures are noted and the rest goes on.

    Attributes:
        found: ID of the test that found something, "" if none did.
        other: "test: reason" of each failure that is no find.
        files: seconds of the tests of each file.
    """

    def __init__(self) -> None:
        self.found = ""
        self.other: list[str] = []
        self.files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]] += report.duration

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the time limits of single tests: the configured one holds for all."""
        for item in items:
            for node in item.listchain():
                node.own_markers[:] = [m for m in node.own_markers if m.name != "timeout"]

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        error = call.excinfo.value if call.excinfo else None
        if isinstance(report, pytest.TestReport) and error is not None and is_find(error):
            if not self.found:
                self.found = node.nodeid
            node.session.shouldstop = "found"
        else:
            self.other.append(f"{node.nodeid}: {type(error).__name__}")
