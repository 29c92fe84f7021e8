# SPDX-License-Identifier: Apache-2.0
"""Redis with a password and TLS, on real servers; and where the password may not appear."""

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import redis
import torch
from lmcache.integration.vllm import utils as lmcache_utils
from lmcache.usage_telemetry.messages import EngineMessage
from lmcache.v1.config import LMCacheEngineConfig
from typer.testing import CliRunner
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_hybrid import connector
from lmcache_hybrid.config import redis_credentials as login
from lmcache_hybrid.config.lmcache_config import load_lmcache_config, refusals
from lmcache_hybrid.config.redis_credentials import PLUGIN_URLS, connection_options, unencrypted
from lmcache_hybrid.config.stores.base import parts_of
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.storage.remote.redis_failures import cause_of_failure
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.doctor.backends import check_backends, until
from lmcache_hybrid.tools.doctor.finding import Status
from lmcache_hybrid.tools.stored.redis_client import connect
from tests.ports import free_ports
from tests.servers import Cluster, Node, Sentinels
from tests.tls import Front, make_certificate

from .helpers import STATE_SPEC, engine_config, payload_of, put
from .lmcache_settings import assert_one_sentence
from .store_box import KEYS, SIZE, Box
from .stored.commands import run, run_json
from .test_remote_stores import MANY
from .test_vllm_patch import FULL, cache_config

# What LMCache's usage statistics take from its metadata.
SENT = ("model_name", "world_size", "worker_id", "kv_dtype", "kv_shape")
PASSWORD = "n0t/in:any@log"
# Without signs that a URL of a cluster cannot have.
SIMPLE = "simple"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nothing of the machine's own, and nothing left over from a test."""
    for name in (login.USERNAME, login.PASSWORD, login.PASSWORD_FILE, login.CA_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(login, "_hidden", {})
    monkeypatch.setenv("REDIS_SERVICE_NAME", Sentinels.service)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory, certificate) -> Iterator[dict[str, SimpleNamespace]]:
    """One of each kind. Keys are only for the user ``hybrid``; others may ping and ask."""
    port, secure = free_ports(2)
    node = Node(tmp_path_factory.mktemp("one"), port)
    front = Front(secure, port, certificate)
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    safe = Cluster(tmp_path_factory.mktemp("safe"), certificate=certificate)
    sentinels = Sentinels(tmp_path_factory.mktemp("sentinels"))
    watched = Sentinels(tmp_path_factory.mktemp("watched"), certificate)
    nodes = [node, *cluster.nodes, *safe.nodes, sentinels.primary, watched.primary]
    for each in nodes:
        client = each.client
        client.acl_setuser(
            "hybrid", True, passwords=[f"+{PASSWORD}", f"+{SIMPLE}"], keys=["*"], commands=["+@all"]
        )
        client.execute_command("ACL", "SETUSER", "default", "resetkeys")
    yield {
        "one": SimpleNamespace(url=f"redis://localhost:{port}", nodes=[node], fronts=[]),
        "one with TLS": SimpleNamespace(
            url=f"rediss://localhost:{secure}", nodes=[node], fronts=[front]
        ),
        "cluster": cluster,
        "cluster with TLS": safe,
        "sentinels": SimpleNamespace(url=sentinels.url, nodes=[sentinels.primary], fronts=[]),
        "sentinels with TLS": SimpleNamespace(
            url=watched.url, nodes=[watched.primary], fronts=watched.fronts[1:]
        ),
    }
    cluster.close()
    safe.close()
    sentinels.close()
    watched.close()
    front.close()
    node.kill()


KINDS = ("one", "one with TLS", "cluster", "cluster with TLS", "sentinels", "sentinels with TLS")


@pytest.fixture
def box(servers, tmp_path):
    made: list[Box] = []

    def make(url: str) -> Box:
        made.append(Box("redis", tmp_path, None, remote_url=url))
        return made[-1]

    yield make
    for one in made:
        one.close()


def log_in(monkeypatch, tmp_path: Path, certificate: Path, kind: str) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD + "\n")
    monkeypatch.setenv(login.USERNAME, "hybrid")
    monkeypatch.setenv(login.PASSWORD_FILE, str(secret))
    if "TLS" in kind:
        monkeypatch.setenv(login.CA_FILE, str(certificate))


def written(filled: Box) -> Box:
    """What never arrives fails here as an assertion, not as a time that ran out."""
    put(filled.store, MANY, SIZE)
    assert until(lambda: all(filled.store.locate([key]) for key in MANY), 30.0)
    filled.settle()
    return filled


@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_writes_log_in(box, servers, kind, tmp_path, monkeypatch, certificate):
    log_in(monkeypatch, tmp_path, certificate, kind)
    filled = written(box(servers[kind].url))
    for key, payload in zip(MANY, filled.read(MANY), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    seen = [c for node in servers[kind].nodes for c in node.client.client_list()]
    assert "get" in {c["cmd"] for c in seen if c["user"] == "hybrid"}
    used = [node.client.info("commandstats") for node in servers[kind].nodes]
    assert all("cmdstat_set" in each for each in used)
    assert not [front.plain for front in servers[kind].fronts if front.plain]
    assert not filled.store.failed_writes
    assert connect(servers[kind].url).ping()


@pytest.mark.parametrize("kind", ["one", "cluster", "sentinels"])
def test_a_password_that_is_replaced_in_its_file_is_read_again(
    box, servers, kind, tmp_path, monkeypatch, certificate
):
    """Kubernetes replaces the file of a secret; connections that are open stay logged in."""
    log_in(monkeypatch, tmp_path, certificate, kind)
    filled = written(box(servers[kind].url))
    clients = [node.client for node in servers[kind].nodes]
    try:
        for client in clients:
            client.acl_setuser("hybrid", True, passwords=["+new", f"-{PASSWORD}"])
            client.execute_command("CLIENT", "KILL", "USER", "hybrid")
        (tmp_path / "password").write_text("new\n")
        put(filled.store, KEYS, SIZE)
        assert until(lambda: filled.store.locate([*KEYS, *MANY]).keys() == {*KEYS, *MANY}, 30.0)
    finally:
        for client in clients:
            client.acl_setuser("hybrid", True, passwords=[f"+{PASSWORD}", "-new"])


@pytest.mark.parametrize("kind", ["one", "cluster"])
def test_without_the_password_nothing_is_stored(box, servers, kind):
    filled = box(servers[kind].url)
    assert filled.store.locate(KEYS) == {}


def test_a_server_with_tls_is_not_said_to_have_none(servers):
    """What it refuses, after a login or before, is in its own words."""
    for error in (redis.ResponseError("NOPERM"), redis.AuthenticationError("WRONGPASS")):
        assert cause_of_failure(servers["one with TLS"].url, error) == ""
        assert cause_of_failure(servers["one"].url, error) == ""
    assert cause_of_failure("rediss://cache:x", ValueError("its port")) == ""
    assert cause_of_failure("unix:///run/redis.sock", redis.ConnectionError()) == ""


def test_a_server_with_another_certificate_is_not_talked_to(
    box, servers, tmp_path, monkeypatch, certificate
):
    other = tmp_path / "other"
    other.mkdir()
    log_in(monkeypatch, tmp_path, make_certificate(other), "TLS")
    assert box(servers["one with TLS"].url).store.locate(MANY) == {}


@pytest.mark.parametrize("kind", ["one with TLS", "cluster"])
def test_records_are_seen_verified_and_purged(
    box, servers, kind, tmp_path, monkeypatch, certificate
):
    log_in(monkeypatch, tmp_path, certificate, kind)
    url = servers[kind].url
    box(url).write(MANY)
    printed = run("inspect", url)
    rows = run_json("inspect", url)["rows"]
    assert sum(row["records"] for row in rows) >= len(MANY)
    printed += run("verify", url)
    printed += run("purge", url, "--older-than", "0s", "--yes")
    assert run_json("inspect", url)["rows"] == []
    assert PASSWORD not in printed
    monkeypatch.setenv(login.PASSWORD_FILE, "/nowhere")
    refused = CliRunner().invoke(app, ["inspect", url])
    assert refused.exit_code == 2 and login.PASSWORD_FILE in refused.output


def test_the_doctor_logs_in(servers, tmp_path, monkeypatch, certificate):
    log_in(monkeypatch, tmp_path, certificate, "TLS")
    config = LMCacheEngineConfig.from_defaults(
        local_cpu=False, remote_url=servers["one with TLS"].url
    )
    (told,) = check_backends(SimpleNamespace(config=config, block_size=None, model=None))
    assert (told.check, told.status) == ("remote_url", Status.OK)
    monkeypatch.setenv(login.PASSWORD_FILE, "/nowhere")
    found = list(check_backends(SimpleNamespace(config=config, block_size=None, model=None)))
    assert [each.status for each in found] == [Status.SKIPPED]


# Where it does not appear


@pytest.mark.parametrize("password", ["s3cr3t", "/s3cr3t", "/s3c+/r3t="])
def test_a_password_in_place_of_its_file_is_not_shown(password, monkeypatch):
    monkeypatch.setenv(login.PASSWORD_FILE, password)
    with pytest.raises(ConfigError) as error:
        connection_options("redis://cache:6379")
    assert str(error.value).startswith(f"{login.PASSWORD_FILE} cannot be read; name a text file")
    assert password not in "".join(traceback.format_exception(error.value))


def test_a_password_file_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(login.PASSWORD_FILE, f"{tmp_path}/password")
    with pytest.raises(ConfigError, match=f"{login.PASSWORD_FILE}='{tmp_path}/password' cannot be"):
        connection_options("redis://cache:6379")


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What LMCache and this package log, at every level."""
    lines: list[str] = []
    seen: list[logging.LogRecord] = []

    def hear(record: logging.LogRecord) -> None:
        if record not in seen:  # A record also comes to the loggers above its own.
            seen.append(record)
            lines.append(record.getMessage())

    ear = logging.Handler(logging.DEBUG)
    ear.emit = hear
    names = [n for n in logging.root.manager.loggerDict if n.startswith(("lmcache", "vllm"))]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).addHandler(ear)
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield lines
    for name in names:
        logging.getLogger(name).removeHandler(ear)
        logging.getLogger(name).setLevel(levels[name])


def load(monkeypatch, **extra):
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    transfer = KVTransferConfig(
        kv_connector="LMCacheConnectorV1", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return load_lmcache_config(SimpleNamespace(kv_transfer_config=transfer))


def test_a_password_in_the_url_works_and_is_in_no_log(box, servers, tmp_path, monkeypatch, heard):
    url = servers["one"].url.replace("//", "//hybrid:n0t%2Fin%3Aany%40log@")
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"remote_url: {url}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    config = load(monkeypatch)
    config.log_config()
    assert config.remote_url == servers["one"].url
    sent = EngineMessage.from_config(config, SimpleNamespace(**dict.fromkeys(SENT)))
    assert sent.remote_url == servers["one"].url
    filled = box(config.remote_url).write()
    assert torch.equal(filled.read()[0], payload_of(KEYS[0], SIZE))
    assert any("LMCache Configuration" in line for line in heard)
    assert any("Connection initialized" in line for line in heard)
    assert not [line for line in heard if PASSWORD in line or "n0t%2F" in line]


def test_a_password_on_the_command_line_is_warned_of(monkeypatch, heard):
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    config = load(monkeypatch, **{"lmcache.remote_url": "redis://:secret@cache:6379"})
    assert config.remote_url == "redis://cache:6379"
    (told,) = [line for line in heard if "holds a password" in line]
    assert login.PASSWORD_FILE in told and "secret" not in told
    assert not [line for line in heard if "secret" in line]


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("unix:///run/redis.sock?password=s%2Fecret", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?password=s%2Fecret&db=1", "unix:///run/redis.sock?db=1"),
        ("redis://cache:6379/1?db=2&password=s%2Fecret", "redis://cache:6379/1?db=2"),
    ],
)
def test_a_password_in_the_query_is_hidden(monkeypatch, heard, url, left):
    """redis-py takes it there, too."""
    assert redis.connection.parse_url(url)["password"] == "s/ecret"
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    config = load(monkeypatch, **{"lmcache.remote_url": url})
    config.log_config()
    assert config.remote_url == left
    assert connection_options(left) == connection_options(url) == {"password": "s/ecret"}
    assert [line for line in heard if "holds a password" in line]
    assert not [line for line in heard if "ecret" in line]


@pytest.mark.parametrize("kind", ["one", "cluster", "sentinels"])
def test_a_password_in_the_url_logs_in_everywhere(box, servers, kind, tmp_path, monkeypatch):
    url = servers[kind].url.replace("://", f"://hybrid:{SIMPLE}@")
    monkeypatch.setenv("LMCACHE_REMOTE_URL", url)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    config = load(monkeypatch)
    assert config.remote_url == servers[kind].url
    filled = written(box(config.remote_url))
    for key, payload in zip(MANY, filled.read(MANY), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    assert not filled.store.failed_writes


def test_a_password_in_a_plugins_url_is_hidden(monkeypatch, heard):
    url = "redis://:secret@cache:6379"
    config = load(monkeypatch, **{"lmcache.extra_config": {"redis_url": url}})
    assert config.extra_config["redis_url"] == "redis://cache:6379"
    assert connection_options("redis://cache:6379") == {"password": "secret"}
    assert [line for line in heard if "holds a password" in line]
    assert not [line for line in heard if "secret" in line]


@pytest.mark.parametrize("use", [parts_of, connect])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:12?x=cret@cache:6379",
        "redis://u:12?x=cret@cache:6379",
        "unix://:12/cret@/run/redis.sock",
        "unix://:12#cret@/r.sock",
    ],
)
def test_a_password_that_looks_like_a_port_or_a_path_is_told_without_it(use, url):
    with pytest.raises((ConfigError, StoreError), match="%2F") as error:
        use(url)
    assert "cret" not in str(error.value) and "12" not in str(error.value)


@pytest.mark.parametrize(
    "signs",
    ["se/cret", "se?cret", "se#cret", "se/cr@et", "se@c/ret", "se@c#ret", "12#cret", "12/@cret"],
)
@pytest.mark.parametrize("use", [parts_of, connect])
def test_a_password_with_signs_of_a_url_is_told_without_it(use, signs):
    with pytest.raises((ConfigError, StoreError), match="%2F") as error:
        use(f"redis://user:{signs}@cache:6379")
    assert "cret" not in str(error.value) and "se" not in str(error.value).split("cannot")[0]
    assert error.value.__cause__ is None or "cret" not in str(error.value.__cause__)
    assert_one_sentence(str(error.value))


# Settings


@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/redis@1.sock",
        "redis://cache:6379/0?client_name=a@b",
        "redis://:6379?client_name=a@b",
        "fs://u:p@cache:0/srv",
        "redis://user@cache:6379",
    ],
)
def test_what_is_no_password_stays_in_the_url(monkeypatch, url):
    monkeypatch.setenv(login.PASSWORD, "pw")
    config = LMCacheEngineConfig.from_defaults(remote_url=url)
    login.hide_passwords(config)
    assert config.remote_url == url and not login.holds_password(url)
    if "user" not in url:
        assert connection_options(url) == {"password": "pw"}


def test_what_is_no_url_is_shown_without_its_query():
    assert login.without_password("localhost:6379?password=pw") == "localhost:6379"


def test_a_password_in_a_variable_may_end_with_a_line(monkeypatch):
    """As of a Secret of Kubernetes that was made with echo."""
    monkeypatch.setenv(login.PASSWORD, "pw\n")
    assert connection_options("redis://cache:6379") == {"password": "pw"}


def test_the_keys_of_s3_are_used_and_not_logged():
    keys = {"aws_access_key_id": "AKIA1", "aws_secret_access_key": "ZZZ/9"}
    config = LMCacheEngineConfig.from_defaults(
        remote_url="s3://b.s3.aws.com", extra_config={**keys, "s3_region": "us-east-1"}
    )
    assert login.holds_password(config.extra_config)
    login.hide_passwords(config)
    assert "ZZZ" not in f"{config} {config.extra_config}" and "AKIA1" not in str(config)
    assert {name: config.extra_config[name] for name in keys} == keys


def test_the_engine_and_the_doctor_ask_for_the_files_first(monkeypatch):
    monkeypatch.setenv(login.PASSWORD_FILE, "/nowhere")
    config = LMCacheEngineConfig.from_defaults(remote_url="redis://localhost:1")
    (told,) = refusals(config, None)
    assert told.startswith(login.PASSWORD_FILE)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost:1", {"username": "env", "password": "pw"}),
        ("redis://u:p%40@localhost:1", {"username": "u", "password": "p@"}),
        ("redis://:p@localhost:1", {"password": "p"}),
        ("redis://me@localhost:1", {"username": "me", "password": "pw"}),
        ("redis-cluster://u:p%40@a:1,b:2", {"username": "u", "password": "p%40"}),
    ],
)
def test_what_the_url_says_wins(monkeypatch, url, expected):
    monkeypatch.setenv(login.USERNAME, "env")
    monkeypatch.setenv(login.PASSWORD, "pw")
    assert connection_options(url) == expected


def test_the_password_of_the_environment_counts_where_there_is_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv(login.PASSWORD, "of the environment")
    assert connection_options("redis://localhost:1") == {"password": "of the environment"}
    file = tmp_path / "password"
    file.write_text("of the file\n")
    monkeypatch.setenv(login.PASSWORD_FILE, str(file))
    assert connection_options("redis://localhost:1") == {"password": "of the file"}


@pytest.mark.parametrize("variable", [login.PASSWORD_FILE, login.CA_FILE])
def test_files_that_are_not_there_are_told(monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, f"{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=f"^{variable}='{tmp_path}/nowhere'") as error:
        connection_options("rediss://localhost:1")
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("redis://localhost:1", False),
        ("redis://127.0.0.2:1/0", False),
        ("redis://[::1]:1", False),
        ("rediss://cache:1", False),
        ("unix:///run/redis.sock", False),
        ("fs://cache:0/srv", False),
        (None, False),
        ("redis://u:p@cache:1", True),
        ("redis://10.0.0.1:1", True),
        ("redis-cluster://localhost:1,cache:2", True),
    ],
)
def test_what_leaves_the_machine_unencrypted_is_told(url, warned):
    shown = unencrypted(url)
    assert bool(shown) == warned and ":p@" not in (shown or "")


CLEAR, PLAIN = "redis://u:p@cache:1", "redis://cache:1"


@pytest.fixture(scope="module")
def lfm2() -> VllmConfig:
    """Made before a test listens: vLLM sets its loggers up when it is first asked for one."""
    return engine_config("lfm2")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"remote_url": "redis://u:p@cache:1"}, "redis://cache:1"),
        ({"remote_url": "rediss://u:p@cache:1"}, ""),
        ({"remote_storage_plugins": ["redis"], "extra_config": {PLUGIN_URLS[0]: CLEAR}}, PLAIN),
        ({"remote_storage_plugins": ["redis.a"], "extra_config": {PLUGIN_URLS[1]: CLEAR}}, PLAIN),
        ({"remote_storage_plugins": ["redis"]}, ""),
        ({}, ""),
    ],
    ids=["in the clear", "TLS", "plugin", "another plugin", "plugin without a URL", "RAM"],
)
def test_an_engine_says_once_what_it_serves_and_what_leaves_it_in_the_clear(
    monkeypatch, lfm2, hybrid_log, settings, warned
):
    lmcache = LMCacheEngineConfig.from_defaults(**settings)
    login.hide_passwords(lmcache)
    monkeypatch.setattr(connector, "load_lmcache_config", lambda *_, **__: lmcache)
    monkeypatch.setattr(connector, "LookupClient", lambda *_: Mock())
    monkeypatch.setattr(connector.HybridConnector, "_start_lmcache", lambda *_: None)
    groups = cache_config(FULL, STATE_SPEC)
    connector.HybridConnector(lfm2, KVConnectorRole.SCHEDULER, groups)
    (serves,) = [line for line in hybrid_log.messages if "serves hybrid groups" in line]
    assert serves == (
        "LMCache serves hybrid groups: blocks of 16 tokens, attention groups (0,), "
        "window groups (), state groups (1,)."
    )
    (kept,) = [line for line in hybrid_log.messages if "keeps records" in line]
    assert kept.startswith("LMCache keeps records in RAM (about ")
    assert "prompts of max_model_len=" in kept
    assert kept.endswith(" Prompts longer than 16 tokens hit, at multiples of 16.")
    told = [line for line in hybrid_log.messages if "unencrypted" in line]
    assert len(told) == bool(warned) and all(warned in line for line in told)
    assert "u:p@" not in hybrid_log.text


def test_tls_to_a_cluster_is_not_warned_of(monkeypatch, certificate):
    monkeypatch.setenv(login.CA_FILE, str(certificate))
    assert unencrypted("redis-cluster://a:1,b:2") is None
