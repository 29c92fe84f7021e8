# SPDX-License-Identifier: Apache-2.0
"""Drives an engine that runs in a process of its own, see :mod:`~.child`."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lmcache_hybrid.tools.accept.compare import Answer
from lmcache_hybrid.tools.subprocesses import kill_group, send, start_module

CHILD = "lmcache_hybrid.tools.accept.child"
# Max seconds to wait for LMCache's queued writes, for the engine's end, for its workers' end.
FLUSH_SECONDS = 300
STOP_SECONDS = 90
GONE_SECONDS = 20
POLL_SECONDS = 1.0
LOG_LINES = 15


class EngineError(RuntimeError):
    """The engine refused to start, or died. The message says why, if known.

    Attributes:
        refused: whether the message is a sentence with the fix, and the log adds nothing.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Engine:
    """``with Engine(model, flags, log) as engine: engine.ask(...)``; one thread.

    Attributes:
        facts: the engine's own facts, once it has started.
    """

    def __init__(self, model: str, flags: Sequence[str], log: Path, environment: dict) -> None:
        """Start the process. Entering the context waits for the engine; leaving it ends both.

        Args:
            flags: of ``vllm serve``.
            log: the engine's output is appended to it.
            environment: of the process.
        """
        self._log = log
        self.facts: dict[str, Any] = {}
        with log.open("ab") as file:
            self._written = file.tell()
            self._process, self._replies = start_module(CHILD, file, environment)
        self._start = {"model": model, "flags": list(flags)}

    def __enter__(self) -> "Engine":
        try:
            self.facts = self.call("start", **self._start)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def close(self) -> None:
        """Wait for LMCache's queued writes, then end the engine."""
        try:
            self.settle()
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and its children."""
        kill_group(self._process)
        self._replies.close()
        # Workers release device memory only when they are gone, and the next engine needs it.
        deadline = time.monotonic() + GONE_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)

    def call(self, verb: str, **arguments: Any) -> Any:
        """Run one verb of :class:`lmcache_hybrid.tools.accept.child.Child`.

        Raises:
            EngineError: the verb failed, or the engine is gone.
        """
        send(self._process, {"verb": verb, **arguments})
        line = self._reply()
        if not line:
            raise self._error(f"exit code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise self._error(reply["error"])
        return reply["result"]

    def _reply(self) -> str:
        """Read the next line; "" once the process is gone.

        Forked workers hold the pipe open and can outlive a killed engine, so do not wait for EOF.
        """
        while not wait([self._replies.fileno()], POLL_SECONDS):
            gone = self._process.poll() is not None
            if gone and not wait([self._replies.fileno()], 0):
                return ""
        return self._replies.readline()

    def ask(
        self, prompts: Sequence[Sequence[int]], salt: str, save: bool, tokens: int = 0
    ) -> list[Answer]:
        """Ask prompts at once, greedy.

        Args:
            salt: prompts of another salt are never hit.
            save: whether the connector may store them.
            tokens: of an answer; 0 for the acceptance test's default.
        """
        answers = self.call("ask", prompts=prompts, salt=salt, save=save, tokens=tokens)
        return [Answer(**answer) for answer in answers]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, not the store.

        Raises:
            EngineError: blocks stay in use.
        """
        deadline = time.monotonic() + 30
        while not self.call("forget"):
            if time.monotonic() > deadline:
                raise EngineError("vLLM did not empty its prefix cache: blocks are still in use")
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until everything saved can be found and is written.

        Raises:
            EngineError: LMCache's writes do not end.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while sum(self.call("rank", method="accept_pending")):
            if time.monotonic() > deadline:
                raise EngineError(f"LMCache's writes did not end within {FLUSH_SECONDS} seconds")
            time.sleep(0.05)

    def use(self, tiers: Sequence[str] | None) -> None:
        """Restrict lookups on every rank to these of LMCache's backends; None lifts it."""
        self.call("rank", method="accept_use", arguments=[tiers])

    def lose(self, group: int | None) -> None:
        """Make every rank lose a block of this group with each load; None ends that."""
        self.call("rank", method="accept_lose", arguments=[group])

    def reads(self) -> dict[str, int]:
        """Return the records read since the start, by backend, over all ranks."""
        total: dict[str, int] = {}
        for rank in self.call("rank", method="accept_reads"):
            for tier, count in rank.items():
                total[tier] = total.get(tier, 0) + count
        return total

    def copies(self) -> list[dict[str, Any]]:
        """Return the results of :meth:`~.worker.AcceptExtension.accept_copies`, by rank."""
        return self.call("rank", method="accept_copies")

    def metrics(self) -> dict[str, float]:
        """Return this package's totals; histograms as ``..._sum`` and ``..._count``."""
        return self.call("metrics")

    def _error(self, said: str) -> EngineError:
        """Make the error to raise, with its cause from the log."""
        with self._log.open("rb") as file:
            file.seek(self._written)
            log = file.read().decode(errors="replace")
        return EngineError(reason_in(log) or said, refused=sentence_in(log) is not None)


_ERROR = re.compile(r"(\w+(?:Error|Exception|Exit)): (.+)")
_USER = re.compile(r"""://[^\s'"<>]*@""")


def sentence_in(log: str) -> str | None:
    """Find our first error sentence in a log."""
    return next((text for kind, text in _ERROR.findall(log) if kind == "ConfigError"), None)


def cause_in(log: str) -> str | None:
    """Find the last error in a log that is not a consequence of another."""
    causes = [
        f"{kind}: {text}"
        for kind, text in _ERROR.findall(log)
        if "See root cause" not in text and "initialization failed" not in text
    ]
    return next(reversed(causes), None)


def reason_in(log: str) -> str | None:
    """Find why an engine ended in its log, without users and passwords."""
    reason = sentence_in(log) or cause_in(log)
    return None if reason is None else redacted(reason)


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """Return the log's last lines, without users and passwords."""
    return redacted("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))


def redacted(text: str) -> str:
    """Remove users and passwords of URLs."""
    return _USER.sub("://...@", text)
