# SPDX-License-Identifier: Apache-2.0
"""What vLLM answers by itself, once per family, and engines on stores that tests break."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broken_store import OPENERS, Site  # noqa: E402
from golden import Golden, record_golden  # noqa: E402
from marks import slow  # noqa: E402

from lmcache_hybrid.tools.tiny_models import make_model  # noqa: E402

FAMILIES = ("qwen3_next", "granite4", "lfm2", "falcon_h1")


@pytest.fixture(
    scope="module",
    params=[*FAMILIES[:3], *slow(FAMILIES[3])],
)
def golden(request: pytest.FixtureRequest, model_dir: Path) -> Golden:
    return record_golden(request.param, model_dir)


@pytest.fixture(scope="module")
def lfm2(model_dir: Path) -> Path:
    return make_model("lfm2", model_dir / "lfm2")


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, lfm2: Path, tmp_path_factory) -> Iterator[Site]:
    """One engine for all tests of a kind of store in a file, and one kind at a time."""
    with ExitStack() as stack:
        yield OPENERS[request.param](stack, lfm2, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def site(opened: Site) -> Iterator[Site]:
    """The store that the test is for; its good prompt hits afterwards."""
    yield opened
    opened.serves(opened.good)
