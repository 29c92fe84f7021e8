# SPDX-License-Identifier: Apache-2.0
"""Folders of ``fs://`` (``*.data``) and of LMCache's ``local_disk`` (``*.pt``)."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lmcache_hybrid.config.stores import BY_SCHEME
from lmcache_hybrid.config.stores.fs import Folders
from lmcache_hybrid.core.errors import ConfigError, StoreError
from lmcache_hybrid.storage.disk.files import open_regular
from lmcache_hybrid.storage.folder.lock_file import LOCK_NAMES
from lmcache_hybrid.storage.folder.record_files import (
    DATA,
    TEMPORARY,
    WRAPPER_BYTES,
    is_temporary,
    key_of,
    record_files,
)
from lmcache_hybrid.storage.key_names import printable
from lmcache_hybrid.storage.record_format import HEADER_BYTES
from lmcache_hybrid.tools.stored.record_store import Entry

LOCAL_DISK = ".pt"
# Max folders to name, and to look into, where a folder holds no record itself.
NAMED, LOOKED_INTO = 5, 1000
LOCAL_DISK_NOTE = (
    "local_disk keeps its index in memory: an engine finds only the files of its own fingerprint "
    "again when it starts, counts those of others towards its limit and evicts them first. Until "
    "it misses them, a running engine still counts purged files towards its limit."
)


class FolderStore:
    """Regular files directly in ``folders``; links and anything else are not ours."""

    def __init__(self, folders: list[Path]) -> None:
        self.name = printable(", ".join(map(str, folders)))
        self.notes: list[str] = []
        self.foreign = 0
        self._unreadable = 0
        # Read a folder that is named twice only once.
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))

    def entries(self) -> Iterator[Entry]:
        self.foreign = self._unreadable = 0
        empty = True
        for folder in self._folders:
            try:
                with os.scandir(folder) as files:
                    for file in files:
                        for entry in self._entry(file):
                            empty = False
                            yield entry
            except OSError as error:
                raise StoreError(
                    f"{printable(str(folder))} cannot be read ({error.strerror}); run this as the "
                    "user of the engine."
                ) from error
        if self._unreadable:
            self.notes.append(
                f"{self._unreadable} files with names of ours cannot be read and are left out; run "
                "this as the user of the engine."
            )
        if empty and (inside := _with_records_inside(self._folders)):
            self.notes.append(f"Records are in {printable(', '.join(inside))}: name that folder.")

    def _entry(self, file: os.DirEntry) -> Iterator[Entry]:
        if file.name in LOCK_NAMES or is_temporary(file.name):
            return
        key = key_of(file.name, DATA, TEMPORARY, LOCAL_DISK)
        if key is None or not file.is_file(follow_symlinks=False):
            self.foreign += 1
            return
        wrapped = not file.name.endswith(LOCAL_DISK)
        if not wrapped and LOCAL_DISK_NOTE not in self.notes:
            self.notes.append(LOCAL_DISK_NOTE)
        offset = WRAPPER_BYTES if wrapped else 0
        try:
            with open_regular(file.path) as data:
                status = os.fstat(data.fileno())
                head = data.read(offset + HEADER_BYTES)
        except FileNotFoundError:
            return  # an engine evicted or replaced it
        except OSError:
            self._unreadable += 1
            return
        yield Entry(
            key,
            file.path,
            max(0, status.st_size - offset),
            status.st_size,
            max(0.0, time.time() - status.st_mtime),
            head[offset:],
            head[:offset] if wrapped else None,
            "a file that LMCache did not finish" if file.name.endswith(TEMPORARY) else None,
            in_place=not wrapped,
        )

    @contextmanager
    def open(self, entry: Entry) -> Iterator[BinaryIO]:
        with open_regular(entry.where) as data:
            data.seek(0 if entry.wrapper is None else WRAPPER_BYTES)
            yield data

    def delete(self, wheres: Iterable[str]) -> int:
        deleted = 0
        for where in wheres:
            try:
                os.unlink(where)
                deleted += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(
                    f"{printable(where)} cannot be deleted ({error.strerror}) after "
                    f"{deleted} others were; run this as the user of the engine."
                ) from error
        for folder in self._folders:
            with contextlib.suppress(OSError):
                _delete_unfinished(folder)
        return deleted

    def close(self) -> None:
        return


def open_url(store: str) -> FolderStore:
    """Open the folders that a URL names.

    Raises:
        ConfigError: no engine takes this URL, or a folder does not exist.
    """
    kind = BY_SCHEME[store.partition("://")[0].lower()]
    assert isinstance(kind, Folders)
    return open_folders(kind.folders_of_url(store, "STORE"))


def open_folders(folders: Iterable[str]) -> FolderStore:
    """Open folders. Raises ConfigError where one does not exist."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(
                f"STORE {str(path)!r} is not a folder; name the one with the records."
            )
    return FolderStore(paths)


def _with_records_inside(folders: list[Path]) -> list[str]:
    """List folders directly in ``folders`` that hold records; those that cannot be read do not."""
    found: list[str] = []
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as inside:
            for each in itertools.islice(inside, LOOKED_INTO):
                if len(found) < NAMED and each.is_dir() and _holds_records(each.path):
                    found.append(each.path)
    return sorted(found)


def _holds_records(folder: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        return any(key_of(file.name, DATA, LOCAL_DISK) for file in files)
    return False


def _delete_unfinished(folder: Path) -> None:
    """Delete unfinished files of killed engines."""
    for file in record_files(str(folder), TEMPORARY):
        if file.unfinished and is_temporary(os.path.basename(file.path)):
            os.unlink(file.path)
