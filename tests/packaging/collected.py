# SPDX-License-Identifier: Apache-2.0
"""Which tests pytest finds in files, and which of them ``make test`` runs.

    python tests/packaging/collected.py tests/unit/test_lookup.py ...

Prints pytest's errors and then one line of JSON: ``{"found": [...], "run": [...]}``, both node
ids. A process of its own, because a session of pytest knows what it collected itself: one file
where one is run.
"""

import json
import sys
from pathlib import Path

import pytest

# What `make test` leaves out.
SELECTED = ("-m", "not slow")


class Look:
    """Notes what is collected, before and after pytest deselects.

    Attributes:
        found: node ids of all tests in ``files``.
        run: those that are left.
    """

    def __init__(self, files: list[str]) -> None:
        self._files = {Path(file).resolve() for file in files}
        self.found: list[str] = []
        self.run: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out other files. Given as arguments, files of several folders share a conftest."""
        return (collection_path.is_file() and collection_path not in self._files) or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.found = [item.nodeid for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.run = [item.nodeid for item in session.items]


def main(files: list[str]) -> int:
    """Print what is collected; returns pytest's exit code."""
    look = Look(files)
    options = ["--collect-only", "-qqq", "-p", "no:cacheprovider", *SELECTED]
    folders = sorted({Path(file).parts[0] for file in files})
    code = pytest.main([*options, *folders], plugins=[look])
    print(json.dumps({"found": look.found, "run": look.run}))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
