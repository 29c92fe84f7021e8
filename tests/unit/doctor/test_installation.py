# SPDX-License-Identifier: Apache-2.0
"""Versions, plugin and block hash, as they should be and broken."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from lmcache_hybrid.tools.doctor import __main__ as doctor
from lmcache_hybrid.tools.doctor import hashing, installation
from lmcache_hybrid.upstream import versions
from vllm_patch.connector import UpstreamConnector

from .findings import ERROR, OK, WARNING, assert_sentences, of_status, only


def test_versions_that_are_supported():
    found = assert_sentences(installation.check_versions())
    assert [f.check for f in found] == ["lmcache-hybrid", "vLLM", "LMCache", "torch"]
    assert {f.status for f in found} == {OK}
    assert versions.installed("lmcache") in found[2].message


@pytest.mark.parametrize("label", ["vLLM", "LMCache"])
def test_a_version_that_is_not_supported(monkeypatch, label):
    real = versions.version
    package = next(package for package in versions.PACKAGES if package.label == label)
    name = next(name for name in package.distributions if versions.installed(name))
    monkeypatch.setattr(versions, "version", lambda n: "0.1.0" if n == name else real(n))
    (bad,) = of_status(assert_sentences(installation.check_versions()), ERROR)
    assert bad.check == label and f"{label} 0.1.0 was not tested" in bad.message
    assert "Run `pip install " in bad.fix
    monkeypatch.setenv("LMCACHE_HYBRID_ALLOW_UNTESTED", "1")
    assert only(of_status(installation.check_versions(), WARNING)).check == label


def test_packages_that_are_missing(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    found = assert_sentences(installation.check_versions())
    assert [f.check for f in of_status(found, ERROR)] == ["vLLM", "LMCache", "torch"]
    # Without vLLM nothing more can be said, and nothing crashes.
    assert list(doctor.findings(None)) == found


def test_another_torch_than_vllms(monkeypatch):
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda n: "1.0" if n == "torch" else real(n))
    bad = only(of_status(installation.check_versions(), WARNING))
    assert bad.message == "torch 1.0 is not what vLLM asks for."


def test_an_allocator_with_which_vllm_refuses_every_connector(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert list(installation.check_allocator()) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    found = only(assert_sentences(installation.check_allocator()))
    assert found.status == WARNING and "Take expandable_segments:True out" in found.fix


def test_the_folder_of_vllms_sockets(monkeypatch, tmp_path):
    """vLLM looks at it when its processes connect, after minutes and without a helpful word."""
    assert list(installation.check_sockets()) == []
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert list(installation.check_sockets()) == []
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "missing"))
    told = only(assert_sentences(installation.check_sockets()))
    assert told.status == ERROR and "unset VLLM_RPC_BASE_PATH" in told.fix
    assert f"VLLM_RPC_BASE_PATH='{tmp_path}/missing' is not a folder" in told.message
    assert not (tmp_path / "missing").exists()


def test_a_torch_without_cuda_needs_no_compiled_part():
    assert list(installation.check_compiled()) == []


def test_lmcaches_compiled_part(monkeypatch):
    """Here it never loads: it is built for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    bad = only(assert_sentences(installation.check_compiled()))
    assert bad.status == WARNING and "does not load with torch" in bad.message
    assert "nothing is to be done" in bad.fix and "PYTORCH_ALLOC_CONF=" in bad.fix
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", SimpleNamespace())
    assert only(assert_sentences(installation.check_compiled())).status == OK


def test_the_plugin_is_effective():
    assert only(installation.check_plugin()).status == OK


def test_a_plugin_that_vllm_may_not_load(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,other")
    finding = only(assert_sentences(installation.check_plugin()))
    assert finding.status == ERROR and "VLLM_PLUGINS='lora_resolver,other'" in finding.message
    monkeypatch.setenv("VLLM_PLUGINS", "other,lmcache_hybrid")
    assert only(installation.check_plugin()).status == OK


def test_a_plugin_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(installation, "entry_points", lambda group: ())
    finding = only(assert_sentences(installation.check_plugin()))
    assert finding.status == ERROR and "pip install" in finding.fix


def test_a_plugin_without_effect(monkeypatch):
    """Another plugin put vLLM's class back."""
    monkeypatch.setattr(
        KVConnectorFactory, "get_connector_class_by_name", lambda name: UpstreamConnector
    )
    finding = only(assert_sentences(installation.check_plugin()))
    assert finding.status == ERROR and "does not support HMA" in finding.message


# Hash


def test_hashes_that_agree_and_differ():
    own = hashing.block_hash("sha256_cbor")
    assert len(own) == 64
    finding = only(assert_sentences(hashing.check_hash(lambda: own)))
    assert finding.status == OK and own[:16] in finding.message
    finding = only(assert_sentences(hashing.check_hash(lambda: "0" * 64)))
    assert finding.status == ERROR and "sha256_cbor" in finding.fix


def test_a_seed_in_the_environment(monkeypatch):
    """vLLM mixes it into every hash: an engine without it finds nothing."""
    without = hashing.block_hash("sha256_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = hashing.block_hash("sha256_cbor")
    assert seeded != without
    good, bad = assert_sentences(hashing.check_hash(lambda: seeded))
    assert (good.status, bad.status) == (OK, WARNING) and "PYTHONHASHSEED=7" in bad.message
