# SPDX-License-Identifier: Apache-2.0
"""Memory to read into, and records on disk."""

from tests.mutants.defect import one

STAGING = "lmcache_hybrid/storage/read_memory.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
DISK = "lmcache_hybrid/storage/disk/backend.py"
ROOM = "lmcache_hybrid/storage/disk/eviction.py"
REDIS = "lmcache_hybrid/storage/remote/redis.py"
SOCKETS = "lmcache_hybrid/storage/remote/sockets.py"

DEFECTS = (
    one(
        "a save competes with its own writes",
        DISK,
        "        self._wait_for_queueing()\n        size, length",
        "        size, length",
    ),
    one(
        "a save competes with its own deletions",
        DISK,
        "        self._wait_for_queueing()\n        _unlink(path)\n",
        "        _unlink(path)\n",
    ),
    one(
        "a record larger than the limit empties the disk",
        DISK,
        "        if size <= self._limit:\n",
        "        if size:\n",
    ),
    one(
        "room to read into is given back before it is read into",
        STAGING,
        "                self._room += held\n",
        "                _free(held)\n",
    ),
    one(
        "room that a read did not use stays set aside",
        STAGING,
        "                _free(spare)\n",
        "                self._room += spare\n",
    ),
    one(
        "a record that there was no memory for is thrown away",
        STORE,
        "        if self._staging.refused != refused and len(read) < len(keys):\n",
        "        if self._staging.refused < refused and len(read) < len(keys):\n",
    ),
    one(
        "files of others take no part in the disk's limit",
        DISK,
        "        self._strange_bytes = sum(self._strangers.values())\n",
        "        self._strangers, self._strange_bytes = {}, 0\n",
    ),
    one(
        "records are deleted before files that nobody can find",
        DISK,
        "        for ranked in (strangers, own):\n",
        "        for ranked in (own, strangers):\n",
    ),
    one(
        "records that are still being written are not arranged",
        DISK,
        "            self._arranged.update(dict.fromkeys(pending, (keys, pending)))\n",
        "",
    ),
    one(
        "writes under way are searched for each record of a save",
        DISK,
        "            return set(self.disk_worker.put_tasks)\n",
        "            return self.disk_worker.put_tasks  # type: ignore[return-value]\n",
    ),
    one(
        "a record that is indexed is waited for to arrange its save",
        DISK,
        "if key not in self.dict and key in writing}\n",
        "if key in writing}\n",
    ),
    one(
        "a failed write leaves its save without an order",
        DISK,
        "            self._arrive(key)\n            with contextlib",
        "            with contextlib",
    ),
    one(
        "records found again are not counted by LFU",
        DISK,
        "        self.cache_policy.update_on_put(file.key)\n",
        "",
    ),
    one(
        "an error of the disk keeps a record from the remote store",
        DISK,
        "                self._fail(error)\n\n    def submit_put_task",
        "                raise\n\n    def submit_put_task",
    ),
    one(
        "a disk that takes no files loses those that it has",
        DISK,
        "                if not os.access(self.path, os.W_OK | os.X_OK):\n",
        "                if not os.access(self.path, os.F_OK | os.R_OK) and False:\n",
    ),
    one(
        "a disk that others fill loses all its records for nothing",
        ROOM,
        "        self._paused_until = monotonic() + self._pause\n",
        "",
    ),
    one(
        "evictions in vain are as frequent after an hour",
        ROOM,
        "        self._pause = min(2 * self._pause, LONGEST_PAUSE)\n",
        "",
    ),
    one(
        "on a full disk nothing new is stored",
        ROOM,
        "        if monotonic() < self._paused_until:\n",
        "        if size:\n",
    ),
    one(
        "a disk that is full for other files evicts what is too little",
        DISK,
        "        if all(total < size for total in held):\n",
        "        if not sum(1 for total in held if total):\n",
    ),
    one(
        "records evicted on a full disk are counted for ever",
        DISK,
        "        self.current_cache_size -= size\n        self.remove(key, force=False)\n",
        "        self.remove(key, force=False)\n",
    ),
    one(
        "what is being deleted makes no room on a full disk",
        ROOM,
        "        self._finish_deleting()\n        short =",
        "        short =",
    ),
    one(
        "half-written records take the room of a full disk",
        DISK,
        "                os.unlink(path)  # what was written takes room that others wait for\n",
        "                os.stat(path)\n",
    ),
    one(
        "with python -O the null block is stored",
        "lmcache_hybrid/worker/pages.py",
        '            raise ValueError(f"block {block} of {self.num_blocks} cannot be copied")\n',
        "            assert not __debug__\n",
    ),
    one(
        "with python -O a record is sealed with digests of another",
        "lmcache_hybrid/storage/record.py",
        "    if len(record) != HEADER_BYTES + length + len(digests):\n",
        "    if len(record) < HEADER_BYTES + length:\n",
    ),
    one(
        "records are readable for everybody",
        "lmcache_hybrid/storage/disk/files.py",
        "PRIVATE_FILE = 0o600\n",
        "PRIVATE_FILE = 0o644\n",
    ),
    one(
        "a folder of another user is taken",
        "lmcache_hybrid/config/folders.py",
        "    if status.st_uid not in (os.geteuid(), 0):\n",
        "    if status.st_uid < 0:\n",
    ),
    one(
        "one record that cannot be read is promised again and again",
        DISK,
        "        return self._load_chunk_into_memory(key, path, memory)\n",
        "        self.read_file(key, memory.byte_array, path)\n        return memory\n",
    ),
    one(
        "a late read of a file loses its memory",
        "lmcache_hybrid/storage/remote/connectors.py",
        "        _release_late_reads(connector)\n",
        "        pass\n",
    ),
    one(
        "damaged records stay in Redis",
        "lmcache_hybrid/storage/remote/connectors.py",
        "    if damaged and redis_stores.delete(backend, key, REMOVAL_SECONDS):\n",
        "    if False and redis_stores.delete(backend, key, REMOVAL_SECONDS):\n",
    ),
    one(
        "values are copied on their way to Redis",
        REDIS,
        "        return made[0].set(name, value)\n",
        "        return made[0].set(name, bytes(value))\n",
    ),
    one(
        "a repair of Redis does not say when it can go",
        "lmcache_hybrid/storage/remote/connectors.py",
        "    Remove when: ``RedisConnector.close`` and",
        "    Later ``RedisConnector.close`` may be better, and",
    ),
    one(
        "what is there for speed says that it repairs a bug",
        REDIS,
        "    No bug: LMCache writes the same bytes",
        "    Bug: LMCache writes the same bytes",
    ),
    # Redis, from the socket
    one(
        "a connection in the middle of a value is used for the next one",
        SOCKETS,
        "            connection.disconnect()  # it may be in the middle of a value\n",
        "            self._idle.append(connection)\n",
    ),
    one(
        "a connection that the server closed fails the read that finds it",
        SOCKETS,
        "            except (redis.ConnectionError, ConnectionError):\n",
        "            except ZeroDivisionError:\n",
    ),
    one(
        "each piece of a value has the whole timeout",
        SOCKETS,
        "    left = deadline - time.monotonic()\n",
        "    left = 1.0\n",
    ),
)
