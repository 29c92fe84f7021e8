# SPDX-License-Identifier: Apache-2.0
"""The memory that a container has, from files as the kernel writes them."""

import math
from pathlib import Path

import pytest

from lmcache_hybrid.config import container, lmcache_config
from lmcache_hybrid.config.lmcache_config import refusals

from .lmcache_settings import lmcache_config as settings

GIB = 1 << 30


def limit_in(monkeypatch: pytest.MonkeyPatch, groups: Path, mounted: Path) -> float:
    """The limit of a process whose control groups these files describe."""
    monkeypatch.setattr(container, "_GROUPS", groups)
    monkeypatch.setattr(container, "_MOUNTED", mounted)
    return container.memory_limit()


@pytest.mark.parametrize(
    "groups, files, limit",
    [
        ("0::/\n", {"memory.max": str(GIB)}, GIB),
        ("0::/\n", {"memory.max": "max"}, math.inf),
        ("0::/\n", {}, math.inf),
        ("0::/kube/pod\n", {"kube/pod/memory.max": "max", "kube/memory.max": str(GIB)}, GIB),
        ("0::/kube/pod\n", {"memory.max": str(GIB)}, GIB),  # the container sees only its own
        ("0::/../other\n", {"memory.max": str(GIB)}, GIB),
        (
            "4:cpu,memory:/docker/1\n0::/\n",
            {
                "memory/docker/1/memory.limit_in_bytes": str(2 * GIB),
                "memory/memory.limit_in_bytes": str(3 * GIB),
                "memory.max": "max",
            },
            2 * GIB,
        ),
        ("3:cpu:/\n", {"memory/memory.limit_in_bytes": str(GIB)}, math.inf),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, monkeypatch, groups, files, limit):
    listed, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    listed.write_text(groups)
    for name, text in files.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(f"{text}\n")
    assert limit_in(monkeypatch, listed, mounted) == limit


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path, monkeypatch):
    assert limit_in(monkeypatch, tmp_path / "no file", tmp_path) == math.inf


def test_a_container_may_have_less_than_the_machine(monkeypatch):
    """And then no swap space. Huge pages do not count there."""
    assert lmcache_config.memory_of_the_machine(1.0) == 1.0 < lmcache_config.memory_of_the_machine()
    monkeypatch.setattr(lmcache_config, "memory_limit", lambda: 1.0)
    for pages in (False, True):
        found = refusals(settings(max_local_cpu_size=1.0, local_cpu_use_hugepages=pages), None)
        assert bool(found) != pages


@pytest.mark.parametrize("line", ["", "no colon", "0:"])
def test_a_line_of_another_kind_is_no_limit(tmp_path: Path, monkeypatch, line):
    (tmp_path / "cgroup").write_bytes(f"{line}\n0::/\xff\n".encode("latin-1"))
    (tmp_path / "memory.max").write_text("5\n")
    assert limit_in(monkeypatch, tmp_path / "cgroup", tmp_path) == 5
