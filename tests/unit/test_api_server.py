# SPDX-License-Identifier: Apache-2.0
"""LMCache's internal API server over HTTP, in front of a real engine with our records."""

import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig

from lmcache_hybrid.core.errors import LoadError
from lmcache_hybrid.storage.disk.backend import LocalDisk
from lmcache_hybrid.storage.service_factory import HybridServiceFactory
from tests.ports import free_ports

from . import store_box as stores
from .helpers import engine_config, payload_of, put
from .store_box import KEYS, SIZE, until
from .test_parallelism import FULL

box, valkey = stores.box, stores.valkey
RAM, DISK = "LocalCPUBackend", "LocalDiskBackend"
OTHERS = [key._replace(block_hash=b"x" + key.block_hash[1:]) for key in KEYS]


class Api:
    """The server that a worker of a hybrid model starts, for the engine of a box."""

    def __init__(self, engine) -> None:
        config = LMCacheEngineConfig.from_defaults() if engine is None else engine.config
        config.internal_api_server_enabled = True
        config.internal_api_server_host = "127.0.0.1"
        (self.port,) = free_ports(1)
        config.internal_api_server_port_start = self.port - (engine is not None)
        self.manager = SimpleNamespace(lmcache_engine=engine, config=config)
        factory = HybridServiceFactory(config, engine_config("lfm2"), "worker", FULL, 1)
        self.server = factory.maybe_create_internal_api_server(self.manager)
        self.server.start()
        until(lambda: self.server.server.started, "the server does not start")

    def call(self, method: str, path: str, body=None) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        request.method = method
        try:
            with urllib.request.urlopen(request, timeout=stores.DEADLINE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def refused(self, method: str, path: str, body=None) -> str:
        status, answer = self.call(method, path, body)
        message = answer["error"]
        assert status == 501 and message.startswith(f"{method} {path.partition('?')[0]} does not")
        assert message.endswith(".") and ". " not in message
        return message


@pytest.fixture
def serve(box):
    """A box in front of which the server runs."""
    servers = []

    def start(kind: str, **settings) -> tuple[stores.Box, Api]:
        one = box(kind, **settings).write()
        servers.append(Api(one.engine))
        return one, servers[-1]

    yield start
    for api in servers:
        api.server.stop()


@pytest.mark.parametrize("path", [f"/backends/{DISK}/recreate", f"/backends/{RAM}/recreate"])
def test_no_backend_is_made_anew(serve, path):
    one, api = serve("disk")
    before = dict(one.manager.storage_backends)
    assert "restart the engine" in api.refused("POST", path)
    assert one.manager.storage_backends == before and type(one.backend) is LocalDisk
    one.read()


def test_no_backend_is_closed_or_added(serve):
    one, api = serve("disk")
    api.refused("DELETE", f"/backends/{DISK}")
    api.refused("POST", "/backends")
    status, names = api.call("GET", "/backends")
    assert status == 200 and names == {RAM: RAM, DISK: "LocalDisk"}
    one.read()


def test_an_option_is_not_said_to_change(serve):
    one, api = serve("ram")
    assert "restart" in api.refused("POST", "/conf", {"min_retrieve_tokens": 512})
    assert one.engine.config.min_retrieve_tokens == 0
    status, found = api.call("GET", "/conf?names=min_retrieve_tokens")
    assert status == 200 and found == {"min_retrieve_tokens": 0}


@pytest.mark.parametrize(
    "call",
    [
        ("POST", "/lookup/close"),
        ("POST", "/lookup/create"),
        ("POST", "/lookup/recreate"),
        ("POST", "/cache/store?tokens_mock=0,100"),
        ("POST", "/cache/retrieve?tokens_mock=0,100"),
        ("POST", "/cache/load-fs-chunks", {"config_path": "/nowhere"}),
        ("POST", "/cache/kvcache/record_slot?enabled=true"),
        ("POST", "/chunk_statistics/start"),
        ("POST", "/chunk_statistics/reset"),
        ("POST", "/conf/"),
        ("PATCH", "/what/comes/next"),
    ],
    ids=lambda call: call[1],
)
def test_what_does_not_work_says_so(serve, call):
    one, api = serve("ram")
    api.refused(*call)
    one.read()


def test_clear_empties_ram(serve):
    one, api = serve("ram")
    assert api.call("DELETE", "/cache/clear")[0] == 200
    assert one.store.locate(KEYS) == {}
    one.write().read()
    one.assert_pool_is_free()


def test_clear_does_not_say_that_a_store_is_empty(serve):
    one, api = serve("disk", local_cpu=True)
    for path in ("/cache/clear", f"/cache/clear?locations={RAM}&locations={DISK}"):
        assert "purge" in api.refused("DELETE", path)
        assert set(one.store.locate(KEYS).values()) == {RAM}
    assert api.call("DELETE", f"/cache/clear?locations={RAM}")[0] == 200
    assert set(one.store.locate(KEYS).values()) == {DISK}


def test_clear_leaves_what_a_request_was_promised(serve):
    one, api = serve("ram")
    claim = one.store.claim(one.store.locate(KEYS))
    assert api.call("DELETE", "/cache/clear")[0] == 200
    for key, payload in zip(KEYS, one.fetch(claim, KEYS), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    one.assert_pool_is_free()


@pytest.mark.parametrize("switch", ["cache/clear", "freeze", "hot_cache"])
def test_a_switch_beside_loads_and_saves_never_brings_other_bytes(serve, switch):
    """Records are whole, or misses, and no buffer stays."""
    one, api = serve("disk", local_cpu=True)
    done, loaded, errors = threading.Event(), [0], []

    def load_and_save() -> None:
        while not done.is_set():
            try:
                if one.store.writable():
                    put(one.store, OTHERS, SIZE)
                located = one.store.locate(KEYS + OTHERS)
                claim = one.store.claim(located)
                if claim is None:
                    continue
                try:
                    payloads = one.fetch(claim, list(located))
                except LoadError:  # switched off meanwhile
                    continue
                for key, payload in zip(located, payloads, strict=True):
                    assert torch.equal(payload, payload_of(key, SIZE))
                loaded[0] += len(payloads)
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=load_and_save) for _ in range(2)]
    for thread in threads:
        thread.start()
    ways = ("disable", "enable") if switch == "hot_cache" else ("enable", "disable")
    calls = [("PUT", f"/{switch}/{way}") for way in ways]
    if switch == "cache/clear":
        calls = [("DELETE", f"/cache/clear?locations={RAM}")]
    answers = [api.call(*call)[0] for _ in range(10) for call in calls]
    done.set()
    for thread in threads:
        thread.join(stores.DEADLINE)
    assert set(answers) == {200}
    assert not errors and loaded[0]
    one.settle()
    one.read()
    one.manager.clear([RAM])
    until(lambda: one.used() == one.start, "a buffer is kept")


def test_freeze_keeps_ram_and_leaves_all_else(serve):
    one, api = serve("disk", local_cpu=True)
    one.manager.clear([RAM])
    claim = one.store.claim(one.store.locate(KEYS))
    assert api.call("PUT", "/freeze/enable")[0] == 200
    assert not one.store.writable() and one.store.locate(KEYS) == {}
    with pytest.raises(LoadError, match="switched off"):
        one.fetch(claim, KEYS)
    assert api.call("GET", "/freeze/status")[1]["freeze"] is True
    assert api.call("PUT", "/freeze/disable")[0] == 200
    assert one.store.writable()
    one.read()


def test_the_hot_cache_is_turned_off_and_on(serve):
    one, api = serve("disk", local_cpu=True)
    assert api.call("PUT", "/hot_cache/disable")[0] == 200
    put(one.store, OTHERS, SIZE)
    until(lambda: len(one.store.locate(OTHERS)) == len(OTHERS), "not written")
    assert set(one.store.locate(KEYS + OTHERS).values()) == {DISK}
    assert api.call("PUT", "/hot_cache/enable")[0] == 200
    one.store.clear(1)
    one.write()
    assert set(one.store.locate(KEYS).values()) == {RAM}


def test_a_bypassed_backend_is_neither_read_nor_written(serve):
    one, api = serve("disk", local_cpu=True)
    one.manager.clear([RAM])
    assert api.call("PUT", f"/bypass/add?backend_name={DISK}")[0] == 200
    assert one.store.locate(KEYS) == {}
    put(one.store, OTHERS, SIZE)
    assert len(one.backend.dict) == len(KEYS) and not one.backend.put_tasks
    assert api.call("PUT", f"/bypass/remove?backend_name={DISK}")[0] == 200
    one.read()


def test_the_schedulers_server_refuses_the_same():
    api = Api(None)
    api.refused("POST", "/conf", {"min_retrieve_tokens": 512})
    api.refused("POST", "/lookup/recreate")
    assert api.call("DELETE", "/cache/clear")[0] == 503  # LMCache's own answer
    api.server.stop()


def test_a_server_that_is_off_stays_off(box):
    one = box("ram")
    factory = HybridServiceFactory(one.engine.config, engine_config("lfm2"), "worker", FULL, 1)
    manager = SimpleNamespace(lmcache_engine=one.engine, config=one.engine.config)
    assert not factory.maybe_create_internal_api_server(manager).enable
