# SPDX-License-Identifier: Apache-2.0
"""LMCache's remote backends without our repairs: ``fs://``."""

import gc
import os

import pytest

from lmcache_hybrid.storage.remote import connectors as remote

from .raw import KEYS, SIZE, Raw, happens
from .repair import shows_bug_of

A = KEYS[0]


@pytest.fixture
def make():
    """Make engines with LMCache's own remote backend for a URL."""
    made = []

    def engine(url: str, **settings) -> Raw:
        made.append(Raw("RemoteBackend", remote_url=url, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@shows_bug_of(remote._release_late_reads)
def test_a_read_that_timed_out_keeps_its_buffer(make, tmp_path):
    """A pipe in the place of the file gives its first bytes at once and the others later."""
    one = make(f"fs://localhost:0{tmp_path}", blocking_timeout_secs=0.5).write([A])
    (path,) = tmp_path.glob("*.data")
    stored = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    server = os.open(path, os.O_RDWR)
    first = len(stored) - SIZE
    os.write(server, stored[:first])
    gc.disable()
    try:
        assert one.backend.get_blocking(A) is None
        assert one.used() > one.start
        os.write(server, stored[first:])
        return not happens(lambda: one.used() == one.start)
    finally:
        os.close(server)
        gc.enable()
