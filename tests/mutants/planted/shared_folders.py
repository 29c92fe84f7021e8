# SPDX-License-Identifier: Apache-2.0
"""What a connector to folders does where others write, where disks fail and file servers hang."""

from tests.mutants.defect import one

FS = "lmcache_hybrid/storage/remote/fs.py"
IO = "lmcache_hybrid/storage/folder/record_io.py"
FILES = "lmcache_hybrid/storage/folder/record_files.py"
MAKE_CONNECTOR = "lmcache_hybrid/storage/remote/make_connector.py"
THREADS = "lmcache_hybrid/core/threads.py"

DEFECTS = (
    one(
        "a connector to folders that cannot start all threads leaves some",
        FS,
        "            stack.callback(self._writers.close)\n",
        "",
    ),
    one(
        "a planted link under a temporary name is written through",
        IO,
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC",
    ),
    one(
        "a planted name fails a write at once",
        FS,
        "            for left in reversed(range(TRIES)):\n",
        "            for left in (0,):\n",
    ),
    one(
        "a record is read through a link",
        "lmcache_hybrid/storage/disk/files.py",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)",
        "os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)",
    ),
    one(
        "a link with a record's name is promised",
        IO,
        "os.stat(path, follow_symlinks=False)",
        "os.stat(path)",
    ),
    one(
        "two engines write to one temporary file",
        FS,
        'temporary = f"{self._prefix}{next(self._numbers)}{TEMPORARY}"',
        'temporary = f"{name}{TEMPORARY}"',
    ),
    one(
        "a group that shares a folder cannot read what one of them wrote",
        IO,
        "            if is_shared(os.stat(folder)):\n",
        "            if not folder:\n",
    ),
    one(
        "a private record of another user is promised",
        IO,
        "status.st_uid == os.geteuid() or os.access(path, os.R_OK, effective_ids=True)",
        "True",
    ),
    one(
        "what another user made is never a hit",
        IO,
        "status.st_uid == os.geteuid() or os.access(path, os.R_OK, effective_ids=True)",
        "status.st_uid == os.geteuid()",
    ),
    one(
        "a failed write leaves its file",
        IO,
        "            os.unlink(path)\n        raise\n",
        "            pass\n        raise\n",
    ),
    one(
        "an error that comes when a file is closed is not seen",
        IO,
        "            os.close(number)  # tells on NFS whether the server took it all\n",
        "            with contextlib.suppress(OSError):\n                os.close(number)\n",
    ),
    one(
        "a part that the system did not take is lost",
        IO,
        "        done += os.writev(number, parts)\n",
        "        os.writev(number, parts)\n        done += sum(map(len, parts))\n",
    ),
    one(
        "a damaged file counts as one that cannot be read",
        IO,
        '        return "damaged"\n    return',
        '        return "unreadable"\n    return',
    ),
    one(
        "a file that is larger than any record stays",
        IO,
        '    return "damaged" if size > largest else "unreadable"\n',
        '    return "unreadable"\n',
    ),
    one(
        "a file that cannot be opened counts as damaged",
        IO,
        '        return "gone" if error.errno in NO_FILE else "unreadable"\n',
        '        return "gone" if error.errno in NO_FILE else "damaged"\n',
    ),
    one(
        "a file that was replaced on its server fails a load",
        IO,
        "        if error.errno != errno.ESTALE:\n",
        "        if error.errno:\n",
    ),
    one(
        "LMCache's header of a file is another one",
        FILES,
        "WRAPPER.pack(size, _KV_2LTD, _UINT8, 1, 1, 1, size)",
        "WRAPPER.pack(size, _KV_2LTD, _UINT8, 1, 1, size, 1)",
    ),
    one(
        "with several folders records lie elsewhere than LMCache's",
        FS,
        "abs(key.chunk_hash) % len(self._folders)",
        "hash(key.to_string()) % len(self._folders)",
    ),
    one(
        "a plugin's own folder is not used",
        "lmcache_hybrid/config/stores/fs.py",
        'names = f"remote_storage_plugin.{place.plugin}.base_path", "fs_base_path"',
        'names = "fs_base_path", f"remote_storage_plugin.{place.plugin}.base_path"',
    ),
    one(
        "writes wait for ever behind those that hang",
        FS,
        "            if self._put.stuck(WRITE_SECONDS):\n",
        "            if self._put.stuck(1 << 30):\n",
    ),
    one(
        "a slow server counts as one that hangs",
        FS,
        '        """Note progress of a call."""\n        self._moved = time.monotonic()\n',
        '        """Note progress of a call."""\n',
    ),
    one(
        "a failed write of a file is not counted",
        FS,
        "                self.failed(1)\n",
        "                pass\n",
    ),
    one(
        "a failed write of a file keeps its buffer",
        FS,
        "            memory.ref_count_down()\n            if job.cancelled()",
        "            job.cancelled() or memory.ref_count_down()\n            if job.cancelled()",
    ),
    one(
        "a late read of a file loses its memory",
        FS,
        "            job.add_done_callback(_release)\n",
        "            pass\n",
    ),
    one(
        "records are promised while no read ends",
        FS,
        "        if self._reading.stuck(self._seconds):\n",
        "        if self._reading.stuck(1 << 30):\n",
    ),
    one(
        "questions pile up behind those that hang",
        FS,
        "        if self._asking.stuck(self._seconds):\n",
        "        if self._asking.stuck(1 << 30):\n",
    ),
    one(
        "a load that is late reads a whole file",
        FS,
        "            part.got(size)\n",
        "            pass\n",
    ),
    one(
        "the end of a process waits for a file server",
        THREADS,
        "daemon=True\n",
        "daemon=False\n",
    ),
    one(
        "closing forgets queued writes to a folder",
        FS,
        "            await asyncio.wait(writes, timeout=FLUSH_SECONDS)\n",
        "            pass\n",
    ),
)
