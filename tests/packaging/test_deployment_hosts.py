# SPDX-License-Identifier: Apache-2.0
"""The files for one engine on several hosts: examples/docker/hosts.yaml, and Kubernetes'."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from lmcache_hybrid.tools.cli import app
from tests.packaging.deployment_files import (
    DOCKER,
    KUBERNETES,
    ROOT,
    accept,
    compose,
    engine_arguments,
    filled,
    load,
    plain,
    pod_of,
)

N = 272
PAGE = (ROOT / "docs/hosts.md").read_text()
MODEL, RANKS, LENGTH = "Qwen/Qwen3.5-397B-A17B", 16, 65_536
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


def objects() -> dict[str, dict[str, Any]]:
    """Those of Kubernetes by kind."""
    text = (KUBERNETES / "hosts.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def template() -> dict[str, Any]:
    return objects()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]


def pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The spec and the only container of the first pod, and of the others."""
    parts = template()["leaderTemplate"], template()["workerTemplate"]
    return [pod_of({"spec": {"template": part}}) for part in parts]


def commands(where: str) -> list[list[str]]:
    """The words behind ``vllm serve`` on each host."""
    if where == "compose":
        variables = {"MODEL": MODEL, "FIRST_HOST": "10.0.0.1"}
        services = load(DOCKER / "hosts.yaml")["services"]
        return [
            [
                re.sub(r"\$\{(\w+):\?[^}]+\}", lambda found: variables[found[1]], filled(word))
                for word in services[name]["command"]
            ]
            for name in ("first", "second")
        ]
    args = [container["args"] for _, container in pods()]
    return [
        [_with_variables(word, template()["size"], index) for word in words]
        for index, words in enumerate(args)
    ]


def _with_variables(word: str, size: int, index: int) -> str:
    """As Kubernetes puts in what LeaderWorkerSet has set."""
    known = {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": index, "LWS_LEADER_ADDRESS": "first.lws"}
    return re.sub(r"\$\((\w+)\)", lambda found: str(known[found[1]]), word)


def parsed(words: list[str]) -> argparse.Namespace:
    """As vLLM takes them, but for the two flags that are of ``vllm serve`` alone."""
    words = list(words)
    if "--host" in words:
        at = words.index("--host")
        del words[at : at + 2]
    return engine_arguments([word for word in words[1:] if word != "--headless"])


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_hosts_differ_in_their_rank_alone(where: str) -> None:
    first, second = commands(where)
    assert first[0] == second[0] == MODEL
    assert "--headless" in second and "--headless" not in first
    if where == "compose":  # the host's network, so every address without it
        assert first[first.index("--host") + 1] == "127.0.0.1"
        first = [word for word in first if word not in ("--host", "127.0.0.1")]
    one, two = (vars(parsed(words)) for words in (first, second))
    for each in (one, two):
        each["kv_transfer_config"].engine_id = ""  # random
    assert {name for name in one if str(one[name]) != str(two[name])} == {"node_rank"}
    assert (one["node_rank"], two["node_rank"], one["nnodes"]) == (0, 1, 2)
    assert one["master_addr"] == {"compose": "10.0.0.1", "kubernetes": "first.lws"}[where]
    assert (one["tensor_parallel_size"], one["max_model_len"]) == (RANKS, LENGTH)
    assert one["enable_prefix_caching"]


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_options_of_lmcache_are_accepted_and_hold_what_the_page_says(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if where == "compose":
        text = (DOCKER / "lmcache.yaml").read_text()
    else:
        text = objects()["ConfigMap"]["data"]["lmcache.yaml"]
    here = tmp_path / "lmcache.yaml"
    here.write_text(text.replace("/var/lib/lmcache-hybrid", str(tmp_path)))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(here))
    lmcache = accept(parsed(commands(where)[0]).kv_transfer_config, N, monkeypatch)
    ram, disk = lmcache.max_local_cpu_size, lmcache.max_local_disk_size
    words = "plan", "Qwen3.5-397B-A17B", "--tp", str(RANKS), "--context", str(LENGTH)
    said = json.loads(CliRunner().invoke(app, [*words, "--prompts", "1", "--json"]).stdout)
    one = {name: backend["taken"] for name, backend in said["backends"].items()}
    held = [int(RANKS * gb * 2**30 // one[at]) for gb, at in ((ram, "ram"), (disk, "disk"))]
    assert held[0] >= 8 and held[1] >= 4
    row = (
        f"{ram:.0f} GB / {disk:.0f} GB x {RANKS} ranks: {held[0]} / {held[1]} prompts of {LENGTH:,}"
    )
    assert row in PAGE


def test_compose_runs_on_the_hosts_network_as_on_one_machine() -> None:
    project, one = load(DOCKER / "hosts.yaml"), compose()["services"]["vllm"]
    first, second = (project["services"][name] for name in ("first", "second"))
    for service in (first, second):
        assert service["network_mode"] == "host" and "ports" not in service
        for part in ("build", "ipc", "restart", "logging", "stop_grace_period", "deploy"):
            assert service[part] == one[part], part
        assert service["volumes"][1:] == one["volumes"][1:]
        assert service["volumes"][0] == one["volumes"][0]
        assert service["environment"]["VLLM_HOST_IP"].startswith("${HOST_IP:?")
        for name in INTERFACES:
            assert service["environment"][name].startswith("${INTERFACE:?")
    shared = set(first["environment"]) - {"VLLM_API_KEY"}
    assert (
        set(second["environment"])
        == shared
        == {*one["environment"], "VLLM_HOST_IP", *INTERFACES} - {"VLLM_API_KEY"}
    )
    for line in (
        f"export MODEL={MODEL} FIRST_HOST=10.0.0.1 VLLM_API_KEY=...",
        "export HOST_IP=10.0.0.1 INTERFACE=eth0 ",
        "docker compose -f examples/docker/hosts.yaml up --build --detach first ",
        "docker compose -f examples/docker/hosts.yaml up --build --detach second ",
    ):
        assert line in PAGE and line in (DOCKER / "hosts.yaml").read_text()


def test_the_leaderworkerset_has_what_its_kind_has() -> None:
    jsonschema.validate(
        objects()["LeaderWorkerSet"], load(Path(__file__).with_name("leaderworkerset.yaml"))
    )


def test_pods_of_one_engine_differ_in_the_api_alone() -> None:
    (first_pod, first), (other_pod, other) = pods()
    assert first_pod | {"containers": []} == other_pod | {"containers": []}
    probes = {"startupProbe", "livenessProbe", "readinessProbe"}
    assert first.keys() - other.keys() == {"ports"} | probes
    for part in other.keys() - {"args", "env"}:
        assert first[part] == other[part], part
    by_name = {each["name"]: each for each in first["env"]}
    assert [by_name.pop(each["name"]) for each in other["env"]] == other["env"]
    assert by_name.keys() == {"VLLM_API_KEY"}
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {"name": "VLLM_HOST_IP", "valueFrom": address} in other["env"]
    pod, container = pod_of(plain()["Deployment"])
    assert first_pod["securityContext"] == pod["securityContext"]
    for part in ("image", "command", "securityContext", "volumeMounts", "readinessProbe"):
        assert first[part] == container[part], part


def test_ranks_fit_the_pods_gpus_and_their_pools_its_memory() -> None:
    (_, container), _ = pods()
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus * template()["size"] == RANKS
    lmcache = yaml.safe_load(objects()["ConfigMap"]["data"]["lmcache.yaml"])
    (memory,) = re.findall(r"^(\d+)Gi$", container["resources"]["requests"]["memory"])
    assert gpus * lmcache["max_local_cpu_size"] + gpus * 20 <= int(memory)
    claims = {each["metadata"]["name"]: each for each in template()["volumeClaimTemplates"]}
    room = claims["records"]["spec"]["resources"]["requests"]["storage"]
    assert gpus * lmcache["max_local_disk_size"] < int(room.removesuffix("Gi"))
    mounted = {each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"] for each in pods()[0][0]["volumes"]}
    assert mounted == volumes | claims.keys() and not volumes & claims.keys()


def test_the_service_leads_to_the_first_pod_and_prometheus_finds_it() -> None:
    found = objects()
    name = found["LeaderWorkerSet"]["metadata"]["name"]
    service = found["Service"]
    label = "leaderworkerset.sigs.k8s.io"
    assert service["spec"]["selector"] == {f"{label}/name": name, f"{label}/worker-index": "0"}
    assert service["metadata"]["name"] != name, "LeaderWorkerSet makes a headless one of this name"
    monitor = load(KUBERNETES / "servicemonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    assert monitor["endpoints"][0]["port"] == port["name"]
    secrets = {each["name"] for each in pods()[0][1]["env"] if "secretKeyRef" in str(each)}
    assert secrets == {"VLLM_API_KEY"} and "kubectl create secret generic hybrid-keys" in PAGE
    assert pods()[0][0]["volumes"][0]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
