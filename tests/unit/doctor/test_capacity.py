# SPDX-License-Identifier: Apache-2.0
"""Room in RAM, on disks and in Redis."""

from types import SimpleNamespace

import pytest

from lmcache_hybrid.tools.doctor import capacity
from lmcache_hybrid.tools.doctor.capacity import check_disks, check_memory, check_redis
from lmcache_hybrid.tools.doctor.context import Context

from .findings import (
    ERROR,
    OK,
    WARNING,
    assert_sentences,
    only,
    url_of,
)


@pytest.mark.parametrize(
    "free, held, limit, status",
    [(10, 0, 5, OK), (10, 0, 20, WARNING), (10, 15, 20, OK), (0, 0, 5, ERROR)],
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


@pytest.mark.parametrize("free, status", [(1 << 30, OK), (1 << 20, ERROR)])
def test_shared_folders_never_evict(context, monkeypatch, tmp_path, free, status):
    usage = SimpleNamespace(free=free, total=10 << 30)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: usage)
    found = only(check_disks(context(remote_url=f"fs://localhost:0{tmp_path}")))
    assert found.status == status and "never evicts" in found.message and "purge" in found.fix


def test_memory(context):
    assert only(check_memory(context(max_local_cpu_size=0.001))).status == OK
    assert only(assert_sentences(check_memory(context(max_local_cpu_size=1e6)))).status == WARNING


@pytest.mark.parametrize(
    "size, compiled, status, told",
    [
        (5, False, OK, "42.9 GB are available: enough for 8 ranks."),
        (39, True, OK, "enough for 1 rank."),
        (39, False, WARNING, "68.7 GB per rank where CUDA cannot pin it as it is."),
        (41, False, WARNING, "42.9 GB are available."),
    ],
)
def test_memory_that_torch_would_round(context, monkeypatch, size, compiled, status, told):
    memory = SimpleNamespace(available=40 << 30)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(capacity, "compiled_part_missing", lambda ops: not compiled)
    finding = only(assert_sentences(check_memory(context(max_local_cpu_size=size))))
    assert finding.status == status and told in finding.message
    assert ("PYTORCH_ALLOC_CONF" in finding.fix) == (size == 39 and not compiled)


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
