# SPDX-License-Identifier: Apache-2.0
"""Marks for parameters of tests."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters that ``make test`` leaves out; a tuple holds one value for each argument."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow)
        for each in values
    ]
