# SPDX-License-Identifier: Apache-2.0
"""``fs://`` on a file server that stalls in the middle of a read, and answers later."""

import gc

import pytest
import torch

from . import store_box as stores
from .helpers import payload_of
from .storage.test_fs_faults import hangs, load_fails
from .store_box import KEYS, SIZE, until

box = stores.box


@pytest.fixture
def no_collection():
    """Memory comes back when it is released, not when Python happens to look for cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(60)
def test_a_read_that_timed_out_keeps_its_memory_until_it_ends_and_no_longer(
    box, no_collection, monkeypatch
):
    one = box("fs", blocking_timeout_secs=0.2).write()
    with hangs(monkeypatch, "readv"):
        assert load_fails(one, KEYS[:1]) == "unreachable"
        assert one.used() > one.start
    until(lambda: one.used() == one.start, "the read kept its memory")
    assert torch.equal(one.read(KEYS[:1])[0], payload_of(KEYS[0], SIZE))
