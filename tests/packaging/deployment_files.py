# SPDX-License-Identifier: Apache-2.0
"""The files for Docker and Kubernetes as their programs read them."""

import argparse
import re
from pathlib import Path
from typing import Any

import yaml
from vllm.engine.arg_utils import EngineArgs

ROOT = Path(__file__).parents[2]
DOCKER, KUBERNETES = ROOT / "examples/docker", ROOT / "examples/kubernetes"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, Any]:
    return load(DOCKER / "compose.yaml")


def values() -> dict[str, Any]:
    return load(KUBERNETES / "values.yaml")


def plain() -> dict[str, dict[str, Any]]:
    """The objects of deployment.yaml by kind; claims by name."""
    objects = yaml.safe_load_all((KUBERNETES / "deployment.yaml").read_text())
    return {o["metadata"]["name"] if "Claim" in o["kind"] else o["kind"]: o for o in objects}


def pod_of(deployment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its pod's spec and the only container."""
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def valkey() -> tuple[dict[str, Any], dict[str, Any]]:
    (deployment,) = [o for o in values()["extraObjects"] if o["kind"] == "Deployment"]
    return pod_of(deployment)


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
