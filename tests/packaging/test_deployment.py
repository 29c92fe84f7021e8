# SPDX-License-Identifier: Apache-2.0
"""The files for Docker and Kubernetes, as far as they can be checked without running them."""

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_hybrid.config import load_lmcache_config, read_options, settle_lmcache_config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples/docker"
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
    arguments = engine_arguments(vllm["command"][1:])
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


def test_dockerfile_copies_all_that_the_wheel_needs() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = {
        source for line in re.findall(r"^COPY (.+)$", text, re.M) for source in line.split()[:-1]
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "lmcache_hybrid", "vllm_patch"}
    assert all((ROOT / source).exists() for source in copied)


def test_dockerfile_names_supported_versions() -> None:
    from packaging.version import Version

    from vllm_patch.versions import LMCACHE_RANGE, VLLM_RANGE

    text = (DOCKER / "Dockerfile").read_text()
    for pattern, bounds in (
        (r"^ARG VLLM_IMAGE=\S+:v(\S+)$", VLLM_RANGE),
        (r"^ARG LMCACHE=lmcache==(\S+)$", LMCACHE_RANGE),
    ):
        (found,) = re.findall(pattern, text, re.M)
        assert Version(bounds[0]) <= Version(found) < Version(bounds[1])


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
    """Of production-stack's values.yaml (chart 0.1.9); a key that it lacks would be ignored."""
    assert values().keys() <= {"servingEngineSpec", "routerSpec", "extraObjects"}
    assert model_spec().keys() <= {
        *("name", "repository", "tag", "modelURL", "replicaCount", "pvcStorage"),
        *("requestCPU", "requestMemory", "requestGPU", "vllmConfig"),
    }


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
        assert KVTransferConfig(**({"kv_role": "kv_both"} | config)).kv_connector == (
            "LMCacheConnectorV1"
        )
