# SPDX-License-Identifier: Apache-2.0
"""``fs://`` on a file server that stalls in the middle of a read, and answers later."""

import contextlib
import gc
import os

import pytest

from lmcache_hybrid.core.errors import LoadError

from . import store_box as stores
from .store_box import KEYS, until

box = stores.box


@pytest.fixture
def no_collection():
    """Memory comes back when it is released, not when Python happens to look for cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(60)
def test_a_read_that_timed_out_keeps_its_memory_until_it_ends_and_no_longer(box, no_collection):
    """A pipe in the place of the file gives its first bytes at once and the others later."""
    one = box("fs", blocking_timeout_secs=1).write()
    path = one.path(KEYS[0])
    stored = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    server = os.open(path, os.O_RDWR)
    os.write(server, stored[: one.metadata_bytes])
    claim = one.store.claim(one.store.locate(KEYS[:1]))
    with pytest.raises(LoadError):
        one.fetch(claim, KEYS[:1])
    assert one.used() > one.start
    os.write(server, stored[one.metadata_bytes :])
    os.close(server)
    with contextlib.suppress(TimeoutError):
        until(lambda: one.used() == one.start, "the read to end")
    assert one.used() == one.start, "the read kept its memory"
