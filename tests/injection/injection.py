# SPDX-License-Identifier: Apache-2.0
"""Raises an error in one call that this package makes out of itself: the n-th at one place.

One hook for all of them. Calls of the file system, sockets, threads and LMCache are wrapped; a
wrapper walks the stack up to the innermost frame of this package, which is the *place*. Without a
plan it records what was called from where; with one it raises in that call.
"""

import builtins
import errno
import fcntl
import functools
import inspect
import io
import mmap
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import zmq

ROOT = Path(__file__).parents[2]
OURS = (f"{ROOT}/lmcache_hybrid/", f"{ROOT}/vllm_patch/")
# What the standard library does to show an error is no call of this package, and neither is what
# the rig does in vLLM's place.
NOT_OURS = ("/logging/__init__.py", "/linecache.py", "/traceback.py", "/importlib/", "/tests/")
DEPTH = 40

FILES = {
    os: "open stat lstat fstat scandir listdir rename replace unlink utime statvfs access mkdir "
    "makedirs fchmod write dup sched_setaffinity sched_getaffinity",
    builtins: "open",
    io: "open",
    mmap: "mmap",
    fcntl: "flock",
}
SOCKETS = {
    socket.socket: "connect send sendall sendmsg recv recv_into",
    zmq.Socket: "bind connect send_multipart recv_multipart send recv setsockopt",
}
# LMCache's modules whose classes count; what they do without a file, a socket or a lock is theirs.
LMCACHE = ("lmcache.v1.storage_backend", "lmcache.v1.cache_engine", "lmcache.v1.manager")
LMCACHE += ("lmcache.v1.rpc", "lmcache.inprocess", "lmcache.integration.vllm")
LMCACHE += ("lmcache.observability", "lmcache.v1.metadata", "lmcache.v1.config")

FILE_ERRORS = (errno.EIO, errno.EACCES, errno.ENOENT, errno.ENOSPC, errno.EMFILE)
SOCKET_ERRORS = (errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE)


@dataclass(frozen=True, order=True)
class Call:
    """One call out of this package.

    Attributes:
        place: file and line of the innermost frame of this package.
        function: of that frame.
        name: what is called.
        number: which call of this name at this place it is, from 1 on.
    """

    place: str
    function: str
    name: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.place} {self.function}: {self.name} #{self.number}"


def errors_of(name: str) -> list[Exception]:
    """The errors that a call by this name may raise."""
    kind, _, function = name.partition(".")
    if kind == "lmcache":
        return [RuntimeError("injected"), OSError(errno.EIO, "injected")]
    if kind == "thread":
        return [RuntimeError("can't start new thread (injected)")]
    if kind == "zmq":
        return [zmq.ZMQError(errno.EMFILE, "injected"), zmq.Again(errno.EAGAIN)]
    if kind == "socket":
        return [OSError(number, "injected") for number in SOCKET_ERRORS]
    return [OSError(number, f"injected: {os.strerror(number)}", name) for number in FILE_ERRORS]


class Injection:
    """Wraps the calls of this process. Not undone: use it in a process of its own.

    Attributes:
        calls: how often each (place, function, name) was reached.
        raised: whether the planned error was raised.
    """

    def __init__(self, call: Call | None = None, error: Exception | None = None) -> None:
        """Record only, or raise ``error`` in ``call``."""
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.raised = False
        self.active = False
        self.planned = (call.place, call.function, call.name) if call else None
        self._number, self._error = call.number if call else 0, error
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap everything. Modules of LMCache that are imported later are left alone."""
        for kind, table in (("file", FILES), ("socket", SOCKETS)):
            for owner, names in table.items():
                label = "zmq" if owner is zmq.Socket else kind
                for name in names.split():
                    self._wrap(owner, name, f"{label}.{name}", DEPTH)
        self._wrap(threading.Thread, "start", "thread.start", DEPTH)
        for name, module in sorted(sys.modules.items()):
            if name.startswith(LMCACHE):
                self._wrap_classes(module)
        for name, module in sorted(sys.modules.items()):
            if name.startswith(("lmcache_hybrid.", "vllm_patch.")):
                self._wrap_functions(module)
        self.active = True

    def _wrap_functions(self, module: ModuleType) -> None:
        """Wrap the functions of LMCache that a module of ours has imported."""
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__.startswith(LMCACHE):
                self._wrap(module, name, f"lmcache.{name}", 1)

    def _wrap_classes(self, module: ModuleType) -> None:
        for cls in list(vars(module).values()):
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            if issubclass(cls, (BaseException, tuple)):
                continue
            for name, function in list(vars(cls).items()):
                if inspect.isfunction(function) and not name.startswith("__"):
                    self._wrap(cls, name, f"lmcache.{cls.__name__}.{name}", 1)

    def _wrap(self, owner: Any, name: str, label: str, depth: int) -> None:
        original = getattr(owner, name)
        wrapped = self._called(original, label, depth)
        setattr(owner, name, wrapped)

    def _called(self, original: Callable, label: str, depth: int) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                self.reach(sys._getframe(1), label, depth)
            return original(*args, **kwargs)

        return call

    def reach(self, frame: FrameType | None, label: str, depth: int) -> None:
        """Note a call, and raise where it is the planned one."""
        while frame is not None and depth:
            file = frame.f_code.co_filename
            if file.startswith(OURS) and "/tools/" not in file:
                break
            if any(part in file for part in NOT_OURS):
                return
            frame, depth = frame.f_back, depth - 1
        else:
            return
        place = f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        site = place, frame.f_code.co_name, label
        with self._lock:
            self.calls[site] += 1
            hit = site == self.planned and self.calls[site] == self._number
            self.raised |= hit
        if hit:
            assert self._error is not None
            raise self._error
