# SPDX-License-Identifier: Apache-2.0
"""LMCacheStore on a Redis cluster and behind sentinels: real servers, some of them killed."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import redis
import torch

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.keys import ATTENTION, RecordKey
from lmcache_hybrid.storage.key_names import VALUE
from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.storage.remote.record_connector import unwrapped
from tests.servers import Cluster, HalfCluster, Sentinels, wait_for

from .helpers import payload_of, put
from .store_box import (
    KEYS,
    MAX_PAYLOAD,
    OTHER_LENGTH,
    SAME_LENGTH,
    SIZE,
    Box,
    N,
    assert_damage_is_found,
    make_many_connections,
    until,
)

# Enough that every node of a cluster has some.
MANY = [RecordKey(ATTENTION, 3, bytes([i]) * 32, (i + 1) * N) for i in range(24)]
KINDS = ("cluster", "sentinel")
# LMCache's own bound on a read, short so that no test waits for it long.
SHORT = {"blocking_timeout_secs": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def shared_sentinels(tmp_path_factory) -> Iterator[Sentinels]:
    sentinels = Sentinels(tmp_path_factory.mktemp("sentinels"))
    yield sentinels
    sentinels.close()


@pytest.fixture
def box(request, tmp_path, monkeypatch):
    """Make boxes on one kind of servers; all are closed after the test."""
    monkeypatch.setenv("REDIS_SERVICE_NAME", Sentinels.service)
    made: list[Box] = []

    def make(kind, **settings) -> Box:
        name = {"cluster": "cluster", "sentinel": "shared_sentinels"}.get(kind)
        servers = request.getfixturevalue(name) if name else kind
        if not made:
            servers.client().flushall()
        made.append(Box("redis", tmp_path, servers, remote_url=servers.url, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


every_kind = pytest.mark.parametrize("kind", KINDS)


def outcome(box: Box, key: RecordKey) -> str:
    """hit, miss or failed load; anything else that comes back is an error."""
    located = box.store.locate([key])
    if not located:
        return "miss"
    claim = box.store.claim(located)
    try:
        (payload,) = box.fetch(claim, [key])
    except (LoadError, RecordError):
        return "failed"
    assert torch.equal(payload, payload_of(key, SIZE)), "wrong bytes"
    return "hit"


@every_kind
def test_records_come_back_bit_for_bit(box, kind):
    box = box(kind).write(MANY)
    assert box.store.locate(MANY) == dict.fromkeys(MANY, "RemoteBackend")
    for key, payload in zip(MANY, box.read(MANY), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    assert list(box.store.locate([*MANY[:5], KEYS[3], *MANY[5:]])) == MANY
    assert not box.store.failed_writes
    box.assert_pool_is_free()


@every_kind
def test_another_engine_finds_them(box, kind):
    box(kind).write()
    assert box(kind, rank=1).store.locate(KEYS[:1]) == {}
    for key, payload in zip(KEYS, box(kind).read(), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


@every_kind
def test_any_number_of_connections_is_made_in_time(box, kind):
    make_many_connections(box(kind))


def reads(servers) -> int:
    """How often these servers found something to read on a connection."""
    nodes = servers.nodes if isinstance(servers, Cluster) else [servers.primary]
    return sum(node.client.info("stats")["total_reads_processed"] for node in nodes)


def test_a_lookup_is_one_round_trip_to_each_node(box, cluster):
    box = box("cluster").write(MANY)
    idle = -reads(cluster) + reads(cluster)  # of asking for this very number
    before = reads(cluster)
    box.store.locate(MANY)
    assert reads(cluster) - before - idle == len(cluster.nodes)


@every_kind
@pytest.mark.parametrize("damage", {**SAME_LENGTH, **OTHER_LENGTH})
def test_damaged_and_cut_values_are_no_record(box, kind, damage):
    assert_damage_is_found(box(kind), {**SAME_LENGTH, **OTHER_LENGTH}[damage], KEYS)


@every_kind
def test_a_value_that_is_too_large_is_a_failed_load(box, kind):
    box = box(kind).write()
    name = box.store.engine_key(KEYS[1]).to_string() + VALUE
    box.redis.set(name, bytes(record_bytes(MAX_PAYLOAD) + 1))
    assert outcome(box, KEYS[1]) == "failed"
    assert outcome(box, KEYS[1]) == "miss", "promised again"
    assert torch.equal(box.read([KEYS[3]])[0], payload_of(KEYS[3], SIZE))
    box.assert_pool_is_free()


# A cluster whose slots move


def move(cluster: Cluster, name: str, step: str) -> None:
    """Begin to move this name's slot to another node, or end it."""
    source = cluster.node_of(name)
    target = next(node for node in cluster.nodes if node is not source)
    slot = source.client.execute_command("CLUSTER", "KEYSLOT", name)
    ids = {node: node.client.execute_command("CLUSTER", "MYID").decode() for node in cluster.nodes}
    if step == "begin":
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    elif step == "end":
        for node in (target, source, *cluster.nodes):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    else:
        raise ValueError(step)


def test_a_slot_that_moves_costs_nothing(box, tmp_path):
    """First the old node says ASK, for what it does not have; then MOVED."""
    cluster = Cluster(tmp_path / "cluster")
    try:
        box = box(cluster, **SHORT).write(MANY[1:])
        key = MANY[0]
        name = box.store.engine_key(key).to_string() + VALUE
        source = cluster.node_of(name)
        move(cluster, name, "begin")
        assert outcome(box, key) == "miss"
        box.write([key])
        assert source.client.dbsize() == sum(
            cluster.node_of(box.store.engine_key(k).to_string() + VALUE) is source for k in MANY[1:]
        ), "written to the node that gives the slot away"
        assert outcome(box, key) == "hit"
        assert {outcome(box, each) for each in MANY} == {"hit"}
        move(cluster, name, "end")
        assert {outcome(box, each) for each in MANY} == {"hit"}
        box.store.discard(key)
        assert key not in box.store.locate(MANY)
        box.write([key])
        assert not box.store.failed_writes
        box.assert_pool_is_free()
    finally:
        cluster.close()


def test_a_lost_node_is_asked_no_more_than_twice(box, tmp_path):
    """A try asks it once, or twice where redis-py asks it for the slots, too."""
    servers = HalfCluster(tmp_path)
    try:
        box = Box("redis", tmp_path, None, remote_url=servers.url)
        lost = [k for k in MANY if servers.has_lost(box.store.engine_key(k).to_string() + VALUE)]
        assert box.store.locate(lost[:1]) == {}
        assert 2 <= servers.asked <= 4
        box.close()
    finally:
        servers.close()


# A cluster that loses a node


@pytest.fixture
def broken(cluster) -> Iterator[Callable[[RecordKey, Box], None]]:
    """Kill the node that holds this record; afterwards it comes back, empty."""
    killed = []

    def kill(box: Box, key: RecordKey, suffix: str = VALUE) -> None:
        killed.append(cluster.node_of(box.store.engine_key(key).to_string() + suffix))
        killed[-1].kill()

    yield kill
    for node in killed:
        if not node.server.is_running():
            node.start()
    cluster.wait_until("ok")


def test_a_killed_node_costs_hits_and_comes_back(box, cluster, broken):
    box = box("cluster", **SHORT).write(MANY)
    claim = box.store.claim(box.store.locate(MANY))
    broken(box, MANY[0])
    # Promised and gone: the load fails, and the request computes the prompt.
    with pytest.raises(LoadError):
        box.fetch(claim, MANY)
    cluster.wait_until("fail")
    # Without all slots the cluster answers nothing at all: misses.
    assert {outcome(box, key) for key in MANY[:3]} == {"miss"}
    put(box.store, KEYS, SIZE)
    until(lambda: box.store.failed_writes.get("RemoteBackend") == len(KEYS), "no write failed")
    until(lambda: box.used() == box.start, "failed writes keep their buffers")

    node = next(node for node in cluster.nodes if not node.server.is_running())
    node.start()
    cluster.wait_until("ok")
    found = [outcome(box, key) for key in MANY]
    assert "hit" in found and found[0] != "hit"
    box.write(MANY)
    assert {outcome(box, key) for key in MANY} == {"hit"}
    box.assert_pool_is_free()


def test_a_replica_takes_its_primarys_place_in_a_cluster(box, tmp_path):
    cluster = Cluster(tmp_path / "cluster")
    try:
        box = box(cluster, **SHORT).write(MANY)
        primary = cluster.node_of(box.store.engine_key(MANY[0]).to_string() + VALUE)
        replica = cluster.add_replica(tmp_path / "cluster", primary)
        primary.kill()
        cluster.wait_until("fail")
        assert outcome(box, MANY[0]) == "miss"
        replica.client.config_set("cluster-replica-no-failover", "no")
        wait_for(replica.is_primary, "the replica does not take over")
        cluster.wait_until("ok")
        assert {outcome(box, key) for key in MANY} == {"hit"}
        box.write(KEYS)
        assert not box.store.failed_writes
        # As planned, the other way round.
        primary.start()
        wait_for(primary.follows, "the lost primary does not come back")
        primary.client.execute_command("CLUSTER", "FAILOVER")
        wait_for(replica.follows, "the replica does not make room")
        assert {outcome(box, key) for key in [*MANY, *KEYS]} == {"hit"}
        box.write(MANY)
        assert not box.store.failed_writes
        box.assert_pool_is_free()
    finally:
        cluster.close()


def test_a_primary_that_falls_silent_is_replaced(box, tmp_path):
    """No connection ends, as where a host is cut off: only the other nodes know its successor."""
    cluster, process = Cluster(tmp_path / "cluster"), None
    try:
        box = box(cluster, **SHORT).write(MANY)
        primary = cluster.node_of(box.store.engine_key(MANY[0]).to_string() + VALUE)
        replica = cluster.add_replica(tmp_path / "cluster", primary)
        replica.client.config_set("cluster-replica-no-failover", "no")
        process = primary.client.info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        assert outcome(box, MANY[0]) == "miss"
        wait_for(replica.is_primary, "the replica does not take over")
        until(lambda: outcome(box, MANY[0]) == "hit", "the replica is not asked")
        assert {outcome(box, key) for key in MANY} == {"hit"}
        box.write(KEYS)
        box.assert_pool_is_free()
    finally:
        if process is not None:
            os.kill(process, signal.SIGCONT)
        cluster.close()


def name_of(box: Box, key: RecordKey) -> str:
    return box.store.engine_key(key).to_string() + VALUE


def connections_made(nodes) -> int:
    return sum(node.client.info("stats")["total_connections_received"] for node in nodes)


def test_a_cluster_that_serves_what_it_still_has(box, tmp_path, hybrid_log):
    """cluster-require-full-coverage no: only what the lost node holds is a miss."""
    cluster = Cluster(tmp_path / "cluster", full_coverage=False)
    try:
        box = box(cluster, **SHORT).write(MANY)
        at = {key: cluster.node_of(name_of(box, key)) for key in MANY}
        lost = at[MANY[0]]
        lost.kill()
        found = [outcome(box, key) for key in MANY[:8]]
        assert found[0] == "miss" and "hit" in found
        kept, others = [key for key in MANY if at[key] is not lost], set(at.values()) - {lost}
        made = connections_made(others)
        for _ in range(3):
            assert list(box.store.locate(MANY)) == kept
        assert connections_made(others) - made < 3 * len(others), "connections are not kept"
        assert hybrid_log.text.count("A node of ") == 1
        box.assert_pool_is_free()
    finally:
        cluster.close()


def test_a_cluster_that_is_away_at_the_start_is_used_once_it_is_there(box, tmp_path):
    cluster = Cluster(tmp_path / "cluster")
    try:
        engine = box(cluster, **SHORT)  # asks nothing yet
        for node in cluster.nodes:
            node.kill()
        assert engine.store.locate(KEYS) == {}
        put(engine.store, KEYS, SIZE)
        until(
            lambda: engine.store.failed_writes.get("RemoteBackend") == len(KEYS), "no write failed"
        )
        for node in cluster.nodes:
            node.start()
        cluster.wait_until("ok")
        engine.write()
        assert torch.equal(engine.read()[0], payload_of(KEYS[0], SIZE))
        engine.assert_pool_is_free()
    finally:
        cluster.close()


# Sentinels


def test_after_a_failover_the_replica_serves_and_takes_records(box, tmp_path):
    sentinels = Sentinels(tmp_path)
    try:
        box = box(sentinels, **SHORT).write(KEYS[:2])
        until(lambda: len(sentinels.replica.client.keys()) == 2, "nothing was replicated")
        claim = box.store.claim(box.store.locate(KEYS[:2]))
        sentinels.primary.kill()
        with pytest.raises(LoadError):
            box.fetch(claim, KEYS[:2])
        sentinels.wait_for_failover()
        for key, payload in zip(KEYS[:2], box.read(KEYS[:2]), strict=True):
            assert torch.equal(payload, payload_of(key, SIZE))
        box.write()
        assert torch.equal(box.read()[3], payload_of(KEYS[3], SIZE))
        box.assert_pool_is_free()
    finally:
        sentinels.close()


@pytest.mark.parametrize("setting, seconds", [(None, 2), ("0.5", 0.5)])
def test_redis_timeout_is_kept_and_otherwise_that_of_reads(box, monkeypatch, setting, seconds):
    """LMCache's default of a second is short for a state of 150 MB."""
    monkeypatch.delenv("REDIS_TIMEOUT", raising=False)
    if setting:
        monkeypatch.setenv("REDIS_TIMEOUT", setting)
    box = box("sentinel", **SHORT).write(KEYS[:1])
    box.redis.client_pause(20_000, all=False)
    started = time.monotonic()
    try:
        # A write that waits for ever, with the timeout of reads.
        with pytest.raises((TimeoutError, redis.TimeoutError)):
            unwrapped(box.backend.connection).remove_sync(box.store.engine_key(KEYS[0]))
        assert seconds <= time.monotonic() - started < seconds + 1
    finally:
        box.redis.client_unpause()


# remote_storage_plugins


@pytest.mark.parametrize("key", ["remote_storage_plugin.redis.redis_url", "redis_url"])
def test_a_plugins_url_is_used_for_reads_and_writes(redis_url, tmp_path, key):
    engine = Box(
        "redis",
        tmp_path,
        SimpleNamespace(client=lambda: None, port=0),
        remote_url=None,
        remote_storage_plugins=["redis"],
        extra_config={key: redis_url},
    )
    try:
        put(engine.store, KEYS, SIZE)
        until(lambda: all(engine.store.locate([key]) for key in KEYS), "not written")
        assert torch.equal(engine.read()[0], payload_of(KEYS[0], SIZE))
    finally:
        engine.close()
