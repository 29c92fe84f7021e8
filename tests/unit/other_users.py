# SPDX-License-Identifier: Apache-2.0
"""Parts of a test as other users of this machine, in processes of their own."""

import os
import pickle
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

import pytest
import torch

ALICE, BOB, GROUP = 41_001, 41_002, 41_000
SECONDS = 90

T = TypeVar("T")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become two other users; run the tests as root"
)


def as_user(user: int, job: Callable[[], T], umask: int = 0o077) -> T:
    """Call ``job`` in a child of this process, where PyTorch has one thread.

    It would wait for those that the fork has left behind.

    Returns:
        What it returned, pickled.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            os.setgroups([GROUP])
            os.setgid(GROUP)
            os.setuid(user)
            os.umask(umask)
            with os.fdopen(write, "wb") as out:
                pickle.dump(job(), out)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as result:
            if not wait([result], SECONDS):  # select has room for 1,024 descriptors only
                raise TimeoutError(f"user {user} is not done")
            data = result.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert data, "see what the child printed"
    return pickle.loads(data)


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A folder that every user can reach; pytest's is for the user of the tests alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
