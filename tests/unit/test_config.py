# SPDX-License-Identifier: Apache-2.0
"""Settings of LMCache: refused ones, those that are set for it, and where they come from."""

from pathlib import Path

import pytest
import yaml
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy

from lmcache_hybrid.config import lmcache_config as hybrid_config
from lmcache_hybrid.config.lmcache_config import (
    STABLE_HASH,
    load_lmcache_config,
    settle_lmcache_config,
)
from lmcache_hybrid.config.lmcache_options import EXTRA_OPTIONS, OPTIONS
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.eviction_order import ARC, policy_for

from .helpers import vllm_config
from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, refusal, transfer

pytestmark = pytest.mark.usefixtures("no_lmcache_settings")

# A value that turns on each refused option that is no switch.
VALUES = {
    "external_lookup_client": "mooncakestore://host:1",
    "lookup_server_worker_ids": [0],
    "hit_miss_ratio": 0.5,
    "gds_path": "/gds",
    "maru_path": "maru://host:1",
    "storage_plugins": ["mine"],
    "remote_serde": "cachegen",
}
EXTRA_VALUES = {
    "audit_backend_enabled": True,
    "enable_nixl_storage": True,
    "fs_connector_relative_tmp_dir": "tmp",
    "save_chunk_meta": False,
    "fallback_policy": "cpu",
    "get_blocking_failed_threshold": 0,
    "ping_interval": 0,
    "ping_timeout": "5s",
    "waiting_time_for_recovery": -1,
    "local_cpu.pinned_align_bytes": 3000,
    "rust_raw_block.io_engine": "io_uring",
    "rust_raw_block.use_iouring": True,
    "rust_raw_block.use_uring": True,
    "shm_name": "lmcache",
}


REFUSED = [name for name, option in OPTIONS.items() if option.refused]

# Refusals


@pytest.mark.parametrize("name", REFUSED)
def test_refused_options_name_option_value_and_fix(name):
    value = VALUES.get(name, True)
    message = refusal(**{name: value})
    assert_one_sentence(message)
    assert message.startswith(f"LMCache option {name}={value!r} does not work on a hybrid model: ")
    assert any(word in message for word in ("set it to", "remove it", "use ")), "no fix"


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.moot])
def test_what_is_served_anyhow_is_switched_off_with_a_line(name, monkeypatch):
    said = []
    monkeypatch.setattr(hybrid_config.logger, "info", lambda text, *args: said.append(text % args))
    config = lmcache_config(**{name: True})
    settle_lmcache_config(config, BLOCK)
    assert getattr(config, name) is False
    assert [text for text in said if name in text and "asynchronous already" in text]


@pytest.mark.parametrize("name", EXTRA_OPTIONS)
def test_refused_extra_options_name_option_and_value(name):
    store = {"remote_url": "redis://host:6379"} if EXTRA_OPTIONS[name].unit else {}
    message = refusal(extra_config={name: EXTRA_VALUES[name]}, **store)
    assert_one_sentence(message)
    assert f"extra_config.{name}={EXTRA_VALUES[name]!r}" in message


@pytest.mark.parametrize("name", [n for n in REFUSED if n not in VALUES])
def test_refused_options_are_switches_of_this_lmcache_that_are_off_by_default(name):
    """A name that LMCache changed would be refused no more."""
    assert getattr(lmcache_config(), name) is False


@pytest.mark.parametrize("name", VALUES)
def test_refused_values_are_options_of_this_lmcache(name):
    assert hasattr(lmcache_config(), name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"remote_serde": "naive"},
        {"remote_serde": None},
        {"extra_config": {"save_chunk_meta": True}},
        {"extra_config": {"enable_nixl_storage": False}},
        {"extra_config": {"fallback_policy": "local_cpu"}},
        {"remote_url": "redis://user:secret@host:1"},
        {"remote_url": "rediss://host:1"},
        {"remote_url": "unix:///run/redis.sock"},
        {"remote_url": "redis-cluster://user:secret@one:7000,two:7001"},
        {"remote_url": "redis-sentinel://one:26379,two:26379/service"},
        {"remote_storage_plugins": ["redis"]},
        {"local_cpu": False},
        {"cache_policy": "LFU"},
    ],
    ids=str,
)
def test_settings_that_work_are_accepted_and_left_as_they_were(settings):
    config = lmcache_config(**settings)
    settle_lmcache_config(config, BLOCK)
    for name, value in settings.items():
        assert getattr(config, name) == value  # and left as it was


@pytest.mark.parametrize("size", [0, -1, 0.0])
def test_refuses_to_work_without_memory(size):
    message = refusal(max_local_cpu_size=size)
    assert f"max_local_cpu_size={size}" in message and "set it to a few GB" in message


def test_refuses_a_disk_without_room(tmp_path):
    message = refusal(local_disk=str(tmp_path), max_local_disk_size=0.0)
    assert_one_sentence(message)
    assert "max_local_disk_size=0.0 turns local_disk off" in message


# What is set


@pytest.mark.parametrize("chosen", [256, BLOCK, 2 * BLOCK, 4 * BLOCK])
def test_chunk_size_becomes_the_block_size(chosen):
    config = lmcache_config(chunk_size=chosen)
    settle_lmcache_config(config, BLOCK)
    assert config.chunk_size == BLOCK


@pytest.mark.parametrize("chosen", [128, 192, 512, BLOCK + 1])
def test_refuses_a_chunk_size_that_cuts_blocks(chosen):
    message = refusal(chunk_size=chosen)
    assert_one_sentence(message)
    assert f"chunk_size={chosen} " in message and f"set it to {BLOCK}" in message


@pytest.mark.parametrize("algorithm", ["builtin", "sha256", STABLE_HASH])
def test_the_hash_becomes_the_stable_one_whatever_was_chosen(algorithm):
    config = lmcache_config(pre_caching_hash_algorithm=algorithm)
    settle_lmcache_config(config, BLOCK)
    assert config.pre_caching_hash_algorithm == STABLE_HASH


def test_settling_twice_changes_nothing():
    """Scheduler and worker of one process share LMCache's configuration."""
    config = lmcache_config(chunk_size=2 * BLOCK)
    settle_lmcache_config(config, BLOCK)
    first = config.to_dict()
    settle_lmcache_config(config, BLOCK)
    assert config.to_dict() == first


# LMCache's own configuration


def load(**extra) -> LMCacheEngineConfig:
    return load_lmcache_config(vllm_config(transfer(**extra)))


def test_without_any_setting_lmcaches_defaults_hold():
    config = load()
    assert config.max_local_cpu_size == 5.0 and config.local_cpu
    settle_lmcache_config(config, BLOCK)


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    path = str(tmp_path / "none.yaml")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", path)
    with pytest.raises(ConfigError) as error:
        load()
    assert_one_sentence(str(error.value).replace(".yaml", ""))
    assert f"LMCACHE_CONFIG_FILE={path!r} is not a file" in str(error.value)


def test_file_environment_and_extra_config(monkeypatch, tmp_path):
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump({"chunk_size": 64, "max_local_cpu_size": 1.0}))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    config = load(**{"lmcache.max_local_cpu_size": 2.5, "lmcache.local_cpu": "false"})
    assert (config.chunk_size, config.max_local_cpu_size, config.local_cpu) == (64, 2.5, False)


def test_an_eviction_policy_of_extra_config_is_one_that_somebody_chose():
    """It may be the default by name, see :func:`.eviction_order.policy_for`."""
    plain = LRUCachePolicy()
    assert isinstance(policy_for(plain, load()), ARC)
    assert policy_for(plain, load(**{"lmcache.cache_policy": "LRU"})) is plain


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("lmcache-*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_ready_made_files_are_taken(monkeypatch, tmp_path, file):
    """Each names its store; only the folder of ``fs://`` is another one here."""
    text = file.read_text()
    url = yaml.safe_load(text).get("remote_url") or ""
    copy = tmp_path / file.name
    copy.write_text(text.replace("/srv/", f"{tmp_path}/") if url.startswith("fs:") else text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(copy))
    config = load()
    settle_lmcache_config(config, BLOCK)
    kind = file.stem.removeprefix("lmcache-")
    found = (config.remote_url or "").split(":")[0] or ("disk" if config.local_disk else "ram")
    assert found == kind and config.chunk_size == BLOCK


def test_every_kind_of_store_has_a_ready_made_file():
    kinds = ("disk", "fs", "ram", "redis", "s3")
    assert [file.stem for file in EXAMPLES] == [f"lmcache-{kind}" for kind in kinds]


def test_our_own_settings_do_not_reach_lmcache():
    config = load(**{"lmcache.hybrid_checkpoint_tokens": 0, "another's": 77})
    assert not hasattr(config, "hybrid_checkpoint_tokens") and not hasattr(config, "another's")


def test_a_value_that_lmcache_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="lmcache.chunk_size='many'"):
        load(**{"lmcache.chunk_size": "many"})


@pytest.mark.parametrize("name", ["lookup_timeout_ms", "blocking_timeout_secs"])
@pytest.mark.parametrize("value", [0, -3, float("nan"), None])
def test_a_deadline_that_leaves_no_time_is_refused(name, value):
    config = lmcache_config()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"{name}=.* above 0") as error:
        settle_lmcache_config(config, 384)
    assert_one_sentence(str(error.value))
