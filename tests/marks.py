# SPDX-License-Identifier: Apache-2.0
"""Marks for parameters of tests, and what a session has collected by them."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters that ``make test`` leaves out; a tuple holds one value for each argument."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow)
        for each in values
    ]


# Of a session: each test that was collected and whether it is slow, before any is deselected.
COLLECTED = pytest.StashKey[dict[str, bool]]()
