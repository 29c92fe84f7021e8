# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM in a process of its own, so that its output stays apart and nothing is left running."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, TextIO


def start_module(
    module: str, log: IO, environment: Mapping[str, str], *, own_session: bool
) -> tuple[subprocess.Popen, TextIO]:
    """Start ``python -m MODULE FD``, which reads JSON from standard input and answers on FD.

    Args:
        log: takes what it and its libraries print.
        environment: of the process, whole.
        own_session: keep Ctrl-C from it; the caller then ends its process group.

    Returns:
        The process, with a text pipe as ``stdin``, and its answers, a JSON value per line. The
        caller closes both.
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
            start_new_session=own_session,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, os.fdopen(read_fd)
