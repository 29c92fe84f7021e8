# SPDX-License-Identifier: Apache-2.0
"""Which tests pytest finds in files, and which of them ``make test`` runs.

    python tests/packaging/collected.py tests/unit/test_lookup.py ...

Prints one line of JSON: ``{"found": [...], "run": [...]}``, both node ids. A process of its own,
because a session of pytest knows what it collected itself, which is one file where one is run.
"""

import json
import sys

import pytest

# What `make test` leaves out.
SELECTED = ("-m", "not slow")


class Look:
    """Notes what is collected, before and after pytest deselects."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.run: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.found = [item.nodeid for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.run = [item.nodeid for item in session.items]


def main(files: list[str]) -> int:
    """Print what is collected; returns pytest's exit code."""
    look = Look()
    code = pytest.main(
        ["--collect-only", "-q", "-q", "-p", "no:cacheprovider", *SELECTED, *files], plugins=[look]
    )
    print(json.dumps({"found": look.found, "run": look.run}))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
