# SPDX-License-Identifier: Apache-2.0
"""A start deletes the prompts that earlier versions kept in the clear beside the records."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_hybrid import connector
from lmcache_hybrid.storage.disk.files import OLD_PROMPTS

from .helpers import STATE_SPEC, engine_config
from .lmcache_settings import lmcache_config
from .test_vllm_patch import FULL, cache_config


@pytest.fixture
def start(monkeypatch):
    """Starts the scheduler side of an engine with these folders, without its ranks."""

    def scheduler_of(*folders: Path):
        disk = ", ".join(map(str, folders))
        config = lmcache_config(local_disk=disk or None, max_local_disk_size=1)
        monkeypatch.setattr(connector, "load_lmcache_config", lambda *_, **__: config)
        asking = SimpleNamespace(ask=0, contents=0, drop=0, keep=0)
        monkeypatch.setattr(connector, "LookupClient", lambda *args: asking)
        monkeypatch.setattr(connector.HybridConnector, "_start_lmcache", lambda *args: None)
        groups = cache_config(FULL, STATE_SPEC)
        made = connector.HybridConnector(engine_config("lfm2"), KVConnectorRole.SCHEDULER, groups)
        made._queue.close()
        return made.scheduler

    return scheduler_of


def test_each_folder_loses_its_prompts_and_nothing_else(start, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir(mode=0o700)
        for name in (*OLD_PROMPTS, "record.pt"):
            (folder / name).write_bytes(b"tokens")
    assert start() is not None  # without local_disk
    assert start(*folders) is not None
    left = [sorted(each.name for each in folder.iterdir()) for folder in folders]
    assert left == [["record.pt"]] * 2


def test_no_link_is_followed_and_no_start_fails(start, tmp_path, hybrid_log):
    folder, target = tmp_path / "a", tmp_path / "somebody's"
    folder.mkdir(mode=0o700)
    target.write_bytes(b"text")
    (folder / OLD_PROMPTS[0]).mkdir()  # cannot be deleted as a file
    (folder / OLD_PROMPTS[1]).symlink_to(target)
    assert start(folder) is not None
    assert target.read_bytes() == b"text"
    assert [each.name for each in folder.iterdir()] == [OLD_PROMPTS[0]]
    assert f"{folder}/{OLD_PROMPTS[0]} holds prompts in the clear" in hybrid_log.text
