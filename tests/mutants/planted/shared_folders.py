# SPDX-License-Identifier: Apache-2.0
"""What a connector to folders does where others write, where disks fail and file servers hang."""

from tests.mutants.defect import each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/storage/remote/fs.py": {
        "a connector to folders that cannot start all threads leaves some": gone(
            "            stack.callback(self._writers.close)\n"
        ),
        "a planted name fails a write at once": (
            "            for left in reversed(range(TRIES)):\n",
            "            for left in (0,):\n",
        ),
        "two engines write to one temporary file": (
            'temporary = f"{self._prefix}{next(self._numbers)}{TEMPORARY}"',
            'temporary = f"{name}{TEMPORARY}"',
        ),
        "with several folders records lie elsewhere than LMCache's": (
            "abs(key.chunk_hash) % len(self._folders)",
            "hash(key.to_string()) % len(self._folders)",
        ),
        "writes wait for ever behind those that hang": (
            "            if self._put.stuck(WRITE_SECONDS):\n",
            "            if self._put.stuck(1 << 30):\n",
        ),
        "a slow server counts as one that hangs": (
            "        self._check_open()\n        self._moved = time.monotonic()\n",
            "        self._check_open()\n",
        ),
        "a late read of a file loses its memory": passes(
            "            job.add_done_callback(release_unread)\n"
        ),
        "records are promised while no read ends": (
            "        if self._reading.stuck(self._seconds):\n",
            "        if self._reading.stuck(1 << 30):\n",
        ),
        "questions pile up behind those that hang": (
            "        if self._asking.stuck(self._seconds):\n",
            "        if self._asking.stuck(1 << 30):\n",
        ),
        "a load that is late reads a whole file": passes("            part.got(size)\n"),
    },
    "lmcache_hybrid/storage/folder/record_io.py": {
        "a planted link under a temporary name is written through": (
            "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
            "os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC",
        ),
        "a link with a record's name is promised": (
            "os.stat(path, follow_symlinks=False)",
            "os.stat(path)",
        ),
        "a group that shares a folder cannot read what one of them wrote": (
            "            if is_shared(os.stat(folder)):\n",
            "            if not folder:\n",
        ),
        "a private record of another user is promised": (
            "status.st_uid == os.geteuid() or os.access(path, os.R_OK, effective_ids=True)",
            "True",
        ),
        "what another user made is never a hit": (
            "status.st_uid == os.geteuid() or os.access(path, os.R_OK, effective_ids=True)",
            "status.st_uid == os.geteuid()",
        ),
        "a failed write leaves its file": (
            "            os.unlink(path)\n        raise\n",
            "            pass\n        raise\n",
        ),
        "an error that comes when a file is closed is not seen": (
            "            os.close(number)  # tells on NFS whether the server took it all\n",
            "            with contextlib.suppress(OSError):\n                os.close(number)\n",
        ),
        "a part that the system did not take is lost": (
            "        done += os.writev(number, parts)\n",
            "        os.writev(number, parts)\n        done += sum(map(len, parts))\n",
        ),
        "a damaged file counts as one that cannot be read": (
            '        return "damaged"\n    return',
            '        return "unreadable"\n    return',
        ),
        "a file that is larger than any record stays": (
            '    return "damaged" if size > largest else "unreadable"\n',
            '    return "unreadable"\n',
        ),
        "a file that cannot be opened counts as damaged": (
            '        return "gone" if error.errno in NO_FILE else "unreadable"\n',
            '        return "gone" if error.errno in NO_FILE else "damaged"\n',
        ),
        "a file that was replaced on its server fails a load": (
            "        if error.errno != errno.ESTALE:\n",
            "        if error.errno:\n",
        ),
    },
    "lmcache_hybrid/storage/disk/files.py": {
        "a record is read through a link": (
            "os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)",
            "os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)",
        ),
    },
    "lmcache_hybrid/storage/folder/record_files.py": {
        "LMCache's header of a file is another one": (
            "WRAPPER.pack(size, _KV_2LTD, _UINT8, 1, 1, 1, size)",
            "WRAPPER.pack(size, _KV_2LTD, _UINT8, 1, 1, size, 1)",
        ),
    },
    "lmcache_hybrid/config/stores/fs.py": {
        "a plugin's own folder is not used": (
            'names = f"remote_storage_plugin.{place.plugin}.base_path", "fs_base_path"',
            'names = "fs_base_path", f"remote_storage_plugin.{place.plugin}.base_path"',
        ),
    },
    "lmcache_hybrid/core/threads.py": {
        "the end of a process waits for a file server": ("daemon=True\n", "daemon=False\n"),
    },
}
DEFECTS = each_of(MISTAKES)
