# SPDX-License-Identifier: Apache-2.0
"""The files for Docker and Kubernetes as their programs read them."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_hybrid.config.lmcache_config import load_lmcache_config, settle_lmcache_config
from lmcache_hybrid.config.options import read_options

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


def accept(transfer: KVTransferConfig, size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an engine with blocks of this size checks at start-up; LMCache's configuration."""
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    config = SimpleNamespace(kv_transfer_config=transfer)
    lmcache = load_lmcache_config(config)
    for name in transfer.kv_connector_extra_config:
        assert hasattr(lmcache, name.removeprefix("lmcache.")), f"LMCache has no {name}"
    settle_lmcache_config(lmcache, size)
    read_options(config, lmcache)
    return lmcache
