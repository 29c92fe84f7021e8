# SPDX-License-Identifier: Apache-2.0
import gc
import logging

import pytest


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
