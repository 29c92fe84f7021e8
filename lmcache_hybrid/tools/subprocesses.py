# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM in a process of its own, so that its output stays apart and nothing is left running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any, TextIO


def start_module(
    module: str, log: IO, environment: Mapping[str, str]
) -> tuple[subprocess.Popen, TextIO]:
    """Start ``python -m MODULE FD``, which reads JSON from standard input and answers on FD.

    Ctrl-C does not reach it: the caller must end it, with :func:`kill_group` at last.

    Args:
        log: gets its output.
        environment: the whole environment of the process.

    Returns:
        The process, with a text pipe as ``stdin``, and its answers, a JSON value per line, which
        the caller closes.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env=environment,
            text=True,
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, os.fdopen(read_fd)


def send(process: subprocess.Popen, message: Any) -> None:
    """Write a line of JSON; if the process is gone, reading its answers shows it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def kill_group(process: subprocess.Popen) -> None:
    """End a process with its own session, and its children. Closes its ``stdin``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # unsent data
            process.stdin.close()
