# SPDX-License-Identifier: Apache-2.0
"""LMCache's ``local_disk`` made to survive restarts and write errors.

``LocalDiskBackend`` keeps its index in memory, so a restart forgets every
file it wrote. A record's header says what the file holds, so the index is
rebuilt from the files themselves.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from vllm.logger import init_logger

from lmcache_hybrid.errors import RecordError
from lmcache_hybrid.files import open_regular
from lmcache_hybrid.record import HEADER_BYTES, read_header, record_bytes

if TYPE_CHECKING:
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

logger = init_logger("vllm.lmcache_hybrid.local_disk")

SUFFIX = ".pt"
EVICTED = ".evicted"


def record_shape(size: int) -> torch.Size:
    """Shape of a record of ``size`` bytes in LMCache's [2, layers, tokens, hidden] format."""
    return torch.Size([1, 1, 1, size])


def restore_index(
    backend: "LocalDiskBackend", model_name: str, fingerprint: bytes, metadata: "LMCacheMetadata"
) -> int:
    """Index the records of this model, layout and rank that lie on disk.

    Header and length are checked here, the payload's checksum when it is
    loaded. Files of anybody else stay where they are, unindexed. The oldest
    files come first, so that LMCache's policy evicts them first.

    Mutates ``backend``. Returns the number of records.
    """
    prefix = f"{model_name}@{metadata.world_size}@{metadata.worker_id}@".replace("/", "-")
    for file in Path(backend.path).glob("*" + EVICTED):  # by an engine that was killed
        if file.name.startswith(prefix):
            file.unlink(missing_ok=True)
    files = [p for p in Path(backend.path).glob("*" + SUFFIX) if p.name.startswith(prefix)]
    restored = damaged = 0
    for file in sorted(files, key=_written_at):
        try:
            key = _key_of(file, model_name)
            if not _belongs(file, fingerprint):
                continue
        except (OSError, RecordError, ValueError, KeyError) as error:
            damaged += 1
            logger.debug("Left %s alone: %s", file.name, error)
            continue
        size = file.stat().st_size
        if backend._key_to_path(key) != str(file) or (
            backend.current_cache_size + size > backend.max_cache_size
        ):
            continue
        backend.insert_key(key, size, record_shape(size), torch.uint8, MemoryFormat.KV_2LTD)
        backend.current_cache_size += size
        backend.usage += size
        restored += 1
    logger.info(
        "local_disk %s: %d records (%.1f MB) of this model found again, %d files left alone.",
        backend.path,
        restored,
        backend.current_cache_size / 1e6,
        damaged,
    )
    return restored


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _key_of(file: Path, model_name: str) -> CacheEngineKey:
    """The key a file is named after; parsed without the model, whose name may hold any sign."""
    rest = file.name.removeprefix(model_name.replace("/", "-")).removesuffix(SUFFIX)
    key = CacheEngineKey.from_string("model" + rest)
    key.model_name = model_name
    return key


def _belongs(file: Path, fingerprint: bytes) -> bool:
    """Whether the file is a whole record written under ``fingerprint``.

    Raises:
        RecordError: not a record, or cut off.
    """
    with open_regular(str(file)) as data:
        header = read_header(data.read(HEADER_BYTES))
    if header.fingerprint != fingerprint:
        return False
    found, whole = file.stat().st_size, record_bytes(header.length)
    if found != whole:
        raise RecordError("length", f"{found} bytes of {whole}")
    return True


def forget(backend: "LocalDiskBackend", key: CacheEngineKey) -> None:
    """Remove one record, its file and its share of the size account."""
    with backend.disk_lock:
        entry = backend.dict.get(key)
    try:
        backend.remove(key)
    except FileNotFoundError:
        pass
    finally:
        # Out of the index whether or not the file could be deleted.
        if entry is not None:
            backend.current_cache_size -= entry.size


def account_for_lost_files(backend: "LocalDiskBackend") -> None:
    """Take a file that is gone out of the size account. Mutates ``backend``.

    Bug: ``read_file`` drops the index entry of a missing file, but not its size.
    Symptom: each lost file makes local_disk smaller, until it takes nothing.
    Remove when: ``read_file`` lowers ``current_cache_size`` with the entry.
    """
    read = backend.read_file

    @functools.wraps(read)
    def read_file(key: CacheEngineKey, buffer: memoryview, path: str) -> None:
        with backend.disk_lock:
            entry = backend.dict.get(key)
        read(key, buffer, path)
        with backend.disk_lock:
            if entry is not None and key not in backend.dict:
                backend.current_cache_size -= entry.size
                backend.usage -= entry.size

    backend.read_file = read_file


def delete_on_a_thread(backend: "LocalDiskBackend") -> None:
    """Evicting takes no time from the step that stores. Mutates ``backend``.

    Bug: ``submit_put_task`` deletes what it evicts in the caller's thread.
    Symptom: with a full local_disk a save holds up its step several times as long, most of
    it for the file system, which gives back the cached pages of each file.
    Remove when: ``LocalDiskBackend.remove`` deletes elsewhere.
    """
    remove = backend.remove
    thread = ThreadPoolExecutor(1, thread_name_prefix="hybrid-delete")
    numbers = itertools.count()

    @functools.wraps(remove)
    def remove_later(key: CacheEngineKey, force: bool = True) -> bool:
        entry = backend.dict.get(key)
        if entry is not None:
            old = Path(f"{entry.path}.{os.getpid()}.{next(numbers)}{EVICTED}")
            with contextlib.suppress(OSError):
                os.rename(entry.path, old)
                Path(entry.path).touch()  # for LMCache to delete
                thread.submit(old.unlink, missing_ok=True)
        return remove(key, force)

    backend.remove = remove_later


def survive_write_errors(
    backend: "LocalDiskBackend", failed: Callable[[int], None] = lambda records: None
) -> None:
    """Undo what a failed write leaves behind. Mutates ``backend``.

    Args:
        failed: told how many records were not written.

    LMCache's writer lets an OSError (disk full, folder gone) end its job
    before it released the buffer, the size account and the in-flight mark:
    each failure leaks a buffer of the CPU pool and blocks the key for ever.
    Remove when: ``async_save_bytes_to_disk`` cleans up after itself.
    """
    write = backend.async_save_bytes_to_disk
    warned = False

    @functools.wraps(write)
    def async_save_bytes_to_disk(key: CacheEngineKey, memory_obj: MemoryObj, **kwargs: Any) -> None:
        nonlocal warned
        size = memory_obj.get_physical_size()
        try:
            write(key=key, memory_obj=memory_obj, **kwargs)
        except (OSError, ValueError) as error:
            with backend.disk_lock:
                backend.current_cache_size -= size
            backend.usage -= len(memory_obj.byte_array)
            backend.disk_worker.remove_put_task(key)
            with contextlib.suppress(OSError, ValueError):
                Path(backend._key_to_path(key)).unlink()
            memory_obj.ref_count_down()
            failed(1)
            if not warned:
                warned = True
                logger.warning(
                    "local_disk %s cannot be written (%s): records are kept in RAM only.",
                    backend.path,
                    getattr(error, "strerror", error),
                )

    backend.async_save_bytes_to_disk = async_save_bytes_to_disk
