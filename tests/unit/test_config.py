# SPDX-License-Identifier: Apache-2.0
import os
import stat

import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.utils.subclass_discovery import discover_subclasses
from vllm.config import KVTransferConfig

from lmcache_hybrid.config import backends, folders
from lmcache_hybrid.config import options as hybrid_config
from lmcache_hybrid.config.options import (
    STABLE_HASH,
    Options,
    check_lengths,
    load_lmcache_config,
    read_options,
    settle_lmcache_config,
)
from lmcache_hybrid.core.errors import ConfigError

from .helpers import vllm_config

BLOCK = 384

# A value that turns each refused option on.
VALUES = {
    "external_lookup_client": "mooncakestore://host:1",
    "lookup_server_worker_ids": [0],
    "hit_miss_ratio": 0.5,
    "gds_path": "/gds",
    "maru_path": "maru://host:1",
    "storage_plugins": ["mine"],
    "remote_serde": "cachegen",
}
EXTRA_VALUES = {"enable_nixl_storage": True, "save_chunk_meta": False}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Neither the caller's environment nor LMCache's one configuration per process."""
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_FORCE_SKIP_SAVE", "LMCACHE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)


def lmcache_config(**settings) -> LMCacheEngineConfig:
    config = LMCacheEngineConfig.from_defaults()
    for name, value in settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


def refusal(**settings) -> str:
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


def options(role: str = "kv_both", lmcache=None, **extra) -> Options:
    return read_options(vllm_config(transfer(role, **extra)), lmcache or lmcache_config())


# Refusals


@pytest.mark.parametrize("name", hybrid_config._REFUSED)
def test_refused_options_name_option_value_and_fix(name):
    value = VALUES.get(name, True)
    message = refusal(**{name: value})
    assert_one_sentence(message)
    assert message.startswith(f"LMCache option {name}={value!r} does not work on a hybrid model: ")
    assert any(word in message for word in ("set it to", "remove it", "use ")), "no fix"


@pytest.mark.parametrize("name", hybrid_config._REFUSED_EXTRA)
def test_refused_extra_options(name):
    message = refusal(extra_config={name: EXTRA_VALUES[name]})
    assert_one_sentence(message)
    assert f"extra_config.{name}={EXTRA_VALUES[name]!r}" in message


@pytest.mark.parametrize("name", [n for n in hybrid_config._REFUSED if n not in VALUES])
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
        {"remote_url": "redis://user:secret@host:1"},
        {"remote_url": "rediss://host:1"},
        {"remote_url": "unix:///run/redis.sock"},
        {"remote_url": "redis-cluster://user:secret@one:7000,two:7001"},
        {"remote_url": "redis-sentinel://one:26379,two:26379/service"},
        {"remote_storage_plugins": ["fs", "fs.second", "redis"]},
        {"local_cpu": False},
        {"cache_policy": "LFU"},
    ],
    ids=str,
)
def test_accepted(settings):
    config = lmcache_config(**settings)
    settle_lmcache_config(config, BLOCK)
    for name, value in settings.items():
        assert getattr(config, name) == value  # and left as it was


@pytest.mark.parametrize(
    "url, shown",
    [
        ("s3://user:secret@bucket", "s3://bucket"),
        ("lm://host:1", "lm://host:1"),
        ("infinistore://a:secret@b@host:1", "infinistore://host:1"),
        ("valkey://host:1", "valkey://host:1"),
        ("nothing", "nothing"),
    ],
)
def test_refuses_other_stores_without_telling_their_password(url, shown):
    message = refusal(remote_url=url)
    assert_one_sentence(message.replace("://", ""))
    assert f"remote_url={shown!r}" in message and "redis://" in message
    assert "secret" not in message


@pytest.mark.parametrize("scheme", backends.REASONS)
def test_refuses_other_stores_with_the_reason(scheme):
    message = refusal(remote_url=f"{scheme}://host:1")
    assert_one_sentence(message.replace("://", ""))
    assert f"hold states: {backends.REASONS[scheme]}; use one of fs://, redis://" in message


def schemes_of_lmcache() -> set[str]:
    """Every scheme and plugin type that an adapter of this LMCache answers to."""
    found = set()
    for cls in discover_subclasses(
        "lmcache.v1.storage_backend.connector",
        ConnectorAdapter,
        module_filter=lambda name: name.endswith("_adapter"),
        require_defined_in_module=False,
    ):
        # "plugin://" alone is Hugging Face's, which knows itself by the plugin's name.
        schema = cls().schema.removeprefix("plugin://").removesuffix("://") or "hfbucket"
        found.add(schema)
    return found


# Stores that one supported LMCache has and another one not, which says so itself.
NOT_IN_EACH = {"lm"}  # gone in 0.5.7


def test_every_store_of_this_lmcache_is_served_or_refused_with_a_reason():
    served = {*backends.REMOTE_SCHEMES} - {"rediss", "unix"}  # the adapter of redis
    known, here = served | backends.REASONS.keys(), schemes_of_lmcache()
    assert here <= known and known - here <= NOT_IN_EACH


@pytest.mark.parametrize("hosts", ["one", "one:7000,two", "user:secret@one:7000,two", ":1", ""])
@pytest.mark.parametrize("scheme", backends.SEVERAL_HOSTS)
def test_refuses_hosts_without_a_port(scheme, hosts):
    """LMCache logs a warning and goes on without the store."""
    message = refusal(remote_url=f"{scheme}://{hosts}")
    assert_one_sentence(message.replace("://", ""))
    assert "secret" not in message and f"write {scheme}://host:port,host:port" in message


def test_refuses_other_store_plugins():
    message = refusal(remote_storage_plugins=["fs", "mooncake.one"])
    assert_one_sentence(message)
    assert "remote_storage_plugins=['fs', 'mooncake.one']" in message and "fs, redis" in message


@pytest.mark.parametrize(
    "url", ["fs:///abs/path", "fs://localhost/abs/path", "fs:/abs", "fs://:/a"]
)
def test_refuses_fs_without_host_and_port(url):
    """LMCache then fails without a word and calls itself unhealthy."""
    message = refusal(remote_url=url)
    assert f"remote_url={url!r}" in message
    assert message.endswith("write fs://localhost:0/absolute/path.")


def test_refuses_fs_with_a_port_that_is_no_number():
    assert "remote_url" in refusal(remote_url="fs://localhost:zero/abs")


def test_fs_creates_its_folders(tmp_path):
    url = f"fs://localhost:0{tmp_path}/a,{tmp_path}/b"
    settle_lmcache_config(lmcache_config(remote_url=url), BLOCK)
    assert (tmp_path / "a").is_dir() and (tmp_path / "b").is_dir()
    assert not list(tmp_path.glob("*/*"))  # the probe is gone


@pytest.mark.parametrize("option", ["local_disk", "remote_url"])
def test_refuses_a_folder_that_cannot_be_written(option, tmp_path):
    """Below a file nobody can make a folder, not even root."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    path = f"{file}/below"
    url = f"fs://localhost:0{path}"
    value = url if option == "remote_url" else path
    message = refusal(**{option: value}, max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"{option}='{path}' cannot be written (Not a directory)" in message


def test_folders_above_are_not_made(tmp_path):
    """Where a disk is not mounted, its mount point or what is below it is not there."""
    message = refusal(local_disk=f"{tmp_path}/disk/records", max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"mount what belongs at '{tmp_path}/disk'" in message and not list(tmp_path.iterdir())


def test_a_disk_that_is_not_mounted_is_refused(tmp_path, monkeypatch):
    """Its mount point is there, an empty folder of the disk below."""
    point, table = tmp_path / "disk", tmp_path / "fstab"
    point.mkdir()
    table.write_text(
        f"# disks\n/dev/x {point} ext4 defaults 0 0\nproc /proc proc\nswap none swap\n"
    )
    monkeypatch.setattr(folders, "FSTAB", str(table))
    for path in (point, point / "records"):
        message = refusal(local_disk=str(path), max_local_disk_size=1.0)
        assert_one_sentence(message)
        assert f"is on '{point}'" in message
    assert not list(point.iterdir())
    folders.check_folder("local_disk", str(tmp_path / "disk2"))


def test_a_new_folder_is_for_this_user_alone(tmp_path):
    folders.check_folder("local_disk", str(tmp_path / "records"))
    assert stat.S_IMODE((tmp_path / "records").stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    theirs = tmp_path if tmp_path.stat().st_uid else other_users(tmp_path / "theirs")
    message = refusal(local_disk=str(theirs), max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"belongs to user {theirs.stat().st_uid}" in message


def other_users(folder):
    folder.mkdir()
    os.chown(folder, 4321, 4321)
    return folder


def test_a_folder_of_root_is_taken_and_one_of_everybody_told(tmp_path, hybrid_log):
    folders.check_folder("local_disk", str(tmp_path))
    assert not hybrid_log.records
    tmp_path.chmod(0o1777)
    folders.check_folder("local_disk", str(tmp_path))
    assert "chmod o-w" in hybrid_log.records[0].getMessage()


def test_refuses_one_bad_folder_of_several(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "file" in refusal(
        local_disk=f"{tmp_path}/good, {tmp_path}/file", max_local_disk_size=1.0
    )


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
def test_the_hash_is_stable(algorithm):
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


# Options


def test_default_options():
    assert options() == Options(
        attention_group=None,
        save=True,
        priority_limit=None,
        min_retrieve_tokens=0,
        max_tokens_per_load=0,
    )


def test_options_are_read():
    found = options(
        lmcache=lmcache_config(priority_limit=3, min_retrieve_tokens=512),
        **{"lmcache.hybrid_attention_group": "3", "lmcache.max_tokens_per_load": 4096},
    )
    assert found == Options(3, True, 3, 512, 4096)


@pytest.mark.parametrize(
    "role, save", [("kv_both", True), ("kv_producer", True), ("kv_consumer", False)]
)
def test_a_consumer_saves_nothing(role, save):
    assert options(role).save is save


def test_saving_can_be_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("LMCACHE_FORCE_SKIP_SAVE", "1")
    assert options().save is False


@pytest.mark.parametrize("key", ["lmcache.hybrid_attention_group", "lmcache.max_tokens_per_load"])
@pytest.mark.parametrize("value", ["three", "", [1], 1.5])
def test_refuses_what_is_no_whole_number(key, value):
    with pytest.raises(ConfigError) as error:
        options(**{key: value})
    assert str(error.value) == f"{key}={value!r} is not a whole number; write one."


def test_refuses_unknown_settings_of_ours():
    with pytest.raises(ConfigError, match="^lmcache.hybrid_atention_group is not a setting; the"):
        options(**{"lmcache.hybrid_atention_group": 1})


def test_the_load_failure_policy_is_a_known_setting():
    options(**{"lmcache.hybrid_load_failure_policy": "fail", "lmcache_rpc_port": 3})


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


def test_our_own_settings_do_not_reach_lmcache():
    config = load(**{"lmcache.hybrid_attention_group": 3, "chunk_size": 77})
    assert config.chunk_size == 256 and not hasattr(config, "hybrid_attention_group")


def test_a_value_that_lmcache_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="lmcache.chunk_size='many'"):
        load(**{"lmcache.chunk_size": "many"})


# Checkpoints


@pytest.mark.parametrize("tokens, nearest", [(100, 384), (600, 768), (-384, 384), (1, 384)])
def test_checkpoints_off_the_block_grid_are_refused(tokens, nearest):
    chosen = options(**{"lmcache.hybrid_checkpoint_tokens": tokens})
    with pytest.raises(ConfigError) as error:
        check_lengths(chosen, 384)
    assert_one_sentence(str(error.value))
    assert str(error.value).startswith(f"lmcache.hybrid_checkpoint_tokens={tokens} is not a multip")
    assert f"set it to {nearest}," in str(error.value)


@pytest.mark.parametrize("tokens", [0, 384, 1152])
def test_checkpoints_on_the_block_grid(tokens):
    chosen = options(**{"lmcache.hybrid_checkpoint_tokens": tokens})
    check_lengths(chosen, 384)
    assert chosen.checkpoint_tokens == tokens


def test_checkpoints_and_generated_tokens_are_off_by_default():
    assert (options().checkpoint_tokens, options().save_decode) == (0, False)
    assert options(lmcache=lmcache_config(save_decode_cache=True)).save_decode


# Lengths and times


@pytest.mark.parametrize("tokens", [1, 383])
def test_a_load_limit_below_one_block_is_refused(tokens):
    """It would switch loading off without a word."""
    chosen = options(**{"lmcache.max_tokens_per_load": tokens})
    with pytest.raises(ConfigError, match="384 or more, or to 0") as error:
        check_lengths(chosen, 384)
    assert_one_sentence(str(error.value))
    for allowed in (0, 384, 10_000):
        check_lengths(options(**{"lmcache.max_tokens_per_load": allowed}), 384)


def test_a_negative_length_is_refused():
    with pytest.raises(ConfigError, match="max_tokens_per_load=-1 is no number") as error:
        options(**{"lmcache.max_tokens_per_load": -1})
    assert_one_sentence(str(error.value))
    with pytest.raises(ConfigError, match="min_retrieve_tokens=-5 is no number"):
        options(lmcache=lmcache_config(min_retrieve_tokens=-5))


@pytest.mark.parametrize("value", ["inf", float("inf"), float("nan"), "1e999"])
def test_a_length_that_is_no_number_of_tokens_is_refused(value):
    with pytest.raises(ConfigError, match="is not a whole number"):
        options(**{"lmcache.max_tokens_per_load": value})


@pytest.mark.parametrize("name", ["lookup_timeout_ms", "blocking_timeout_secs"])
@pytest.mark.parametrize("value", [0, -3, float("nan"), None])
def test_a_deadline_that_leaves_no_time_is_refused(name, value):
    config = lmcache_config()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"{name}=.* above 0") as error:
        settle_lmcache_config(config, 384)
    assert_one_sentence(str(error.value))


def test_the_write_probe_leaves_nothing_and_shares_its_name_with_nobody(tmp_path):
    """Engines in two containers have the same process ID."""
    (tmp_path / f".lmcache-hybrid-{os.getpid()}.tmp").mkdir()
    settle_lmcache_config(lmcache_config(local_disk=str(tmp_path), max_local_disk_size=1), 384)
    assert [p.is_dir() for p in tmp_path.iterdir()] == [True]
