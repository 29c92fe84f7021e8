# SPDX-License-Identifier: Apache-2.0
"""What an engine does in a run: start, save, load from each tier, reset, sleep, stop, restart."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from lmcache_hybrid.core.errors import ConfigError
from tests.sim.program import TRUNKS
from tests.sim.storage import N

from .deployment import Deployment

PROMPT = TRUNKS[0][: 4 * N + 3]
OTHER = TRUNKS[1][: 3 * N + 1]
RAM, DISK = "LocalCPUBackend", "LocalDiskBackend"
# Seconds after which an engine with a whole store must load again.
RECOVERY = 15.0
# Seconds after which what ends must have ended.
REST = 5.0
# Threads of this package.
OURS = "hybrid-"


class Refused(Exception):
    """The engine does not start, and says so in one sentence."""


def make_folder(folder: Path) -> None:
    """The files beside a model's weights, an adapter, and folders of stores."""
    for name in ("model", "disk", "shared", "adapter"):
        (folder / name).mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    (folder / "adapter/adapter_config.json").write_text("{}")


def options(folder: Path, store: str) -> dict[str, Any]:
    """LMCache's options for a store: "disk", "fs" or the URL of a server."""
    common = {
        "max_local_cpu_size": 0.004,
        "lookup_timeout_ms": 2000,
        "blocking_timeout_secs": 2,
    }
    if store == "disk":
        return common | {"local_disk": f"{folder}/disk", "max_local_disk_size": 0.01}
    if store == "fs":
        cleaned = {"hybrid_fs_max_size_gb": 1}
        store = f"fs://localhost:0/{folder}/shared"
        return common | cleaned | {"remote_url": store, "local_cpu": False}
    return common | {"remote_url": store, "local_cpu": False}


def start(folder: Path, store: str, patch: Any) -> Deployment:
    """Start an engine. Raises Refused."""
    try:
        return Deployment(folder / "model", options(folder, store), store == "disk", patch)
    except ConfigError as error:
        text = str(error)
        assert text.endswith(".") and "\n" not in text, f"not one sentence: {text}"
        raise Refused(text) from error


def play(folder: Path, store: str, patch: Any) -> tuple[int, bool]:
    """Two lives of an engine. Raises Refused.

    Returns:
        How many prompts were loaded, and whether prompts are loaded at the end of both lives.
    """
    engine = start(folder, store, patch)
    lora = LoRARequest("adapter", 1, f"{folder}/adapter")
    engine.add("first", PROMPT, 3)
    engine.drain()
    engine.settle()
    engine.ask("again", PROMPT)
    engine.evict(RAM)
    engine.ask("from below", PROMPT)
    for name in ("lora", "lora again"):
        engine.ask(name, OTHER, lora)
        engine.settle()
    _abort(engine)
    engine.sleep()
    if not engine.scheduler.reset_prefix_cache(reset_connector=True):
        engine.scheduler.reset_prefix_cache()
    for name in ("new", "new again"):
        engine.ask(name, PROMPT)
        engine.settle()
    loads = _loads_again(engine)
    _end(engine)
    hits = engine.hits
    engine = start(folder, store, patch)
    engine.ask("after a restart", PROMPT)
    loads = _loads_again(engine) and loads
    _end(engine)
    return hits + engine.hits, loads


def _loads_again(engine: Deployment) -> bool:
    """Whether a prompt that comes now is stored and loaded, from below RAM where it is kept."""
    until = time.monotonic() + RECOVERY
    for number in itertools.count():
        before, prompt = engine.hits, TRUNKS[2][number % 300 :][: 3 * N + 1]
        engine.ask(f"later {number}", prompt)
        engine.settle()
        engine.evict(RAM)
        engine.ask(f"later {number} again", prompt)
        if engine.hits > before:
            return True
        if engine.off or time.monotonic() > until:
            return False


def _abort(engine: Deployment) -> None:
    """Abort a request that is being looked up, and one that loads."""
    engine.scheduler.reset_prefix_cache()
    engine.add("asked", PROMPT, 2)
    engine.step()
    engine.abort("asked")
    engine.drain()
    engine.add("loading", PROMPT, 2)
    until = time.monotonic() + 1.0
    while not engine.is_loading("loading") and time.monotonic() < until:
        engine.step()
    engine.abort("loading")
    engine.drain()


def _end(engine: Deployment) -> None:
    """Raises AssertionError where something is left."""
    engine.drain()
    # A claim of a lookup that was cancelled is dropped with a later step.
    until = time.monotonic() + REST
    while True:
        try:
            engine.check_empty()
            break
        except AssertionError:
            if time.monotonic() > until:
                raise
            engine.step()
            time.sleep(0.01)
    engine.stop()
    until = time.monotonic() + REST
    while left := [each.name for each in threading.enumerate() if each.name.startswith(OURS)]:
        assert time.monotonic() < until, f"threads outlive the engine: {left}"
        time.sleep(0.01)
