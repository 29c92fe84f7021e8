# SPDX-License-Identifier: Apache-2.0
"""A test record through real stores, good ones and broken ones."""

import subprocess

import pytest
from servers import Cluster

from lmcache_hybrid.storage.remote.redis import HybridRedisConnector
from lmcache_hybrid.tools.doctor import backends
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks, check_redis

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
    assert redis.keys() == [b"mine"] and not list(disk.iterdir())
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
    assert told.status == OK and "1,048,576 bytes" in told.message
    assert not list(folder.iterdir())


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
    assert redis.keys() == [b"mine"] and not list(disk.iterdir())


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


def test_backends_wait_for_the_options(context):
    assert only(check_backends(context(enable_blending=True))).status == SKIPPED
