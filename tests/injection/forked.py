# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a fork of this process, with an error injected: nothing is left of it."""

import faulthandler
import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_hybrid.core import faults
from tests.sim.setup import base_config

from .injection import Call, Injection
from .program import Refused, make_folder, play

# Seconds after which a run is stuck; several times what one takes on a busy machine.
LIMIT = 90
# What an engine says that loads nothing from then on, or until LMCache connects anew (the last).
OFF = re.compile(
    "LMCache is off on this rank|LMCache could not open its store|"
    "LMCache loads and stores nothing on this rank|"
    "A reset of all caches failed: this engine computes every prompt|"
    "Failed to initialize/re-establish remote connection"
)


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        error: what was wrong; "" for nothing.
        refused: why the engine did not start, in one sentence.
        raised: whether the error was injected.
        hits: prompts that were loaded.
        loads: whether prompts were loaded at the end of both lives.
        caught: errors that :mod:`lmcache_hybrid.core.faults` caught, by place.
        calls: every (place, function, name), and how often it was reached.
        output: what it printed.
    """

    error: str = ""
    refused: str = ""
    raised: bool = False
    hits: int = 0
    loads: bool = False
    caught: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[tuple[str, str, str], int]] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong with it; "" for nothing."""
        if self.error or self.refused or self.loads or OFF.search(self.output):
            return self.error
        return "no prompt is loaded any more, and no warning says why"


def warm_up() -> None:
    """What all runs share; a collection of garbage in each would copy all of it."""
    import lmcache_hybrid.connector  # noqa: F401

    base_config()
    gc.collect()
    gc.freeze()


def run(store: str, call: Call | None = None, error: Exception | None = None) -> Outcome:
    """Run the program in a fork.

    Args:
        store: see :func:`.program.options`.
        call: where to raise ``error``; None only records.
    """
    folder = Path(tempfile.mkdtemp(prefix="inj", dir="/tmp"))  # short: it holds sockets
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _in_child(folder, store, Injection(call, error))
        finally:
            os._exit(1)
    try:
        return _wait(child, folder, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(child: int, folder: Path, began: float) -> Outcome:
    ended = 0
    while not ended and time.monotonic() < began + LIMIT:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    result, output = folder / "result.json", folder / "output"
    outcome = Outcome(error="the run did not end" if not ended else "the process died")
    if result.exists():
        values = json.loads(result.read_text())
        values["calls"] = [(tuple(site), count) for site, count in values["calls"]]
        outcome = Outcome(**values)
    outcome.output = output.read_text(errors="replace") if output.exists() else ""
    outcome.seconds = time.monotonic() - began
    return outcome


def _in_child(folder: Path, store: str, injection: Injection) -> None:
    number = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # pytest has its own
    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:  # made with the one of before
                handler.setStream(sys.stderr)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(LIMIT - 5, file=2)
    torch.set_num_threads(1)
    # Of the parent, which expects no error that it did not plan.
    os.environ.pop(faults.STRICT, None)
    if injection.planned is None:
        os.environ[faults.STRICT] = "1"
    faults.COUNTS.clear()
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    make_folder(folder / "files")
    outcome: dict[str, Any] = {"error": "", "refused": ""}
    injection.install()
    try:
        outcome["hits"], outcome["loads"] = play(folder / "files", store, patch)
    except Refused as refusal:
        outcome["refused"] = str(refusal)
    except BaseException:
        outcome["error"] = traceback.format_exc()
    injection.active = False
    outcome["raised"] = injection.raised
    outcome["caught"] = dict(Counter(faults.COUNTS))
    outcome["calls"] = sorted(injection.calls.items())
    (folder / "result.new").write_text(json.dumps(outcome))
    (folder / "result.new").rename(folder / "result.json")
    os._exit(0)
