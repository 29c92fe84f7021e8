# SPDX-License-Identifier: Apache-2.0
"""What vLLM answers by itself, once per family."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from golden import Golden, record_golden  # noqa: E402

FAMILIES = ("qwen3_next", "granite4", "falcon_h1", "lfm2")


@pytest.fixture(
    scope="module",
    params=FAMILIES,
)
def golden(request: pytest.FixtureRequest, model_dir: Path) -> Golden:
    return record_golden(request.param, model_dir)
