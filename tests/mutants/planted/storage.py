# SPDX-License-Identifier: Apache-2.0
"""Memory to read into, and records on disk."""

from tests.mutants.defect import one

STAGING = "lmcache_hybrid/storage/read_reservation.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
ARC = "lmcache_hybrid/storage/eviction_order.py"
DISK = "lmcache_hybrid/storage/disk/backend.py"
ROOM = "lmcache_hybrid/storage/disk/full_disk.py"
MAKE_CONNECTOR = "lmcache_hybrid/storage/remote/make_connector.py"
REMOTE = "lmcache_hybrid/storage/tiers/remote.py"
REDIS = "lmcache_hybrid/storage/remote/redis.py"
SERVERS = "lmcache_hybrid/storage/remote/servers.py"
SOCKETS = "lmcache_hybrid/storage/remote/sockets.py"

DEFECTS = (
    one(
        "a store that LMCache's health monitor has switched off stays off",
        "lmcache_hybrid/storage/remote/record_connector.py",
        "self.meta_shapes, self.meta_dtypes = [record_shape(CHECKED_BYTES)], [torch.uint8]",
        "self.meta_shapes = [record_shape(CHECKED_BYTES)]",
    ),
    one(
        "a backend that LMCache has wrapped is opened as any other",
        "lmcache_hybrid/storage/tiers/__init__.py",
        "isinstance(backend, served)), None)",
        "isinstance(backend, served)), RemoteTier)",
    ),
    one(
        "what LMCache's health check writes stays in the store",
        REMOTE,
        "        self._remove_what_checks_leave()\n",
        "",
    ),
    one(
        "a connector to Redis that cannot start all threads leaves some",
        REDIS,
        "            stack.callback(self._readers.shutdown)\n",
        "",
    ),
    one(
        "a folder without a name is the working directory",
        "lmcache_hybrid/config/stores/base.py",
        "    if not all(folders):\n",
        "    if not any(folders):\n",
    ),
    one(
        "nobody checks the folder of a plugin",
        "lmcache_hybrid/config/options.py",
        "    for option, folders in shared_folders(config):\n",
        "    for option, folders in shared_folders(config)[:1 if config.remote_url else 0]:\n",
    ),
    one(
        "spaces around a folder are part of its name",
        "lmcache_hybrid/config/stores/base.py",
        'tuple(part.strip() for part in value.split(","))',
        'tuple(value.split(","))',
    ),
    one(
        "a silent cluster is waited for as long as all of its nodes are silent",
        SERVERS,
        "            return asking.result(self._seconds)\n",
        "            return asking.result()\n",
    ),
    one(
        "each caller asks the nodes of a cluster that is silent",
        SERVERS,
        "            if self._asking is None or self._asking.done():\n",
        "            if self._asking is None or self._asking:\n",
    ),
    one(
        "a cluster that answers after the end stays connected",
        SERVERS,
        "        client.close()  # while the nodes were asked\n",
        "",
    ),
    one(
        "a save competes with its own writes",
        DISK,
        "        self._deleter.wait_for_queueing()\n        size, length",
        "        size, length",
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
        DISK,
        "                self._kept[path] = status.st_size\n",
        "                self._kept[path] = 0\n",
    ),
    one(
        "a file that is replaced counts twice",
        DISK,
        " - self._kept.get(path, 0)\n",
        "\n",
    ),
    one(
        "all records are lost for one that cannot be deleted",
        DISK,
        "            if not freed:\n                raise OSError(errno.EIO",
        "            if not freed and not self.dict:\n                raise OSError(errno.EIO",
    ),
    one(
        "an evicted file that is still there after a restart does not count",
        "lmcache_hybrid/storage/disk/index.py",
        "        return isinstance(error, FileNotFoundError)\n",
        "        return True\n",
    ),
    one(
        "the name of a model is cut by characters",
        "lmcache_hybrid/storage/key_names.py",
        "[:MODEL_NAME_BYTES].decode",
        ".decode",
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
        "        if self._reservation.refused != refused and len(read) < len(keys):\n",
        "        if self._reservation.refused < refused and len(read) < len(keys):\n",
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
        "prompts that come once push out what was hit",
        ARC,
        "older = chain(islice(self._once, over), self._main)",
        "older = chain(self._main, self._once)",
    ),
    one(
        "the newest prompt is evicted before it can be asked again",
        ARC,
        "newest_last = (key for key in older if key not in self._newest)",
        "newest_last = older",
    ),
    one(
        "a chunk's end outlives the pages of all prompts",
        ARC,
        "                self._once.move_to_end(key, last=False)\n",
        "",
    ),
    one(
        "a prefix that two requests computed counts as seen once",
        ARC,
        " or self._once.get(key, owner) != owner]",
        "]",
    ),
    one(
        "a request that stores twice counts as two",
        ARC,
        "self._once.get(key, owner) != owner]",
        "key in self._once]",
    ),
    one(
        "what is stored again after its eviction counts as new",
        ARC,
        "        self._main[key] = again\n",
        "        self._main[key] = False\n",
    ),
    one(
        "new turns of a conversation count as seen once",
        ARC,
        "for key in keys if len(known) >= KNOWN * len(keys) else known:",
        "for key in known:",
    ),
    one(
        "new prompts never get more room",
        ARC,
        "            self._share += max(1.0, main / once)\n",
        "",
    ),
    one(
        "new prompts never give room back",
        ARC,
        "            self._share -= max(1.0, once / main)\n",
        "",
    ),
    one(
        "an eviction policy that somebody chose is replaced",
        ARC,
        " and not chosen else policy",
        " else policy",
    ),
    one(
        "an eviction policy of extra config is taken for a default",
        "lmcache_hybrid/config/options.py",
        '        getattr(config, "_user_set_keys", set()).add(field)\n',
        "",
    ),
    one(
        "a record that the eviction policy was not told of stays for ever",
        ARC,
        "chain(newest_last, self._once, self._main, cache_dict)",
        "chain(newest_last, self._once, self._main)",
    ),
    one(
        "after a restart new prompts push out one another only",
        DISK,
        "            self.cache_policy.found_again(file.key)\n",
        "            self.cache_policy.update_on_hit(file.key, self.dict)\n",
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
        "            self.disk_worker.remove_put_task(key)\n            self._arrive(key)\n",
        "            self.disk_worker.remove_put_task(key)\n",
    ),
    one(
        "records found again are not counted by LFU",
        DISK,
        "            self.cache_policy.update_on_put(file.key)\n",
        "            pass\n",
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
        "        self._pause.fail()\n",
        "",
    ),
    one(
        "evictions in vain are as frequent after an hour",
        "lmcache_hybrid/core/backoff.py",
        "self._next, self.until = 2 * seconds, ",
        "self._next, self.until = seconds, ",
    ),
    one(
        "on a full disk nothing new is stored",
        ROOM,
        "        if self._pause.lasts:\n",
        "        if size:\n",
    ),
    one(
        "a disk that is full for other files evicts what is too little",
        DISK,
        "if all(total < size for total in itertools.accumulate(entries, initial=strange)):",
        "if not strange + sum(entries):",
    ),
    one(
        "records evicted on a full disk are counted for ever",
        DISK,
        "        self.current_cache_size -= entry.size\n        self.remove(candidates",
        "        self.remove(candidates",
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
        "a read that raises keeps the buffers of those beside it",
        "lmcache_hybrid/storage/remote/reader.py",
        "pool.submit(tried, key)",
        "pool.submit(here.copy().run, read, key)",
    ),
    one(
        "threads of reads outlive their engine",
        "lmcache_hybrid/worker/worker.py",
        "        self.store.close()\n",
        "",
    ),
    one(
        "of ranks that make a folder at once one is refused",
        "lmcache_hybrid/config/folders.py",
        "        with contextlib.suppress(FileExistsError):\n",
        "        with contextlib.suppress(FileNotFoundError):\n",
    ),
    one(
        "a folder of another user is taken",
        "lmcache_hybrid/config/folders.py",
        "        if status.st_uid != trusted:\n",
        "        if False:\n",
    ),
    one(
        "one record that cannot be read is promised again and again",
        DISK,
        "        return self._load_chunk_into_memory(key, path, memory)\n",
        "        self.read_file(key, memory.byte_array, path)\n        return memory\n",
    ),
    # Redis
    one(
        "values are read on the core that vLLM computes on",
        REDIS,
        "        unbound = anywhere(cores())\n",
        "        unbound = None\n",
    ),
    one(
        "LMCache's own connector serves Redis",
        MAKE_CONNECTOR,
        "    if place is None:\n",
        "    if place:\n",
    ),
    one(
        "what replaces LMCache's own does not say when it can go",
        MAKE_CONNECTOR,
        "    Remove when: ``ConnectorManager`` asks",
        "    Later ``ConnectorManager`` may ask",
    ),
    one(
        "what repairs no bug says that it does",
        MAKE_CONNECTOR,
        "    No bug: LMCache's ``ConnectorManager``",
        "    Bug: LMCache's ``ConnectorManager``",
    ),
    one(
        "damaged records stay in Redis",
        REMOTE,
        "        self._connector.delete(key, REMOVAL_SECONDS)\n",
        "        pass\n",
    ),
    one(
        "values are copied on their way to Redis",
        REDIS,
        "_encoded(name), value, deadline)",
        "_encoded(name), memoryview(bytes(value)), deadline)",
    ),
    one(
        "a cancelled read from Redis loses its memory",
        REDIS,
        "            job.add_done_callback(_release)\n",
        "",
    ),
    one(
        "memory is given back while it is sent",
        REDIS,
        "        memory.ref_count_up()\n",
        "        memory.ref_count_up()\n        memory.ref_count_down()\n",
    ),
    one(
        "failed writes to Redis are not counted",
        REDIS,
        "                self.failed(1)\n",
        "                pass\n",
    ),
    one(
        "a scheme that LMCache does not know is taken for one that it does",
        "lmcache_hybrid/config/stores/__init__.py",
        "    if scheme not in BY_SCHEME:\n",
        "    if scheme.lower() not in BY_SCHEME:\n",
    ),
    one(
        "a URL without slashes is shown with its password",
        "lmcache_hybrid/config/redis_credentials.py",
        '        return url.rpartition("@")[2]\n',
        "        return url\n",
    ),
    one(
        "a shutdown waits for a silent cluster",
        SERVERS,
        "        self._asker.shutdown(wait=False, cancel_futures=True)\n",
        "        self._asker.shutdown(wait=True, cancel_futures=True)\n",
    ),
    one(
        "a cluster is connected to after the shutdown",
        SERVERS,
        "            self._closed = True\n            servers, client",
        "            servers, client",
    ),
    one(
        "a thread to Redis is started when there is work for it",
        REDIS,
        '            self._writers = started(WRITERS, "hybrid-redis-write", unbound)\n',
        "            from concurrent.futures import ThreadPoolExecutor as lazy\n\n"
        '            self._writers = lazy(WRITERS, "hybrid-redis-write", unbound)\n',
    ),
    one(
        "the thread that deletes is started when there is work for it",
        "lmcache_hybrid/storage/disk/deleter.py",
        '        self._thread = started(1, "hybrid-delete")\n',
        "        from concurrent.futures import ThreadPoolExecutor as lazy\n\n"
        '        self._thread = lazy(1, "hybrid-delete")\n',
    ),
    one(
        "a Redis is given up after a hundred connections",
        SERVERS,
        "    return pool.connection_class(**pool.connection_kwargs)\n",
        "    return pool.make_connection()\n",
    ),
    one(
        "what was read before a reset is kept under a name of after it",
        STORE,
        "        if read and claim.made > self._cleared:",
        "        if read:",
    ),
    one(
        "writes wait for a silent Redis one after the other",
        REDIS,
        "        if self._silent >= asked:\n",
        "        if self._silent > time.monotonic():\n",
    ),
    one(
        "a write that Redis refused fails those behind it",
        REDIS,
        "begun >= SILENT_SECONDS:",
        "begun >= 0:",
    ),
    one(
        "queued writes are dropped at shutdown",
        REDIS,
        "timeout=FLUSH_SECONDS)",
        "timeout=0)",
    ),
    one(
        "a connection that the server closed fails the read that finds it",
        REDIS,
        "        except TRY_AGAIN as failure:\n            error = failure\n        with",
        "        except ZeroDivisionError as failure:\n            error = failure\n        with",
    ),
    one(
        "a lookup is not asked again on a new connection",
        REDIS,
        "        except TRY_AGAIN as failure:\n            error = failure\n        if",
        "        except ZeroDivisionError as failure:\n            error = failure\n        if",
    ),
    one(
        "a node is not told that it was asked on purpose",
        REDIS,
        "            if type(error) is AskError:\n",
        "            if not error:\n",
    ),
    one(
        "a lookup takes a moving slot for an empty one",
        REDIS,
        "self._exists_at(each, name, deadline) if type(each) is AskError else _is_one(each)",
        "False if type(each) is AskError else _is_one(each)",
    ),
    one(
        "slots that have moved are looked for where they were",
        SERVERS,
        "                client.nodes_manager.initialize()\n",
        "                pass\n",
    ),
    one(
        "a connection in the middle of a value is used for the next one",
        SERVERS,
        "            connection.disconnect()\n            if",
        "            self._idle.append(connection)\n            if",
    ),
    one(
        "connections that the server closed, too, are kept",
        SERVERS,
        "                self._forget()\n            raise\n",
        "                pass\n            raise\n",
    ),
    one(
        "a shutdown waits for a silent Redis",
        SERVERS,
        "                connection._sock.shutdown(socket.SHUT_RDWR)\n",
        "                pass\n",
    ),
    one(
        "each piece of a value has the whole timeout",
        SOCKETS,
        "    left = deadline - time.monotonic()\n",
        "    left = 1.0\n",
    ),
    one(
        "replies that nobody asked for are left for the next question",
        SOCKETS,
        "    if len(found) != count:\n",
        "    if len(found) < count:\n",
    ),
)
