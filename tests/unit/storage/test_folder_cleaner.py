# SPDX-License-Identifier: Apache-2.0
"""Folders of fs:// are brought down to their limits: real files, LMCache's own writers."""

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.core.counts import Ledger, WorkerCounts
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage.folder import cleaner as module
from lmcache_hybrid.storage.folder.cleaner import LOW, FolderCleaner, start_cleaners
from lmcache_hybrid.storage.folder.file_uses import FileUses
from lmcache_hybrid.storage.folder.lock_file import CLEANER_LOCK, FolderLock
from lmcache_hybrid.storage.folder.record_files import (
    TEMPORARY,
    WRITING_SECONDS,
    RecordFile,
    record_files,
    temporary_prefix,
)
from lmcache_hybrid.storage.remote.record_connector import unwrapped

from ..helpers import payload_of
from ..lmcache_settings import lmcache_config
from ..other_users import ALICE, BOB, GROUP, as_user, needs_root, open_tmp  # noqa: F401
from ..store_box import KEYS, SIZE, Box, N, until

HOUR = 3600.0
# Further prompts of one page and one state.
OTHERS = [
    RecordKey(kind, group, bytes([50 + i]) * 32, N)
    for i in range(8)
    for kind, group in ((ATTENTION, 3), (STATE, 0))
]


class Cleaning:
    """Rounds of a cleaner, made by the test instead of its thread."""

    def __init__(self, folders: list[Path], limits: FolderLimits) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        # Its thread waits for the end.
        self.cleaner = FolderCleaner.__new__(FolderCleaner)
        run, FolderCleaner._run = FolderCleaner._run, lambda self: None
        try:
            self.cleaner.__init__([str(folder) for folder in folders], limits, self.count, 60.0)
        finally:
            FolderCleaner._run = run

    def count(self, why: str, size: int) -> None:
        self.counts[why] += 1
        self.bytes += size

    def round(self) -> None:
        self.cleaner._skip = 0
        try:
            self.cleaner.round()
        finally:
            self.cleaner._lock.release()


def uses_of(box: Box) -> FileUses:
    return unwrapped(box.backend.connection)._uses


def taken(folder: Path) -> int:
    return sum(file.taken for file in record_files(str(folder)))


def age(box: Box, keys, seconds: float) -> None:
    then = time.time() - seconds
    for key in keys:
        os.utime(box.path(key), (then, then))


def left(box: Box, keys) -> list[RecordKey]:
    return [key for key in keys if box.path(key).exists()]


def by_size(folder: Path, most: int) -> Cleaning:
    return Cleaning([folder], FolderLimits(max_bytes=most))


def test_by_size_the_least_recently_used_go(box):
    filled = box("fs").write([*KEYS, *OTHERS])
    size = taken(filled.folder) // 20
    for number, key in enumerate(OTHERS):
        age(filled, [key], HOUR - 60 * number)
    cleaning = by_size(filled.folder, 15 * size)
    assert not cleaning.round()
    gone = 20 - int(15 * LOW)
    assert left(filled, [*KEYS, *OTHERS]) == [*KEYS, *OTHERS[gone:]]
    assert cleaning.counts == {"size": gone} and cleaning.bytes == gone * size
    assert taken(filled.folder) <= 15 * size
    # What is left is as it was.
    for key, payload in zip(KEYS, filled.read(), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))
    # It is enough until more is written.
    cleaning.round()
    assert cleaning.counts == {"size": gone}


def test_nothing_goes_below_the_limit(box):
    filled = box("fs").write()
    age(filled, KEYS, 1000 * HOUR)
    cleaning = by_size(filled.folder, taken(filled.folder))
    cleaning.round()
    assert left(filled, KEYS) == KEYS and not cleaning.counts


def test_of_a_prompt_the_end_goes_first(box):
    filled = box("fs").write()
    age(filled, KEYS, HOUR)
    size = taken(filled.folder) // len(KEYS)
    for room, expected in [(3.5, KEYS[:3]), (2.5, KEYS[:2]), (1.5, KEYS[:1])]:
        by_size(filled.folder, int(room * size)).round()
        assert left(filled, KEYS) == expected


def test_what_is_hit_stays(box):
    """Files are deleted by their last hit, not by when they were written."""
    filled = box("fs").write([*KEYS, *OTHERS])
    age(filled, KEYS, 48 * HOUR)
    age(filled, OTHERS, 24 * HOUR)
    filled.store.refresh(KEYS)
    until(lambda: not uses_of(filled)._running, "the marks do not end")
    by_size(filled.folder, taken(filled.folder) // 4).round()
    assert left(filled, KEYS) == KEYS and left(filled, OTHERS) == []


def test_a_hit_is_marked_once_a_minute(box, monkeypatch):
    filled = box("fs").write()
    marked: list[str] = []
    monkeypatch.setattr(os, "utime", lambda path, **kwargs: marked.append(str(path)))
    for _ in range(3):
        filled.store.refresh(KEYS)
        until(lambda: not uses_of(filled)._running, "the marks do not end")
    assert sorted(marked) == sorted(str(filled.path(key)) for key in KEYS)
    monkeypatch.setattr(uses_of(filled), "_minute", -1)
    filled.store.refresh(KEYS[:1])
    until(lambda: not uses_of(filled)._running, "the marks do not end")
    assert len(marked) == 5, "not marked in the next minute"


def test_marks_of_files_that_are_gone_or_of_others_are_let_be(box, monkeypatch):
    filled = box("fs").write()
    filled.remove(KEYS[0])
    filled.store.refresh(KEYS)
    until(lambda: not uses_of(filled)._running, "the marks do not end")
    assert not filled.path(KEYS[0]).exists()

    def refuse(path, **kwargs):
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)
    filled.store.refresh(KEYS)
    until(lambda: not uses_of(filled)._running, "the marks do not end")


def test_by_age(box):
    filled = box("fs").write([*KEYS, *OTHERS])
    age(filled, OTHERS[:6], 25 * HOUR)
    age(filled, OTHERS[6:], 23 * HOUR)
    cleaning = Cleaning([filled.folder], FolderLimits(max_seconds=24 * HOUR))
    cleaning.round()
    assert left(filled, [*KEYS, *OTHERS]) == [*KEYS, *OTHERS[6:]]
    assert cleaning.counts == {"age": 6}


def test_by_age_and_then_by_size(box):
    filled = box("fs").write([*KEYS, *OTHERS])
    size = taken(filled.folder) // 20
    age(filled, OTHERS[:6], 25 * HOUR)
    age(filled, OTHERS[6:], 23 * HOUR)
    limits = FolderLimits(max_bytes=10 * size, max_seconds=24 * HOUR)
    cleaning = Cleaning([filled.folder], limits)
    cleaning.round()
    assert cleaning.counts == {"age": 6, "size": 5}
    assert left(filled, KEYS) == KEYS and taken(filled.folder) == 9 * size


def test_records_of_every_engine_count_and_go(box):
    """Those of other models, ranks and fingerprints have nobody else to delete them."""
    filled = box("fs").write()
    others = [
        box("fs", **other).write()
        for other in ({"fingerprint": bytes(16)}, {"model": "m"}, {"rank": 1})
    ]
    for other in others:
        age(other, KEYS, HOUR)
    by_size(filled.folder, taken(filled.folder) // 4).round()
    assert [left(each, KEYS) for each in others] == [[], [], []]
    assert 0 < len(left(filled, KEYS)) < 4  # LOW leaves some room


def test_what_is_not_ours_stays_and_does_not_count(box, tmp_path):
    filled = box("fs").write()
    folder, record = filled.folder, filled.path(KEYS[0])
    outside = tmp_path / "outside.data"
    outside.write_bytes(record.read_bytes())
    names = ["notes.txt", "x.data", "m@1@0@ab@bfloat16.data", record.stem + ".bak", CLEANER_LOCK]
    foreign = [folder / name for name in (*names, record.stem + ".pt")]
    for path in foreign:
        path.write_bytes(b"x" * 10**5)
    link = folder / record.name.replace("a3-", "a4-")
    link.symlink_to(outside)
    inner = folder / record.name.replace("a3-", "a5-")
    inner.mkdir()
    (inner / record.name).write_bytes(b"x")
    pipe = folder / record.name.replace("a3-", "a6-")
    os.mkfifo(pipe)
    then = time.time() - 1000 * HOUR
    for path in (*foreign, inner, outside):
        os.utime(path, (then, then))
    cleaning = by_size(folder, taken(folder))
    cleaning.round()
    assert left(filled, KEYS) == KEYS
    Cleaning([folder], FolderLimits(max_bytes=1, max_seconds=1e-6)).round()
    assert left(filled, KEYS) == []
    assert all(path.exists() for path in (*foreign, inner / record.name, outside))
    assert link.is_symlink() and pipe.is_fifo()


@pytest.mark.parametrize("limits", [FolderLimits(), FolderLimits(max_bytes=1 << 40)])
def test_a_file_in_the_writing_stays_and_one_of_a_killed_engine_goes(box, limits):
    """Without a limit, too. LMCache's own connector wrote to the record's name with .tmp."""
    filled = box("fs").write()
    ours = [filled.folder / f"{temporary_prefix()}{number}{TEMPORARY}" for number in range(2)]
    theirs = [filled.path(key).with_suffix(TEMPORARY) for key in KEYS[:2]]
    foreign = [filled.folder / "notes.tmp", filled.folder / ".lmcache-hybrid-writing-x.data"]
    for young, old in ours, theirs, foreign:
        for path, seconds in (young, WRITING_SECONDS / 2), (old, 2 * WRITING_SECONDS):
            path.write_bytes(b"half")
            os.utime(path, (time.time() - seconds,) * 2)
    cleaning = Cleaning([filled.folder], limits)
    cleaning.round()
    stay = {ours[0], theirs[0], *foreign, *map(filled.path, KEYS), filled.folder / CLEANER_LOCK}
    assert set(filled.folder.iterdir()) == stay
    assert cleaning.counts == {"unfinished": 2} and cleaning.bytes == 8


def test_what_a_killed_engine_left_is_looked_for_now_and_then(box):
    """However often: a folder without a limit did not grow over one."""
    filled = box("fs").write()
    cleaning = Cleaning([filled.folder], FolderLimits())
    for number in range(3):
        path = filled.folder / f"{temporary_prefix()}{number}{TEMPORARY}"
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
        cleaning.cleaner.round()
        assert not path.exists()


def test_several_folders_have_one_limit(box, tmp_path):
    folders = [tmp_path / "records", tmp_path / "more"]
    url = "fs://localhost:0" + ", ".join(map(str, folders))
    filled = box("fs", remote_url=url.replace(", ", ","))
    filled.write(OTHERS)
    sizes = [taken(folder) for folder in folders]
    assert all(sizes)
    Cleaning(folders, FolderLimits(max_bytes=max(sizes))).round()
    assert 0 < sum(map(taken, folders)) <= max(sizes)
    ledger = Ledger("worker", WorkerCounts())
    config = lmcache_config(remote_url=url)
    (started,) = start_cleaners(config, FolderLimits(max_bytes=1), ledger)
    try:
        until(lambda: not sum(map(taken, folders)), "not cleaned")
        until(lambda: ledger.counts.cleaned_records["size"] > 0, "not counted")
        assert ledger.counts.cleaned_bytes["size"] > 0 and ledger.report()
    finally:
        started.close()


@pytest.mark.parametrize("url", [None, "redis://localhost:6379"])
def test_other_stores_have_no_cleaner(url):
    config = lmcache_config(remote_url=url, remote_storage_plugins=["redis"])
    assert start_cleaners(config, FolderLimits(), Ledger("worker", WorkerCounts())) == []


def test_a_plugins_folders_are_cleaned_too(tmp_path):
    config = lmcache_config(
        remote_url=f"fs://localhost:0{tmp_path}/url",
        remote_storage_plugins=["fs", "fs.second"],
        extra_config={
            "remote_storage_plugin.fs.second.base_path": f"{tmp_path}/second",
            "fs_base_path": f"{tmp_path}/first, {tmp_path}/more",
        },
    )
    names = {name: tmp_path / name for name in ("url", "first", "second")}
    for folder in (*names.values(), tmp_path / "more"):
        folder.mkdir()
        left = folder / f"{temporary_prefix()}1{TEMPORARY}"
        left.touch()
        os.utime(left, (0, 0))
    cleaners = start_cleaners(config, FolderLimits(), Ledger("worker", WorkerCounts()))
    try:
        until(lambda: not list(tmp_path.glob(f"*/*{TEMPORARY}")), "not cleaned")
        assert len(cleaners) == 3
        assert all((folder / CLEANER_LOCK).exists() for folder in names.values())
    finally:
        for cleaner in cleaners:
            cleaner.close()
            cleaner._thread.join()


def test_where_one_cleaner_cannot_start_none_is_left(tmp_path, monkeypatch):
    """The engine then says that it deletes nothing."""
    config = lmcache_config(
        remote_url=f"fs://localhost:0{tmp_path}/url",
        remote_storage_plugins=["fs"],
        extra_config={"fs_base_path": f"{tmp_path}/plugin"},
    )
    started, start = [], threading.Thread.start

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError):
            start_cleaners(config, FolderLimits(), Ledger("worker", WorkerCounts()))
    until(lambda: not started[0].is_alive(), "a cleaner is left")


def test_without_limits_a_round_comes_once_an_hour(tmp_path, hybrid_log):
    """A file system without locks is no fault then."""
    config = lmcache_config(remote_url=f"fs://localhost:0{tmp_path}/away")
    (started,) = start_cleaners(config, FolderLimits(), Ledger("worker", WorkerCounts()))
    assert started._pause == module.SWEEP_SECONDS
    started.close()
    started._thread.join()
    assert not hybrid_log.records


# Rounds


def test_a_round_deletes_only_so_many(box, monkeypatch):
    monkeypatch.setattr(module, "MOST_DELETED", 3)
    filled = box("fs").write(OTHERS)
    age(filled, OTHERS[:8], 2 * HOUR)
    for limits in (
        FolderLimits(max_bytes=9 * taken(filled.folder) // 16, max_seconds=HOUR),
        FolderLimits(max_bytes=1),
    ):
        cleaning = Cleaning([filled.folder], limits)
        before = len(left(filled, OTHERS))
        cleaning.round()
        assert len(left(filled, OTHERS)) == before - 3
        for _ in range(2):
            cleaning.round()
    assert left(filled, OTHERS) == []


def test_after_as_many_it_pauses(box, monkeypatch):
    """A wrong clock would empty the folder before anybody sees it."""
    monkeypatch.setattr(module, "MOST_DELETED", 3)
    filled = box("fs").write(OTHERS)
    cleaning, left_then = by_size(filled.folder, 1), []

    class Closing(threading.Event):
        def wait(self, seconds: float) -> bool:
            if seconds == cleaning.cleaner._pause:
                left_then.append(len(left(filled, OTHERS)))
                self.set()
            return self.is_set()

    cleaning.cleaner._closing = Closing()
    cleaning.cleaner._run()
    assert left_then == [len(OTHERS) - 3]


def test_a_folder_that_did_not_grow_is_not_looked_at(box, monkeypatch):
    filled = box("fs").write()
    used, looks = [0], []
    monkeypatch.setattr(module, "_used_bytes", lambda folders: used[0])
    monkeypatch.setattr(module, "record_files", lambda f: looks.append(f) or record_files(f))
    cleaner = by_size(filled.folder, 2 * taken(filled.folder)).cleaner
    for _ in range(5):
        cleaner.round()
    assert len(looks) == 1
    used[0] = taken(filled.folder)
    cleaner.round()
    assert len(looks) == 1
    used[0] += 1
    cleaner.round()
    assert len(looks) == 2
    # Other programs may have deleted as much as engines wrote.
    used[0] = 0
    for _ in range(module.SKIPPED_ROUNDS + 1):
        cleaner.round()
    assert len(looks) == 3


def test_a_folder_that_is_away_ends_nothing(box, tmp_path, monkeypatch):
    filled = box("fs").write()
    age(filled, KEYS, HOUR)
    away = tmp_path / "away"
    filled.folder.rename(away)
    counts: Counter[str] = Counter()
    cleaner = FolderCleaner(
        [str(filled.folder)],
        FolderLimits(max_bytes=1),
        lambda why, size: counts.update([why]),
        pause=0.01,
    )
    try:
        time.sleep(0.05)
        away.rename(filled.folder)
        until(lambda: counts["size"] == 4 or not cleaner._thread.is_alive(), "it does nothing")
        assert counts["size"] == 4, "not cleaned after it came back"
    finally:
        cleaner.close()
        cleaner._thread.join()


def write(folder: Path, first: int, count: int, age: float) -> None:
    """Files of SIZE bytes with records' names, last used ``age`` seconds ago."""
    for number in range(first, first + count):
        path = folder / f"m@1@0@{number:x}@uint8@hybrid%a0-0123456789abcdef.data"
        path.write_bytes(bytes(SIZE))
        then = time.time() - age
        os.utime(path, (then, then))


@needs_root
def test_in_a_sticky_folder_each_user_cleans_what_is_his(open_tmp):  # noqa: F811
    """What others wrote earlier neither costs a user his own records nor is told of each time."""
    os.chown(open_tmp, 0, GROUP)
    open_tmp.chmod(0o3770)
    limits = FolderLimits(max_bytes=20 * SIZE, max_seconds=10 * HOUR)
    told: list[str] = []

    def rounds(first: int) -> list[int]:
        module.logger.warning = lambda text, *args: told.append(text)  # in this child only
        cleaning, left = Cleaning([open_tmp], limits), []
        for number in range(4):
            write(open_tmp, first + 8 * number, 8, HOUR - number)
            cleaning.cleaner._skip = 0
            cleaning.cleaner.round()
            other = FolderLock(str(open_tmp))
            assert other.hold(), "nobody else's turn comes"
            other.release()
            left.append(len([p for p in open_tmp.iterdir() if p.stat().st_uid == os.geteuid()]))
        return [*left, len(told), cleaning.cleaner._last[0]]

    as_user(ALICE, lambda: write(open_tmp, 0, 30, 5 * HOUR) or True)
    as_user(ALICE, lambda: write(open_tmp, 500, 10, 20 * HOUR) or True)
    *own, warnings, counted = as_user(BOB, lambda: rounds(1000))
    # The lock file is his, too.
    assert own == [9, 17, 20, 20] and warnings == 1 and counted == 19 * SIZE
    assert len(list(open_tmp.glob("*.data"))) == 40 + 19
    # Once it is her turn, hers go down to the limit, by age first.
    *_, warnings, counted = as_user(ALICE, lambda: rounds(2000))
    assert warnings == 1 and counted == 19 * SIZE


def test_files_that_may_not_be_deleted_stay_and_end_no_round(box, monkeypatch, hybrid_log):
    """As in a folder of root's on NFS; the user of these tests may delete everything."""
    filled = box("fs").write(OTHERS)
    age(filled, OTHERS[::2], HOUR)
    foreign = {str(filled.path(key)) for key in OTHERS[:6:2]}

    class Deleting:
        @staticmethod
        def unlink(path: str) -> None:
            if path in foreign:
                raise PermissionError(1, "Operation not permitted")
            os.unlink(path)

        def __getattr__(self, name: str):
            return getattr(os, name)

    monkeypatch.setattr(module, "os", Deleting())
    limits = FolderLimits(max_bytes=taken(filled.folder), max_seconds=HOUR / 2)
    cleaning = Cleaning([filled.folder], limits)
    cleaning.round()
    assert left(filled, OTHERS) == sorted(OTHERS[:6:2] + OTHERS[1::2], key=OTHERS.index)
    assert cleaning.counts == {"age": 5}
    cleaning.round()
    told = [line for line in hybrid_log.messages if "may not be deleted" in line]
    assert len(told) == 1, "one warning, not one for each file"
    assert cleaning.cleaner._last[0] == taken(filled.folder) - 3 * (taken(filled.folder) // 11)


def test_closed_in_the_middle_it_deletes_no_more(box, monkeypatch):
    monkeypatch.setattr(module, "DELETED", 1)
    filled = box("fs").write(OTHERS)
    started: list[FolderCleaner] = []
    cleaner = FolderCleaner(
        [str(filled.folder)],
        FolderLimits(max_bytes=1),
        lambda why, size: (until(lambda: bool(started), "no cleaner"), started[0].close()),
        pause=60.0,
    )
    started.append(cleaner)
    cleaner._thread.join()
    assert len(left(filled, OTHERS)) == len(OTHERS) - 1
    assert FolderLock(str(filled.folder)).hold(), "it is still locked"


def test_a_file_that_is_gone_has_no_depth(tmp_path):
    file = RecordFile(str(tmp_path / "gone.data"), 0.0, 1)
    assert file.depth() < (-(10**9), 0)
