# SPDX-License-Identifier: Apache-2.0
"""One engine whose ranks Ray places on two hosts: ``--distributed-executor-backend ray``.

vLLM's CPU platform is replaced by one that Ray can count (:mod:`ray_platform`).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests import ROOT
from tests.e2e.api_server import COMMAND
from tests.e2e.blocks import block_size
from tests.e2e.lan import Host, end, lan
from tests.e2e.prompts import prompt
from tests.e2e.test_hosts import BLOCKS, CLOCKS, Engine, addresses, check_strangers, until

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.two_cores,
    pytest.mark.timeout(1200),
]

PORT = 6379
TENSOR_PARALLEL = "--tensor-parallel-size", "2"


def paths(folder: Path) -> str:
    """PYTHONPATH with the platform, which is installed in ``folder`` for that."""
    info = folder / "ray_cpu-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_cpu=tests.e2e.ray_platform:name\n"
    )
    return f"{ROOT}:{folder}"


@contextmanager
def cluster(hosts: Sequence[Host], devices: Sequence[int], folder: Path) -> Iterator[None]:
    """Ray on hosts that have so many devices each; the first one is the head.

    A host's ranks read LMCache's options from the file with its number in ``folder``.
    """
    # Below it are sockets, whose paths must be short. Each host sees files of its own there.
    temporary = tempfile.mkdtemp(prefix="ray")
    head = f"{hosts[0].address}:{PORT}"
    with ExitStack() as stack:
        stack.callback(os.rmdir, temporary)
        for number, (host, count) in enumerate(zip(hosts, devices, strict=True)):
            log = folder / f"ray{number}.log"
            mount = ["mount", "-t", "tmpfs", "tmpfs", temporary]
            assert host.start(mount, os.environ, log).wait() == 0
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
            command += ["--num-cpus=1", f"--num-gpus={count}", "--disable-usage-stats"]
            command += [f"--node-ip-address={host.address}", "--object-store-memory=100000000"]
            at = [f"--port={PORT}", f"--temp-dir={temporary}", "--include-dashboard=false"]
            command += [f"--address={head}"] if number else ["--head", *at]
            environment = os.environ | {
                "LMCACHE_CONFIG_FILE": str(folder / f"{number}.yaml"),
                "PYTHONPATH": paths(folder),
            }
            node = host.start(command, environment, log)
            stack.callback(end, node)

            def started(log: Path = log, node: subprocess.Popen = node) -> bool:
                said = log.read_text()
                assert node.poll() is None, said
                return "Ray runtime started" in said

            until(started)
        yield


class RayEngine(Engine):
    """An engine on the first host of a :func:`cluster`, and healthy."""

    def _spread(self) -> list[str]:
        return ["--distributed-executor-backend", "ray"]

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
        own = {
            "RAY_ADDRESS": f"{self._hosts[0].address}:{PORT}",
            "RAY_DEDUP_LOGS": "0",
            # Of the first host. Ranks on others keep what their host has.
            "LMCACHE_CONFIG_FILE": str(self._at / "0.yaml"),
            "PYTHONPATH": paths(self._at),
        }
        self.log.write_bytes(b"")
        self.other_log.write_bytes(b"")
        command = [sys.executable, str(COMMAND), *arguments]
        self.other = self._hosts[0].start(command, {**environment, **own}, self.log)
        return self.other  # the only one


def test_one_engine_on_two_hosts_of_a_ray_cluster(model_dir: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    tokens = BLOCKS * block_size(model)
    ids = prompt("ray", tokens + 9)
    lmcache = {"local_cpu": False, "max_local_disk_size": 1}
    with lan(*CLOCKS) as network, cluster(network.hosts, (1, 1), tmp_path):
        with RayEngine(model, network.hosts, tmp_path, lmcache, *TENSOR_PARALLEL) as engine:
            answer = engine.ask(ids)
            # Ray kills ranks, so they must have written before.
            until(lambda: len(engine.files()[0]) == len(engine.files()[1]) > BLOCKS)
            assert engine.brought() == 0
        with RayEngine(model, network.hosts, tmp_path, lmcache, *TENSOR_PARALLEL) as engine:
            assert engine.hits(ids, answer) == tokens
            check_strangers(engine, network.hosts)
            assert engine.reset() == 200
            assert engine.hits(ids, answer) == 0, "a host has kept what was reset"
            engine.forget()
            assert engine.hits(ids, answer) == tokens


def test_the_scheduler_is_on_a_host_without_ranks(model_dir: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    tokens = BLOCKS * block_size(model)
    ids = prompt("ray", tokens + 9)
    with (
        lan(*CLOCKS) as network,
        cluster(network.hosts, (0, 2), tmp_path),
        RayEngine(model, network.hosts, tmp_path, {}, *TENSOR_PARALLEL) as engine,
    ):
        answer = engine.ask(ids)
        there = f"//{network.hosts[1].address}"
        assert [each.split(":")[1] for each in addresses(engine)] == [there, there]
        engine.forget()
        assert engine.hits(ids, answer) == tokens
