# SPDX-License-Identifier: Apache-2.0
"""Defects of ``local_disk``."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/storage/disk/backend.py": {
        "the doctor's test record costs an engine's on a full disk": (
            "if self.visited or not self._evict",
            "if not self._evict",
        ),
        "what could not be deleted counts until the restart": never(
            "            if self.others.may_go_by_now():\n"
        ),
        "a save competes with its own writes": gone(
            "        self.others.deleter.wait_for_queueing()\n"
        ),
        "records are deleted before files that nobody can find": (
            "        for ranked in (strangers, own):\n",
            "        for ranked in (own, strangers):\n",
        ),
        "after a restart new prompts push out one another only": (
            "self.cache_policy.found_again(key)\n",
            "self.cache_policy.update_on_hit(key, (key,))\n",
        ),
        "a failed write leaves its save without an order": (
            "            self.written(key)\n        finally:\n"
            "            memory.ref_count_down()\n"
            "            self._arrive(key)  # from here on the record may be written again\n",
            "            self.written(key)\n            self._arrive(key)\n        finally:\n"
            "            memory.ref_count_down()\n",
        ),
        "an error of the disk keeps a record from the remote store": (
            "                    self._fail(error)\n\n    def _queue",
            "                    raise\n\n    def _queue",
        ),
        "a disk that takes no files loses those that it has": never(
            "            if not os.access(self.path, os.W_OK | os.X_OK):\n"
        ),
        "a restore from disk reads one file after the other": (
            "list(self._readers.map(self._read, keys, entries))",
            "list(map(self._read, keys, entries))",
        ),
        "a read of a lost file keeps its memory": gone(
            "            if memory is not None:\n                memory.ref_count_down()\n"
        ),
        "a save larger than the disk counts as failed": (
            'in flight", key)\n                return\n',
            'in flight", key)\n                raise OSError(errno.ENOSPC, "")\n',
        ),
        "how many threads read and write on disk cannot be said": (
            'config.get_extra_config_value("disk_io_threads", THREADS)',
            "THREADS",
        ),
        "one record that cannot be read is promised again and again": passes(
            "                        self._drop(key)\n"
        ),
    },
    "lmcache_hybrid/storage/disk/deleter.py": {
        "a save competes with its own deletions": (
            "        self.wait_for_queueing()\n        try:\n",
            "        try:\n",
        ),
        "a file whose name is too long to be changed stays and is forgotten": (
            "        except OSError:\n            _unlink(path)\n        else:",
            "        except OSError:\n            pass\n        else:",
        ),
        "the thread that deletes is started when there is work for it": (
            '        self._thread = started(1, "hybrid-delete")\n',
            "        from concurrent.futures import ThreadPoolExecutor as lazy\n\n"
            '        self._thread = lazy(1, "hybrid-delete")\n',
        ),
    },
    "lmcache_hybrid/storage/disk/other_files.py": {
        "a file that is being written is deleted as the one before it": (
            "[path for path in self.kept if path not in but][:AT_ONCE]",
            "list(self.kept)[:AT_ONCE]",
        ),
        "a file that cannot be deleted does not count": (
            "                self.kept[path], self._failed_at = status.st_size, time.monotonic()\n",
            "                self.kept[path] = 0\n",
        ),
        "a file that is replaced counts twice": (" - self.kept.get(but, 0)\n", "\n"),
        "files of others take no part in the disk's limit": (
            "self.strangers, self.strange_bytes = strangers, sum(strangers.values())\n",
            "self.strangers, self.strange_bytes = {}, 0\n",
        ),
    },
    "lmcache_hybrid/storage/disk/limited_index.py": {
        "all records are lost for one that cannot be deleted": (
            "                if not freed:\n",
            "                if not freed and not self.dict:\n",
        ),
        "records that are still being written are not arranged": gone(
            "            self._arranged.update(dict.fromkeys(pending, (keys, pending)))\n"
        ),
        "a record that is indexed is waited for to arrange its save": (
            "if key not in self.dict and key in self.put_tasks}\n",
            "if key in self.put_tasks}\n",
        ),
        "records found again are not counted by LFU": passes(
            "            self.cache_policy.update_on_put(key)\n"
        ),
        "a disk that is full for other files evicts what is too little": (
            "if all(total < size for total in itertools.accumulate(entries, initial=strange)):",
            "if not strange + sum(entries):",
        ),
        "records evicted on a full disk are counted for ever": gone(
            "            self._count(-entry.size)\n"
        ),
        "LMCache's metric of local storage stays at zero": passes(
            "            self._monitor.update_local_storage_usage(self.current_cache_size)\n"
        ),
    },
    "lmcache_hybrid/storage/disk/index.py": {
        "an evicted file that is still there after a restart does not count": (
            "        return isinstance(error, FileNotFoundError)\n",
            "        return True\n",
        ),
    },
    "lmcache_hybrid/storage/disk/full_disk.py": {
        "a disk that others fill loses all its records for nothing": gone(
            "        self._pause.fail()\n"
        ),
        "on a full disk nothing new is stored": (
            "        if self._pause.lasts:\n",
            "        if size:\n",
        ),
        "what is being deleted makes no room on a full disk": (
            "        self._finish_deleting()\n        short =",
            "        short =",
        ),
    },
    "lmcache_hybrid/storage/disk/files.py": {
        "half-written records take the room of a full disk": (
            "            os.unlink(path)  # it takes room that others wait for\n",
            "            os.stat(path)\n",
        ),
        "records are readable for everybody": ("PRIVATE_FILE = 0o600\n", "PRIVATE_FILE = 0o644\n"),
    },
    "lmcache_hybrid/storage/tiers/disk.py": {
        "hits on disk do not count for the order of eviction": (
            "        self.used([",
            "        str([",
        ),
        "what is queued is written from memory that LMCache has freed": passes(
            "            self.backend.close()\n"
        ),
    },
    "lmcache_hybrid/storage/disk/make_backend.py": {
        "other models in a process are stored on this package's disk": (
            'if getattr(config, "_hybrid_local_disk", False) else',
            "if config else",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
