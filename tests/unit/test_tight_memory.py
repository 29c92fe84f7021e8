# SPDX-License-Identifier: Apache-2.0
"""Memory that is not there for LMCache's pools, since vLLM or files take it."""

from types import SimpleNamespace

import pytest

from lmcache_hybrid import scheduler_side
from lmcache_hybrid.config import tight_memory as module
from lmcache_hybrid.config.tight_memory import (
    folders_in_memory,
    limits_above_disks,
    nodes_of_ranks,
    offloaded_bytes,
    scarce_memory,
    share_of_cpu_backend,
    tight_memory,
)
from lmcache_hybrid.core.sizes import GIB

from .helpers import OPTIONS, PLAN, engine_config
from .lmcache_settings import assert_one_sentence, lmcache_config


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine of 40 GiB, on two NUMA nodes."""
    monkeypatch.setattr(module, "memory_of_the_machine", lambda limit: 40 * GIB)
    monkeypatch.setattr(module, "_NODES", tmp_path)
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        text = f"\nNode {node} MemTotal:       {20 << 20} kB\nNode {node} MemFree:  1 kB\n"
        (tmp_path / f"node{node}" / "meminfo").write_text(text)


@pytest.mark.parametrize(
    "ranks, offloaded, nodes, told",
    [
        (2, 0, (), []),
        (2, 10, (), []),
        (2, 11, (), ["--cpu-offload-gb 11 and max_local_cpu_size=10.0 on each of 2 ranks may"]),
        (3, 0, (0, 0, 1), []),
        (4, 0, (0, 1, 1, 1), ["3 ranks to NUMA node 1, and max_local_cpu_size=10.0 takes 32.2 GB"]),
        (3, 0, (7, 7, 7), []),  # a node that nobody can look at
    ],
)
def test_what_does_not_fit_is_told(ranks, offloaded, nodes, told):
    config = lmcache_config(max_local_cpu_size=10.0)
    said = list(tight_memory(config, ranks, offloaded * GIB, nodes))
    for sentence, part in zip(said, told, strict=True):
        assert part in sentence
        assert_one_sentence(sentence)


@pytest.mark.parametrize("share, told", [(0.0, False), (0.7, False), (0.8, True)])
def test_the_cpu_backend_takes_its_share_first(share, told):
    said = list(tight_memory(lmcache_config(max_local_cpu_size=10.0), 1, 0, (), share))
    assert len(said) == told
    for sentence in said:
        assert "gpu_memory_utilization=0.8 of the 42.9 GB" in sentence
        assert_one_sentence(sentence)


@pytest.mark.parametrize("given, taken", [({}, 0.92), ({"kv_cache_memory_bytes": 1 << 30}, 0.0)])
def test_the_share_of_the_cpu_backend(given, taken):
    assert share_of_cpu_backend(engine_config("lfm2", **given)) == taken


@pytest.mark.parametrize("limit, told", [(None, 1), (29, 0), (31, 1), (51, 2)])
def test_folders_in_memory(monkeypatch, tmp_path, limit, told):
    """A tmpfs of 50 GiB on a machine of 40."""
    monkeypatch.setattr(module, "file_system_of", lambda path: "tmpfs")
    usage = SimpleNamespace(total=50 * GIB)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    config = lmcache_config(remote_url=f"fs://host:0{tmp_path}/not/there", max_local_cpu_size=10.0)
    most = limit and limit * GIB
    said = [*folders_in_memory(config, 1, most), *limits_above_disks(config, most)]
    assert len(said) == told
    for sentence in said:
        assert_one_sentence(sentence)


def test_a_folder_on_a_disk_is_no_memory(tmp_path):
    config = lmcache_config(remote_url=f"fs://host:0{tmp_path}", max_local_cpu_size=39.0)
    assert not list(folders_in_memory(config, 1, None))


@pytest.mark.parametrize("free, told", [(20, False), (19, True)])
def test_what_other_engines_have_taken_is_told(monkeypatch, free, told):
    memory = SimpleNamespace(available=free * GIB)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    said = list(scarce_memory(lmcache_config(max_local_cpu_size=10.0), 2))
    assert len(said) == told
    for sentence in said:
        assert "takes 21.5 GB on 2 ranks, and 20.4 GB of this machine's" in sentence
        assert_one_sentence(sentence)


def test_an_engine_says_so_at_start(hybrid_log):
    config = engine_config("lfm2", cpu_offload_gb=31)
    assert offloaded_bytes(config) == 31 * GIB
    scheduler_side._warn(config, PLAN, lmcache_config(max_local_cpu_size=10.0), OPTIONS)
    assert "--cpu-offload-gb 31 and max_local_cpu_size=10.0" in hybrid_log.text


@pytest.mark.parametrize(
    "bound, nodes, found",
    [(True, [0, 0, 1, 1], (0, 0)), (True, None, ()), (False, None, ())],
)
def test_the_nodes_of_this_engines_ranks(bound, nodes, found):
    parallel = SimpleNamespace(numa_bind=bound, numa_bind_nodes=nodes)
    assert nodes_of_ranks(SimpleNamespace(parallel_config=parallel), 2) == found
