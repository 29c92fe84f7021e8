# SPDX-License-Identifier: Apache-2.0
"""Engines of several users in one folder: what one cannot read is a miss, and stays."""

import os
import stat
from collections import Counter
from pathlib import Path

import pytest
import torch

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.storage.record_format import HEADER_BYTES

from ..helpers import payload_of, put
from ..other_users import ALICE, BOB, GROUP, as_user, needs_root, open_tmp  # noqa: F401
from ..store_box import KEYS, SIZE, Box, flip, until

pytestmark = needs_root


@pytest.fixture
def folder(open_tmp) -> Path:  # noqa: F811
    folder = open_tmp / "records"
    folder.mkdir()
    return folder


def store(folder: Path) -> None:
    Box("fs", folder, None).write().close()


def requests(folder: Path, count: int) -> Counter[str]:
    """Ask for one prompt again and again: look up, load what is promised, store otherwise."""
    seen: Counter[str] = Counter()
    box = Box("fs", folder, None)
    for _ in range(count):
        located = box.store.locate(KEYS)
        if len(located) < len(KEYS):
            seen["miss"] += 1
            put(box.store, KEYS, SIZE)
            until(lambda: box.used() == box.start, "writes do not end")
            continue
        try:
            for key, payload in zip(KEYS, box.read(), strict=True):
                assert torch.equal(payload, payload_of(key, SIZE))
            seen["hit"] += 1
        except (LoadError, RecordError) as error:
            seen[error.reason] += 1
    seen["failed writes"] = box.store.failed_writes["RemoteBackend"]
    box.close()
    return +seen


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


def test_users_of_a_group_share_a_folder_whatever_their_umask_is(folder):
    """As docs/security.md has it: root's folder, of the group, with the set-group-ID bit."""
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    as_user(ALICE, lambda: store(folder))
    for path in records(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660 and path.stat().st_gid == GROUP
    assert as_user(BOB, lambda: requests(folder, 3)) == {"hit": 3}
    as_user(BOB, lambda: store(folder))
    assert {path.stat().st_uid for path in records(folder)} == {BOB}
    assert as_user(ALICE, lambda: requests(folder, 3)) == {"hit": 3}


def test_elsewhere_files_follow_the_umask(folder):
    folder.chmod(0o777)
    as_user(ALICE, lambda: store(folder), umask=0o022)
    assert {stat.S_IMODE(path.stat().st_mode) for path in records(folder)} == {0o644}
    assert as_user(BOB, lambda: requests(folder, 3)) == {"hit": 3}


def test_what_another_user_keeps_to_himself_is_a_miss_and_is_never_deleted(folder):
    """Each failed load deleted one of them."""
    folder.chmod(0o755)
    os.chown(folder, ALICE, GROUP)
    as_user(ALICE, lambda: store(folder))
    assert as_user(BOB, lambda: requests(folder, 6)) == {"miss": 6, "failed writes": 24}
    assert len(records(folder)) == len(KEYS)
    assert as_user(ALICE, lambda: requests(folder, 1)) == {"hit": 1}


def test_in_a_sticky_folder_private_records_of_others_fail_no_load(folder):
    folder.chmod(0o1777)
    as_user(ALICE, lambda: store(folder))
    assert as_user(BOB, lambda: requests(folder, 6)) == {"miss": 6, "failed writes": 24}
    assert as_user(ALICE, lambda: requests(folder, 1)) == {"hit": 1}
    assert len(list(folder.iterdir())) == len(KEYS), "something is left of failed writes"


def test_in_a_sticky_folder_a_damaged_record_of_others_fails_one_load(folder):
    """Nobody but its owner can delete or replace it."""
    folder.chmod(0o1777)
    as_user(ALICE, lambda: store(folder), umask=0o022)
    path = records(folder)[1]
    path.write_bytes(flip(HEADER_BYTES + 60)(path.read_bytes()))
    seen = as_user(BOB, lambda: requests(folder, 6))
    assert seen == {"checksum": 1, "miss": 5, "failed writes": 20}


def test_a_folder_that_cannot_be_written_is_read(folder):
    as_user(0, lambda: store(folder), umask=0o022)
    folder.chmod(0o555)
    before = {path: path.read_bytes() for path in records(folder)}

    def use() -> tuple[Counter[str], int]:
        seen = requests(folder, 2)
        box = Box("fs", folder, None)
        put(box.store, KEYS, SIZE)
        until(lambda: box.store.failed_writes["RemoteBackend"] == len(KEYS), "not counted")
        until(lambda: box.used() == box.start, "failed writes keep their buffers")
        return seen, len(box.store.locate(KEYS))

    assert as_user(BOB, use) == ({"hit": 2}, len(KEYS))
    assert {path: path.read_bytes() for path in records(folder)} == before
