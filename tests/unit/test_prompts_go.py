# SPDX-License-Identifier: Apache-2.0
"""Prompts that are kept for KV cache events go with a reset; a file without an end stops nobody."""

import io
import itertools
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from lmcache_hybrid.core.digests import PLAIN
from lmcache_hybrid.protocol.changes import DISK
from lmcache_hybrid.storage.disk import prompts_file as module
from lmcache_hybrid.storage.disk.files import PROMPTS_FILES
from lmcache_hybrid.storage.disk.prompt_entries import PromptEntries
from lmcache_hybrid.storage.disk.prompts_file import PromptsFile

from .helpers import N
from .test_known_prompts import (
    CBOR,
    Life,
    blocks_of,
    first_life,
    forged,
    prefix_key,
    prompt,
    restarted,
)
from .test_kv_events import record, saved


def test_a_reset_leaves_no_prompt(tmp_path) -> None:
    one = prompt(1)
    life, _ = first_life(tmp_path, one)
    assert one.block_hashes[0] in life.path.read_bytes()
    life.scheduler.end_reset(bool(life.scheduler.begin_reset()))
    life.settled()
    assert not life.path.exists() or life.path.read_bytes() == life.file._entries.header
    saved(life, prompt(2), 3)
    life.settled()
    assert len(restarted(tmp_path, one, prompt(2))) == 6


@pytest.mark.parametrize("when", ["evicted", "read", "full"])
def test_a_reset_leaves_no_prompt_whatever_the_engine_is_at(tmp_path, monkeypatch, when) -> None:
    one = prompt(1)
    life, _ = first_life(tmp_path, one)
    if when == "evicted":  # nothing is known, so nothing is published
        for at in (3, 2, 1):
            life.stored(one, at, (at,), tier=None)
        life.settled()
        assert one.block_hashes[0] in life.path.read_bytes()
    elif when == "read":
        life = Life(tmp_path)
        life.report(*((record(prefix_key(one, at)), DISK) for at in range(3)))
        assert life.file.recalling
    else:
        monkeypatch.setattr(module, "create_anew", Mock(side_effect=OSError(28, "full")))
    life.scheduler.end_reset(bool(life.scheduler.begin_reset()))
    life.settled()
    assert not life.path.exists() or one.block_hashes[0] not in life.path.read_bytes()
    assert not Path(life.file._new).exists()


def test_a_file_without_an_end_holds_up_nobody(tmp_path) -> None:
    forged(tmp_path, *blocks_of(prompt(1)))
    path, one = tmp_path / PROMPTS_FILES[0], prompt(1)
    os.truncate(path, 1 << 40)  # a hole
    assert len(restarted(tmp_path, one)) == 6
    entries = PromptEntries(N, N, CBOR, PLAIN)
    entry = entries.entry(blocks_of(one)[0])
    stop = Mock(return_value=False)
    assert len(entries.read(io.BytesIO(entry + bytes(200)), {one.block_hashes[0]}, stop)) == 1
    assert stop.call_count == 2, "a hole is read entry by entry"
    endless = Mock(read=Mock(side_effect=itertools.cycle((entry[:20], entry[20:]))))
    asked = iter(range(10))
    assert len(entries.read(endless, {one.block_hashes[0]}, lambda: next(asked) == 9)) == 1
    file = PromptsFile(str(tmp_path), entries)
    file._closing = True
    assert file._read({one.block_hashes[0]}) == []
    file.close()
