# SPDX-License-Identifier: Apache-2.0
"""``inspect``, ``verify`` and ``purge`` on a Redis cluster and behind sentinels: real servers."""

import pytest
import redis
from servers import Cluster

from lmcache_hybrid.config.redis_credentials import login_of
from lmcache_hybrid.storage.remote.clients import hosts_of
from lmcache_hybrid.tools.stored import redis_store
from lmcache_hybrid.tools.stored.opening import open_store

from ..old_records import add_metadata
from ..store_box import FINGERPRINT, MODEL, N, flip, valkey  # noqa: F401
from ..test_remote_stores import (  # noqa: F401
    MANY,
    box,
    cluster,
    every_kind,
    shared_sentinels,
)
from .commands import LONG_AGO, run, run_json

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def url_of(filled) -> str:
    return filled.manager.config.remote_url


def name_of(filled, key, part: str) -> str:
    return filled.store.engine_key(key).to_string() + part


@every_kind
def test_inspect_sees_every_record_once(box, kind):  # noqa: F811
    filled = box(kind).write(MANY)
    assert not filled.store.failed_writes
    for key in (*(f"session{i}" for i in range(30)),):
        filled.redis.set(key, b"not ours")
    result = run_json("inspect", url_of(filled))
    (row,) = result["rows"]
    assert (row["model"], row["rank"], row["records"]) == (MODEL, "0/2", len(MANY))
    assert row["damaged"] == row["unfinished"] == 0 and row["deepest"] == len(MANY) * N
    assert result["foreign"] == 30
    assert run_json("verify", url_of(filled))["counts"] == {"good": len(MANY)}


@every_kind
def test_damage_is_found_and_deleted(box, kind):  # noqa: F811
    filled = box(kind).write(MANY)
    for key in MANY[:3]:
        add_metadata(filled, key)
        value = name_of(filled, key, "kv_bytes")
        filled.redis.set(value, flip(300)(filled.redis.get(value)))
    counts = run_json("verify", url_of(filled), exit_code=1)["counts"]
    assert counts == {"good": len(MANY) - 3, "damaged": 3}
    assert "Deleted 3 damaged" in run("verify", url_of(filled), "--delete-damaged")
    assert run_json("verify", url_of(filled))["counts"] == {"good": len(MANY) - 3}
    # So is what an earlier release wrote beside them, from whichever node it was on.
    for key in MANY[:3]:
        for part in ("kv_bytes", "metadata"):
            assert not filled.redis.exists(name_of(filled, key, part))


@every_kind
def test_records_of_earlier_releases_and_what_is_left_of_them(box, kind):  # noqa: F811
    filled = box(kind).write(MANY)
    for key in MANY[:8]:
        add_metadata(filled, key)
    for key in MANY[:4]:
        filled.redis.delete(name_of(filled, key, "kv_bytes"))
    result = run_json("inspect", url_of(filled))
    (row,) = result["rows"]
    assert (row["records"], row["unfinished"]) == (len(MANY) - 4, 4)
    assert result["foreign"] == 0
    run("purge", url_of(filled), "--fingerprint", FINGERPRINT[:8].hex(), "--yes")
    keys = [name_of(filled, key, part) for key in MANY for part in ("kv_bytes", "metadata")]
    assert not any(filled.redis.exists(key) for key in keys)


@every_kind
def test_purge_leaves_what_is_not_chosen(box, kind):  # noqa: F811
    filled = box(kind).write(MANY)
    other = box(kind, fingerprint=bytes(16)).write(MANY[:10])
    filled.redis.set("session", b"not ours")
    told = run("purge", url_of(filled), "--fingerprint", FINGERPRINT[:8].hex(), "--yes")
    assert f"Deleted {len(MANY)} of {len(MANY)} records" in told
    (row,) = run_json("inspect", url_of(filled))["rows"]
    assert (row["fingerprint"], row["records"]) == ("0" * 16, 10)
    assert list(other.store.locate(MANY[:10])) == MANY[:10]
    assert filled.redis.get("session") == b"not ours"


@every_kind
def test_looking_is_no_use(box, kind):  # noqa: F811
    """On every node, and on connections that were opened anew."""
    filled = box(kind).write(MANY)
    for key in MANY:
        name = name_of(filled, key, "kv_bytes")
        filled.redis.restore(name, 0, filled.redis.dump(name), replace=True, idletime=LONG_AGO)
    source = open_store(url_of(filled))
    client = source._client
    for _ in range(2):
        ages = [entry.age for entry in source.entries()]
        assert len(ages) == len(MANY) and min(ages) >= LONG_AGO
        if isinstance(client, redis.RedisCluster):
            for node in client.get_nodes():
                node.redis_connection.connection_pool.disconnect()
        else:
            client.connection_pool.disconnect()
    source.close()


def test_a_node_that_is_away_is_told(tmp_path):
    servers = Cluster(tmp_path)
    try:
        servers.nodes[1].kill()
        text = run("inspect", servers.url, exit_code=1)
        assert "redis-cluster://localhost:" in text and "cannot be used" in text
        servers.nodes[0].kill()
        servers.nodes[2].kill()
        assert "cannot be used" in run("inspect", servers.url, exit_code=1)
    finally:
        servers.close()


def test_sentinels_without_that_service(box, monkeypatch):  # noqa: F811
    url = url_of(box("sentinel"))
    monkeypatch.setenv("REDIS_SERVICE_NAME", "another")
    text = run("inspect", url, exit_code=1)
    assert "another" in text and "REDIS_SERVICE_NAME" in text


def test_a_replica_takes_over(box, shared_sentinels):  # noqa: F811
    """The primary that sentinels name now is asked, not a host of the URL."""
    filled = box("sentinel").write(MANY)
    client = open_store(url_of(filled))._client
    named = client.connection_pool.get_master_address()
    assert named[1] == shared_sentinels.primary.port
    client.close()


# URLs


@pytest.mark.parametrize(
    ("url", "hosts", "login"),
    [
        ("redis-cluster://a:1", (("a", 1),), ("", "")),
        ("redis-cluster://a:1,b:2,[::1]:3", (("a", 1), ("b", 2), ("::1", 3)), ("", "")),
        ("redis-sentinel://me:pw@a:1,b:2", (("a", 1), ("b", 2)), ("me", "pw")),
        ("redis-cluster://:p:w%40@a:1", (("a", 1),), ("", "p:w%40")),
        ("redis-cluster://me@a:1", (("a", 1),), ("me", "")),
    ],
    ids=str,
)
def test_several_hosts_in_one_url(url, hosts, login):
    assert hosts_of(url) == hosts and login_of(url) == login


@pytest.mark.parametrize(
    "url",
    ["redis-cluster://", "redis-cluster://me:secret@a", "redis-sentinel://:secret@a:1,b",
     "redis-sentinel://:secret@a:x", "redis-cluster://:secret@a:1,,b:2"],
)  # fmt: skip
def test_a_host_without_a_port(url):
    text = run("inspect", url, exit_code=1)
    assert "host:port" in text and "secret" not in text


def test_urls_are_read_as_lmcache_reads_them(monkeypatch):
    """Should LMCache read them in another way, this fails and not the operator."""
    from lmcache.v1.storage_backend.connector import redis_adapter, redis_connector

    made = []
    for name in ("RedisClusterConnector", "RedisSentinelConnector"):
        monkeypatch.setattr(redis_connector, name, lambda **kwargs: made.append(kwargs))

    class Context:
        loop = local_cpu_backend = None

        def __init__(self, url):
            self.url = url

    for adapter in (
        redis_adapter.RedisClusterConnectorAdapter(),
        redis_adapter.RedisSentinelConnectorAdapter(),
    ):
        for rest in ("a:1", "a:1,b:2", "me:p:w@a:1,b:2", ":pw@a:1", "me@a:1", "%40:%2f@a:1"):
            url = adapter.schema + rest
            adapter.create_connector(Context(url))
            theirs = made.pop()
            assert tuple(theirs["hosts_and_ports"]) == hosts_of(url)
            assert (theirs["username"] or "", theirs["password"] or "") == login_of(url)


# A server that refuses


def test_what_a_server_refuses_to_say_is_not_taken_for_nothing(box):  # noqa: F811
    """Records that this user may not read are not "no records"."""
    filled = box("sentinel").write(MANY[:2])
    port = filled.redis.connection_pool.connection_kwargs["port"]
    filled.redis.acl_setuser(
        "looker", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"],
        commands=["-getrange"],
    )  # fmt: skip
    text = run("inspect", f"redis://looker:pw@localhost:{port}", exit_code=1)
    assert "refuses to be looked into" in text and "GETRANGE" in text and "pw" not in text


@every_kind
def test_keys_are_asked_for_in_pages(box, kind, monkeypatch):  # noqa: F811
    monkeypatch.setattr(redis_store, "PAGE", 5)
    filled = box(kind).write(MANY)
    (row,) = run_json("inspect", url_of(filled))["rows"]
    assert row["records"] == len(MANY)
    assert f"Deleted {len(MANY)} of" in run("purge", url_of(filled), "--older-than", "0s", "-y")
    assert run_json("inspect", url_of(filled))["rows"] == []
