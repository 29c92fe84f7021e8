# SPDX-License-Identifier: Apache-2.0
"""accept in the image: the job for Kubernetes, and the command for Compose."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_hybrid.tools.accept.run import Run
from lmcache_hybrid.tools.cli import app
from tests.packaging.deployment_files import (
    KUBERNETES,
    ROOT,
    compose,
    engine_arguments,
    filled,
    load,
    model_spec,
    plain,
    pod_of,
)

ACCEPT = ROOT / "docs/accept.md"
RECORDS = "/var/lib/lmcache-hybrid"  # the volume that outlives the container
# The module, which its package hides behind the function.
CLI = importlib.import_module("lmcache_hybrid.tools.cli.accept")


def job() -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec and the only container of accept.yaml."""
    return pod_of(load(KUBERNETES / "accept.yaml"))


def test_the_job_accepts_what_the_deployment_serves() -> None:
    """The same image, flags, file, volumes and GPUs; else its verdict is about something else."""
    pod, served = pod_of(plain()["Deployment"])
    accepting, container = job()
    for part in ("volumes", "securityContext", "automountServiceAccountToken"):
        assert accepting[part] == pod[part]
    for part in ("image", "resources", "volumeMounts", "securityContext"):
        assert container[part] == served[part]
    assert all(each in served["env"] for each in container["env"])
    missing = {each["name"] for each in served["env"] if each not in container["env"]}
    assert missing == {"VLLM_API_KEY"}
    model, option, report, dashes, *flags = container["args"]
    assert (option, dashes) == ("--out", "--")
    assert report.rpartition("/")[0] in [mount["mountPath"] for mount in served["volumeMounts"]]
    dropped = {"shutdown_timeout", "kv_transfer_config"}  # as without them: nothing is computed
    ours, theirs = (vars(engine_arguments(each)) for each in (flags, served["args"][1:]))
    assert {name for name in theirs if str(ours[name]) != str(theirs[name])} <= dropped
    assert (
        model == served["args"][0] and load(KUBERNETES / "accept.yaml")["spec"]["backoffLimit"] == 0
    )


class Asked(Exception):
    """In place of an engine, with its arguments."""


@pytest.mark.parametrize("where", ["compose", "job"])
def test_the_command_in_the_image_is_one_that_accept_takes(
    where: str, monkeypatch, tmp_path: Path
) -> None:
    if where == "compose":
        page = ACCEPT.read_text().replace("\\\n  ", "")
        line, shown = re.findall(r"^docker compose .*run .*$", page, re.M)
        head, words = line.split(" --entrypoint lmcache-hybrid vllm ")
        assert head == "docker compose -f examples/docker/compose.yaml run --build --rm"
        words = shlex.split(words.replace("$MODEL", model_spec()["modelURL"]))
        served = compose()["services"]["vllm"]["command"][1:]
    else:
        container = job()[1]
        name, *words = [*container["command"], *container["args"]]
        assert name == "lmcache-hybrid"
        served = pod_of(plain()["Deployment"])[1]["args"][1:]

    report = words[words.index("--out") + 1]
    assert where == "job" or f" --entrypoint cat vllm {report} >" in shown
    assert report.startswith(f"{RECORDS}/")
    words[words.index("--out") + 1] = report.replace(RECORDS, str(tmp_path))

    def engine(*arguments: Any) -> None:
        raise Asked(*arguments)

    monkeypatch.setattr(CLI, "Engine", engine)
    monkeypatch.setattr(CLI, "need_host", lambda _: None)
    monkeypatch.setattr(Run, "ask_engines", lambda self, start: start())
    said = CliRunner().invoke(app, words).exception
    assert isinstance(said, Asked), said
    model, flags, *_ = said.args
    assert model == model_spec()["modelURL"]
    ours, theirs = engine_arguments(flags), engine_arguments([filled(word) for word in served])
    for option in ("tensor_parallel_size", "max_model_len"):
        assert getattr(ours, option) == getattr(theirs, option)
