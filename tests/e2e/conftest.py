# SPDX-License-Identifier: Apache-2.0
"""What vLLM answers by itself, once per family, and engines on stores that tests break."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.broken_store import OPENERS, Site
from tests.e2e.golden import Golden, record_golden


@pytest.fixture(scope="module")
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
