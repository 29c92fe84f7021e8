# SPDX-License-Identifier: Apache-2.0
"""Configurations of LMCache and vLLM for tests of settings."""

import pytest
from lmcache.v1.config import LMCacheEngineConfig
from vllm.config import KVTransferConfig

from lmcache_hybrid.config.lmcache_config import settle_lmcache_config
from lmcache_hybrid.config.options import Options, read_options
from lmcache_hybrid.core.errors import ConfigError

from .helpers import vllm_config

BLOCK = 384


def lmcache_config(**settings) -> LMCacheEngineConfig:
    """LMCache's defaults with these settings, each of which this LMCache must know."""
    config = LMCacheEngineConfig.from_defaults()
    for name, value in settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


def refusal(**settings) -> str:
    """The message with which these settings are refused."""
    with pytest.raises(ConfigError) as error:
        settle_lmcache_config(lmcache_config(**settings), BLOCK)
    return str(error.value)


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message and message.endswith(".")
    assert ". " not in message, "more than one sentence"


def transfer(role: str = "kv_both", **extra) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="LMCacheConnectorV1", kv_role=role, kv_connector_extra_config=extra
    )


def options(role: str = "kv_both", lmcache=None, block_size: int | None = None, **extra) -> Options:
    """Read this connector's options; ``extra`` goes into kv_connector_extra_config."""
    config = vllm_config(transfer(role, **extra))
    return read_options(config, lmcache or lmcache_config(), block_size)
