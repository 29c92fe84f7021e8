# SPDX-License-Identifier: Apache-2.0
"""Defects of ``local_disk``."""

from tests.mutants.defect import one

DISK = "lmcache_hybrid/storage/disk/backend.py"
INDEX = "lmcache_hybrid/storage/disk/limited_index.py"
OTHERS = "lmcache_hybrid/storage/disk/other_files.py"
ROOM = "lmcache_hybrid/storage/disk/full_disk.py"

DEFECTS = (
    one(
        "a save competes with its own writes",
        DISK,
        "        self.others.deleter.wait_for_queueing()\n",
        "",
    ),
    one(
        "a save competes with its own deletions",
        "lmcache_hybrid/storage/disk/deleter.py",
        "        self.wait_for_queueing()\n        try:\n",
        "        try:\n",
    ),
    one(
        "a file whose name is too long to be changed stays and is forgotten",
        "lmcache_hybrid/storage/disk/deleter.py",
        "        except OSError:\n            _unlink(path)\n        else:",
        "        except OSError:\n            pass\n        else:",
    ),
    one(
        "a file that cannot be deleted does not count",
        OTHERS,
        "                self.kept[path] = status.st_size\n",
        "                self.kept[path] = 0\n",
    ),
    one(
        "a file that is replaced counts twice",
        OTHERS,
        " - self.kept.get(but, 0)\n",
        "\n",
    ),
    one(
        "all records are lost for one that cannot be deleted",
        INDEX,
        "                if not freed:\n",
        "                if not freed and not self.dict:\n",
    ),
    one(
        "an evicted file that is still there after a restart does not count",
        "lmcache_hybrid/storage/disk/index.py",
        "        return isinstance(error, FileNotFoundError)\n",
        "        return True\n",
    ),
    one(
        "files of others take no part in the disk's limit",
        OTHERS,
        "self.strangers, self.strange_bytes = strangers, sum(strangers.values())\n",
        "self.strangers, self.strange_bytes = {}, 0\n",
    ),
    one(
        "records are deleted before files that nobody can find",
        DISK,
        "        for ranked in (strangers, own):\n",
        "        for ranked in (own, strangers):\n",
    ),
    one(
        "after a restart new prompts push out one another only",
        DISK,
        "self.cache_policy.found_again(key)\n",
        "self.cache_policy.update_on_hit(key, (key,))\n",
    ),
    one(
        "records that are still being written are not arranged",
        INDEX,
        "            self._arranged.update(dict.fromkeys(pending, (keys, pending)))\n",
        "",
    ),
    one(
        "a record that is indexed is waited for to arrange its save",
        INDEX,
        "if key not in self.dict and key in self.put_tasks}\n",
        "if key in self.put_tasks}\n",
    ),
    one(
        "a failed write leaves its save without an order",
        DISK,
        "            self.written(key)\n        finally:\n            memory.ref_count_down()\n"
        "            self._arrive(key)  # from here on the record may be written again\n",
        "            self.written(key)\n            self._arrive(key)\n        finally:\n"
        "            memory.ref_count_down()\n",
    ),
    one(
        "records found again are not counted by LFU",
        INDEX,
        "            self.cache_policy.update_on_put(key)\n",
        "            pass\n",
    ),
    one(
        "an error of the disk keeps a record from the remote store",
        DISK,
        "                    self._fail(error)\n\n    def _queue",
        "                    raise\n\n    def _queue",
    ),
    one(
        "a disk that takes no files loses those that it has",
        DISK,
        "            if not os.access(self.path, os.W_OK | os.X_OK):\n",
        "            if False:\n",
    ),
    one(
        "a disk that others fill loses all its records for nothing",
        ROOM,
        "        self._pause.fail()\n",
        "",
    ),
    one(
        "on a full disk nothing new is stored",
        ROOM,
        "        if self._pause.lasts:\n",
        "        if size:\n",
    ),
    one(
        "a disk that is full for other files evicts what is too little",
        INDEX,
        "if all(total < size for total in itertools.accumulate(entries, initial=strange)):",
        "if not strange + sum(entries):",
    ),
    one(
        "records evicted on a full disk are counted for ever",
        INDEX,
        "            self._count(-entry.size)\n",
        "",
    ),
    one(
        "what is being deleted makes no room on a full disk",
        ROOM,
        "        self._finish_deleting()\n        short =",
        "        short =",
    ),
    one(
        "half-written records take the room of a full disk",
        "lmcache_hybrid/storage/disk/files.py",
        "            os.unlink(path)  # it takes room that others wait for\n",
        "            os.stat(path)\n",
    ),
    one(
        "a restore from disk reads one file after the other",
        DISK,
        "list(self._readers.map(self._read, keys, entries))",
        "list(map(self._read, keys, entries))",
    ),
    one(
        "a read of a lost file keeps its memory",
        DISK,
        "            if memory is not None:\n                memory.ref_count_down()\n",
        "",
    ),
    one(
        "hits on disk do not count for the order of eviction",
        "lmcache_hybrid/storage/tiers/disk.py",
        "        self.used([",
        "        str([",
    ),
    one(
        "what is queued is written from memory that LMCache has freed",
        "lmcache_hybrid/storage/tiers/disk.py",
        "            self.backend.close()\n",
        "            pass\n",
    ),
    one(
        "LMCache's metric of local storage stays at zero",
        INDEX,
        "            self._monitor.update_local_storage_usage(self.current_cache_size)\n",
        "            pass\n",
    ),
    one(
        "a save larger than the disk counts as failed",
        DISK,
        'in flight", key)\n                return\n',
        'in flight", key)\n                raise OSError(errno.ENOSPC, "")\n',
    ),
    one(
        "other models in a process are stored on this package's disk",
        "lmcache_hybrid/storage/disk/make_backend.py",
        'if getattr(config, "_hybrid_local_disk", False) else',
        "if config else",
    ),
    one(
        "how many threads read and write on disk cannot be said",
        DISK,
        'config.get_extra_config_value("disk_io_threads", THREADS)',
        "THREADS",
    ),
    one(
        "records are readable for everybody",
        "lmcache_hybrid/storage/disk/files.py",
        "PRIVATE_FILE = 0o600\n",
        "PRIVATE_FILE = 0o644\n",
    ),
    one(
        "one record that cannot be read is promised again and again",
        DISK,
        "                        self._drop(key)\n",
        "                        pass\n",
    ),
    one(
        "the thread that deletes is started when there is work for it",
        "lmcache_hybrid/storage/disk/deleter.py",
        '        self._thread = started(1, "hybrid-delete")\n',
        "        from concurrent.futures import ThreadPoolExecutor as lazy\n\n"
        '        self._thread = lazy(1, "hybrid-delete")\n',
    ),
)
