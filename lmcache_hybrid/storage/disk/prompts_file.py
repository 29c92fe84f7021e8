# SPDX-License-Identifier: Apache-2.0
"""Keeps the prompts of the records of ``local_disk`` beside them, for KV cache events.

Records hold hashes and no tokens, so after a restart nobody would know of which prompts they are.
The file says what a block is, never that it is stored.
"""

import contextlib
import errno
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from operator import itemgetter
from typing import TYPE_CHECKING, BinaryIO

from vllm.logger import init_logger

from lmcache_hybrid.config.folders import trusted_owner
from lmcache_hybrid.config.options import Options
from lmcache_hybrid.config.shared_folders import folders_in
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.protocol.blocks import Block
from lmcache_hybrid.storage.disk.files import (
    GROUP_FILE,
    PRIVATE_FILE,
    PROMPTS_FILES,
    create_anew,
    is_shared,
    open_regular,
)
from lmcache_hybrid.storage.disk.prompt_entries import PromptEntries

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.storage.disk.prompts_file")

# Blocks that one step learns at most, so that the first steps take no longer than others.
AT_ONCE = 256
# Entries that the file may hold beyond twice the known blocks.
SLACK = 1024
# To read the file at most; a thousand blocks take less than one.
READ_SECONDS = 60.0
# Between two attempts to write a file that could not be written.
RETRY_SECONDS = 60.0


def prompts_file_for(
    vllm_config: "VllmConfig",
    config: "LMCacheEngineConfig",
    options: Options,
    block_size: int,
    hash_block_size: int,
) -> "PromptsFile | None":
    """Open the file of an engine; None where nothing is announced of ``local_disk``.

    What an engine that did announce it left there is deleted. ``config`` has the folders of this
    data-parallel engine; of several the first one that has a file keeps it.
    """
    if not config.local_disk:
        return None
    folders = folders_in("local_disk", config.local_disk)
    if not (options.events and options.alone):
        for folder in folders:
            with contextlib.suppress(OSError):
                _delete(folder)
        return None
    kept = (f for f in folders if os.path.lexists(os.path.join(f, PROMPTS_FILES[0])))
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    entries = PromptEntries(block_size, hash_block_size, algorithm, options.digester)
    return PromptsFile(next(kept, folders[0]), entries, trusted_owner(config))


def _delete(folder: str) -> None:
    for name in PROMPTS_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


class PromptsFile:
    """A file of blocks, see :class:`lmcache_hybrid.protocol.blocks.KnownBlocks`.

    A thread of its own reads and writes, in order. What is added reaches the system in one
    write, so an engine that is killed leaves at most one entry cut off.
    """

    def __init__(self, folder: str, entries: PromptEntries, trusted: int | None = None) -> None:
        """Start the thread. The file stays as it is until the first :meth:`rewrite`.

        Args:
            folder: of the records.
            entries: layout of the file.
            trusted: user whose file is read, too, see :func:`.folders.trusted_owner`.
        """
        self._folder, self._entries = folder, entries
        self._owners = os.geteuid(), trusted
        self._path, self._new = (os.path.join(folder, name) for name in PROMPTS_FILES)
        self._began = self._closing = False
        self._reading: Future[list[Block]] | None = None
        self._found: deque[Block] = deque()
        self._rewriting: Future[None] | None = None
        self._thread = started(1, "hybrid-prompts")
        # The thread's: the open file, its entries, and when to try again where there is none.
        self._file: int | None = None
        self._count, self._again = 0, 0.0

    # What was known before the start

    @property
    def recalling(self) -> bool:
        return self._reading is not None or bool(self._found)

    def recall(self, held: AbstractSet[bytes]) -> None:
        self._began = True
        self._reading = self._thread.submit(self._read, held)

    def recalled(self) -> Sequence[Block]:
        if self._reading is not None and self._reading.done():
            self._found.extend(self._reading.result())
            self._reading = None
        return [self._found.popleft() for _ in range(min(AT_ONCE, len(self._found)))]

    def _read(self, held: AbstractSet[bytes]) -> list[Block]:
        until = time.monotonic() + READ_SECONDS
        try:
            with open_regular(self._path) as data:
                self._check(data)
                found = self._entries.read(
                    data, held, lambda: self._closing or time.monotonic() > until
                )
        except FileNotFoundError:
            return []
        except Exception as error:  # announcing is not worth an engine
            logger.warning("%s is not read, and begun anew: %s", self._path, error)
            return []
        logger.info(
            "%s names the prompts of %d of %d blocks that were found there.",
            self._path,
            len(found),
            len(held),
        )
        return found

    def _check(self, data: BinaryIO) -> None:
        """Read the header. Raises ValueError for a file that is not of an engine like this."""
        status, shared = os.fstat(data.fileno()), is_shared(os.stat(self._folder))
        mode = stat.S_IMODE(status.st_mode)
        if mode != (GROUP_FILE if shared else PRIVATE_FILE):
            raise ValueError(f"its mode is {mode:04o}")
        if status.st_uid not in self._owners and not shared:
            raise ValueError(f"it belongs to user {status.st_uid}")
        if data.read(len(self._entries.header)) != self._entries.header:
            raise ValueError("it is of another version, block size or hash")

    # What is known now

    def add(self, blocks: Sequence[Block]) -> None:
        if self._rewriting is not None:  # else the first file will have them
            self._thread.submit(self._append, blocks)

    def is_due(self, known: int) -> bool:
        if not self._began or self.recalling:
            return False
        if self._rewriting is not None and not self._rewriting.done():
            return False
        if self._file is None:
            return time.monotonic() >= self._again
        return self._count > 2 * known + SLACK

    def rewrite(self, blocks: Sequence[tuple[int, Block]]) -> None:
        self._rewriting = self._thread.submit(self._rewrite, blocks)

    def erase(self) -> None:
        self._thread.submit(self._erase)

    def close(self) -> None:
        self._closing = True  # ends a read
        self._thread.shutdown()
        self._close_file()

    def _append(self, blocks: Sequence[Block]) -> None:
        if self._file is None:  # the next file will have them
            return
        added = b"".join(map(self._entries.entry, blocks))
        try:
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was deleted")
            if os.write(self._file, added) < len(added):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._count += len(blocks)
        except OSError as error:
            self._fail(error)

    def _rewrite(self, blocks: Sequence[tuple[int, Block]]) -> None:
        try:
            with create_anew(self._new) as data:
                data.write(self._entries.header)
                for _, block in sorted(blocks, key=itemgetter(0)):
                    data.write(self._entries.entry(block))
                data.flush()
                os.rename(self._new, self._path)
                self._close_file()
                self._file, self._count = os.dup(data.fileno()), len(blocks)
        except Exception as error:  # announcing is not worth an engine
            with contextlib.suppress(OSError):
                os.unlink(self._new)
            self._fail(error)

    def _erase(self) -> None:
        self._close_file()
        try:
            _delete(self._folder)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._close_file()
        self._again = time.monotonic() + RETRY_SECONDS
        logger.warning_once(
            "%s cannot be written (%s): after a restart KV cache events may say what lies "
            "there only once it is asked for. Make room there, or make it writable.",
            self._path,
            getattr(error, "strerror", None) or error,
        )

    def _close_file(self) -> None:
        number, self._file = self._file, None
        if number is not None:
            os.close(number)
