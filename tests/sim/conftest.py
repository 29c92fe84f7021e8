# SPDX-License-Identifier: Apache-2.0
import pytest

from .engine import SimEngine, install
from .setup import Setup
from .storage import Pool, close_storage
from .warm import PROMPT


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The simulation in vLLM's place while a test runs."""
    install(monkeypatch)
    yield
    close_storage()


@pytest.fixture(params=["", "late", "random"], ids=lambda device: device or "host")
def engine(request):
    """Two ranks whose stores hold the prompt; vLLM's own cache is empty."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sas", ranks=2, answers=0, device=request.param), pool)
    engine.add("first", PROMPT, 2)
    engine.drain()
    engine.reset_prefix_cache(False)
    yield engine
    engine.heal()
    engine.holding = False
    engine.drain()
    engine.check_empty()
    pool.close()
