# SPDX-License-Identifier: Apache-2.0
"""Memory to read into, and remote stores."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/storage/remote/record_connector.py": {
        "each write that fails is a line of the log": (
            "and self._untold[kind].is_news():",
            "and kind:",
        ),
        "a failed write is not counted": passes("                self.failed(1)\n"),
        "a failed write keeps its memory": (
            "            memory.ref_count_down()\n            if job.cancelled()",
            "            job.cancelled() or memory.ref_count_down()\n"
            "            if job.cancelled()",
        ),
        "memory is given back while it is written": (
            "        memory.ref_count_up()\n",
            "        memory.ref_count_up()\n        memory.ref_count_down()\n",
        ),
        "closing forgets queued writes": passes(
            "            await asyncio.wait(writes, timeout=seconds)\n"
        ),
        "a store that LMCache's health monitor has switched off stays off": (
            "self.meta_shapes, self.meta_dtypes = [record_shape(CHECKED_BYTES)], [torch.uint8]",
            "self.meta_shapes = [record_shape(CHECKED_BYTES)]",
        ),
        "the end of an engine logs a traceback for each write that it cuts off": gone(
            "    end.add_done_callback(lambda end: end.cancelled() or end.exception())\n"
        ),
    },
    "lmcache_hybrid/storage/tiers/__init__.py": {
        "a backend that LMCache has wrapped is opened as any other": (
            "isinstance(backend, served)), None)",
            "isinstance(backend, served)), RemoteTier)",
        ),
    },
    "lmcache_hybrid/storage/tiers/remote.py": {
        "queued writes are lost at the end": (
            "        if self.backend.loop.is_running():\n",
            "        if False:\n",
        ),
        "memory that a hanging call may still use is given back": never(
            "        if self._connector.uses_memory:\n"
        ),
        "what LMCache's health check writes stays in the store": gone(
            "        self._remove_what_checks_leave()\n"
        ),
        "damaged records stay in Redis": passes(
            "        self._connector.delete(key, REMOVAL_SECONDS)\n"
        ),
    },
    "lmcache_hybrid/storage/remote/redis.py": {
        "a server that closes connections is not asked whether a value is too long": (
            "ask if isinstance(error, CLOSED) else None",
            "None",
        ),
        "a connector to Redis that cannot start all threads leaves some": gone(
            "            stack.callback(self._readers.shutdown)\n"
        ),
        "values are read on the core that vLLM computes on": (
            "        unbound = anywhere(cores())\n",
            "        unbound = None\n",
        ),
        "values are copied on their way to Redis": (
            "_encoded(name), value, deadline)",
            "_encoded(name), memoryview(bytes(value)), deadline)",
        ),
        "a cancelled read from Redis loses its memory": gone(
            "            job.add_done_callback(release_unread)\n"
        ),
        "a thread to Redis is started when there is work for it": (
            '            self._writers = started(WRITERS, "hybrid-redis-write", unbound)\n',
            "            from concurrent.futures import ThreadPoolExecutor as lazy\n\n"
            '            self._writers = lazy(WRITERS, "hybrid-redis-write", unbound)\n',
        ),
        "writes wait for a silent Redis one after the other": (
            "        if self._silent >= asked:\n",
            "        if self._silent > time.monotonic():\n",
        ),
        "a write that Redis refused fails those behind it": (
            "begun >= SILENT_SECONDS:",
            "begun >= 0:",
        ),
        "a connection that the server closed fails the read that finds it": (
            "        except TRY_AGAIN as failure:\n            error = failure\n        with",
            "        except ZeroDivisionError as failure:\n            error = failure\n"
            "        with",
        ),
        "a lookup is not asked again on a new connection": (
            "        if errors:\n",
            "        if False:\n",
        ),
        "a node is not told that it was asked on purpose": (
            "            if type(error) is AskError:\n",
            "            if not error:\n",
        ),
        "a lookup takes a moving slot for an empty one": (
            "            return self._exists_at(answer, name, deadline)\n",
            "            return False\n",
        ),
        "what Redis held already is not counted as saved again": (
            '            return held == [b"1"]\n',
            "            return False\n",
        ),
        "a Redis that may not be asked takes no record": (
            "            _checked(answer)\n            return",
            "            [_checked(each) for each in (*held, answer)]\n            return",
        ),
        "the end of an engine destroys calls that still wait for Redis": passes(
            "            await asyncio.wait(self._calls, timeout=END_SECONDS)\n"
        ),
        "a Redis that refuses every record says nothing": gone(
            "            self._refusals.say(error, self.cause(error))\n"
        ),
    },
    "lmcache_hybrid/storage/remote/refusals.py": {
        "each record that Redis refuses is a line of the log": (
            "            if not self._kinds[kind].is_news():\n",
            "            if False:\n",
        ),
        "each failed lookup asks Redis why": (
            "            if self._closed or now < self._asks_at:\n",
            "            if self._closed:\n",
        ),
    },
    "lmcache_hybrid/config/stores/base.py": {
        "a folder without a name is the working directory": (
            "    if not all(folders):\n",
            "    if not any(folders):\n",
        ),
        "spaces around a folder are part of its name": (
            'tuple(part.strip() for part in value.split(","))',
            'tuple(value.split(","))',
        ),
    },
    "lmcache_hybrid/config/lmcache_config.py": {
        "nobody checks the folder of a plugin": (
            "    for option, folders in shared_folders(config):\n",
            "    for option, folders in shared_folders(config)[:1 if config.remote_url else 0]:\n",
        ),
        "an eviction policy of extra config is taken for a default": gone(
            '        getattr(config, "_user_set_keys", set()).add(field)\n'
        ),
    },
    "lmcache_hybrid/storage/remote/servers.py": {
        "nobody looks for the successor of a node that falls silent": passes(
            "                self._silent()\n"
        ),
        "names of a cluster's URL are resolved once": (
            "                with contextlib.suppress(RedisClusterException):\n",
            "                with contextlib.nullcontext():\n",
        ),
        "a connection over TLS that the server closed fails the write that finds it": gone(
            ", ssl.SSLEOFError, ssl.SSLZeroReturnError"
        ),
        "a silent cluster is waited for as long as all of its nodes are silent": (
            "            return asking.result(self._seconds)\n",
            "            return asking.result()\n",
        ),
        "each caller asks the nodes of a cluster that is silent": (
            "        if self._asking is None or self._asking.done():\n",
            "        if self._asking is None or self._asking:\n",
        ),
        "a cluster that answers after the end stays connected": (
            "            client.close()\n            raise",
            "            raise",
        ),
        "a shutdown waits for a silent cluster": (
            "        self._asker.shutdown(wait=False, cancel_futures=True)\n",
            "        self._asker.shutdown(wait=True, cancel_futures=True)\n",
        ),
        "a cluster is connected to after the shutdown": (
            "            self._closed = True\n            servers, client",
            "            servers, client",
        ),
        "a Redis is given up after a hundred connections": (
            "    return pool.connection_class(**read_again(pool.connection_kwargs))\n",
            "    return pool.make_connection()\n",
        ),
        "a password that is replaced in its file is not read again": (
            "pool.connection_class(**read_again(pool.connection_kwargs))",
            "pool.connection_class(**pool.connection_kwargs)",
        ),
        "slots that have moved are looked for where they were": passes(
            "                client.nodes_manager.initialize()\n"
        ),
        "a connection in the middle of a value is used for the next one": (
            "            connection.disconnect()\n            if",
            "            self._idle.append(connection)\n            if",
        ),
        "connections that the server closed, too, are kept": (
            "                self._forget()\n            elif",
            "                pass\n            elif",
        ),
        "a shutdown waits for a silent Redis": passes(
            "                socket.socket.shutdown(connection._sock, socket.SHUT_RDWR)\n"
        ),
    },
    "lmcache_hybrid/storage/key_names.py": {
        "the name of a model is cut by characters": ("[:MODEL_NAME_BYTES].decode", ".decode"),
    },
    "lmcache_hybrid/storage/read_reservation.py": {
        "room to read into is given back before it is read into": (
            "                self._room += held\n",
            "                _free(held)\n",
        ),
        "room that a read did not use stays set aside": (
            "                _free(spare)\n",
            "                self._room += spare\n",
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "a record that there was no memory for is thrown away": (
            "        if self._reservation.refused != refused and len(read) < len(keys):\n",
            "        if self._reservation.refused < refused and len(read) < len(keys):\n",
        ),
        "what was read before a reset is kept under a name of after it": (
            "        if read and claim.made > self._cleared:",
            "        if read:",
        ),
        "what RAM and disk held already is not counted as saved again": gone(
            "            self._count_held(keys, memories, location)\n"
        ),
        "what a backend did not hold counts as saved again": (
            "for memory, is_held in held if is_held)",
            "for memory, is_held in held)",
        ),
    },
    "lmcache_hybrid/storage/eviction_order.py": {
        "the first use of each chunk is noted for ever": gone(
            "        self.max_num_chunk_hash = NOTED\n"
        ),
        "prompts that come once push out what was hit": (
            "older = chain(islice(self._once, over), self._main)",
            "older = chain(self._main, self._once)",
        ),
        "the newest prompt is evicted before it can be asked again": (
            "newest_last = (key for key in older if key not in self._newest)",
            "newest_last = older",
        ),
        "a chunk's end outlives the pages of all prompts": gone(
            "                self._once.move_to_end(key, last=False)\n"
        ),
        "a prefix that two requests computed counts as seen once": (
            " or self._once.get(key, owner) != owner]",
            "]",
        ),
        "a request that stores twice counts as two": (
            "self._once.get(key, owner) != owner]",
            "key in self._once]",
        ),
        "what is stored again after its eviction counts as new": (
            "        self._main[key] = again\n",
            "        self._main[key] = False\n",
        ),
        "new turns of a conversation count as seen once": (
            "for key in keys if len(known) >= KNOWN * len(keys) else known:",
            "for key in known:",
        ),
        "new prompts never get more room": gone(
            "            self._share += max(1.0, main / once)\n"
        ),
        "new prompts never give room back": gone(
            "            self._share -= max(1.0, once / main)\n"
        ),
        "an eviction policy that somebody chose is replaced": (
            " and not chosen else policy",
            " else policy",
        ),
        "a record that the eviction policy was not told of stays for ever": (
            "chain(newest_last, self._once, self._main, cache_dict)",
            "chain(newest_last, self._once, self._main)",
        ),
    },
    "lmcache_hybrid/core/backoff.py": {
        "what fails again after it was mended is told late": (
            "        if now - self._last > HEALTHY_SECONDS:\n",
            "        if False:\n",
        ),
        "evictions in vain are as frequent after an hour": (
            "self._next, self.until = 2 * seconds, ",
            "self._next, self.until = seconds, ",
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "with python -O the null block is stored": (
            '            raise ValueError(f"block {block} of {self.num_blocks} cannot be '
            'copied")\n',
            "            assert not __debug__\n",
        ),
    },
    "lmcache_hybrid/storage/record_format.py": {
        "with python -O a record is sealed with digests of another": (
            "    if len(record) != HEADER_BYTES + length + len(digests):\n",
            "    if len(record) < HEADER_BYTES + length:\n",
        ),
    },
    "lmcache_hybrid/storage/remote/silent_reads.py": {
        "a read that raises keeps the buffers of those beside it": (
            "pool.submit(tried, key)",
            "pool.submit(here.copy().run, read, key)",
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "threads of reads outlive their engine": gone("        self.store.close()\n"),
    },
    "lmcache_hybrid/config/folders.py": {
        "of ranks that make a folder at once one is refused": (
            "        with contextlib.suppress(FileExistsError):\n",
            "        with contextlib.suppress(FileNotFoundError):\n",
        ),
        "a folder of another user is taken": never("        if status.st_uid != trusted:\n"),
    },
    "lmcache_hybrid/storage/remote/make_connector.py": {
        "LMCache's own connector serves Redis": ("    if place is None:\n", "    if place:\n"),
        "what replaces LMCache's own does not say when it can go": (
            "    Remove when: ``ConnectorManager`` asks",
            "    Later ``ConnectorManager`` may ask",
        ),
        "what repairs no bug says that it does": (
            "    No bug: LMCache's ``ConnectorManager``",
            "    Bug: LMCache's ``ConnectorManager``",
        ),
    },
    "lmcache_hybrid/config/stores/__init__.py": {
        "a scheme that LMCache does not know is taken for one that it does": (
            "    if scheme not in BY_SCHEME:\n",
            "    if scheme.lower() not in BY_SCHEME:\n",
        ),
    },
    "lmcache_hybrid/config/redis_credentials.py": {
        "a password is cut off at a sign that is not escaped": never(
            "    if _ends_in_login(url):\n"
        ),
        "a URL without slashes is shown with its password": (
            '        return re.split("[?#]", url.rpartition("@")[2])[0]\n',
            "        return url\n",
        ),
        "LMCache logs the keys of S3": (
            "            extra[name] = _Hidden(extra[name])\n",
            "            pass\n",
        ),
    },
    "lmcache_hybrid/storage/remote/sockets.py": {
        "each piece of a value has the whole timeout": (
            "    left = deadline - time.monotonic()\n",
            "    left = 1.0\n",
        ),
        "replies that nobody asked for are left for the next question": (
            "    if len(found) != count:\n",
            "    if len(found) < count:\n",
        ),
    },
    "lmcache_hybrid/storage/folder/record_io.py": {
        "what a folder held already is not counted as saved again": (
            "    return replaces\n",
            "    return False\n",
        ),
    },
    "lmcache_hybrid/storage/remote/redis_failures.py": {
        "a server that speaks TLS alone only closes connections": (
            "if not tls and not words and _speaks_tls(place):",
            "if tls and not words and _speaks_tls(place):",
        ),
        "a server that asks for a client's certificate is not told of": never(
            "    if _NO_CERTIFICATE in words:\n"
        ),
        "nobody sees that a server which closes TLS asks for a client's certificate": (
            "        return _NO_CERTIFICATE in str(error)\n",
            "        return False\n",
        ),
        "what a server in protected mode says is lost": never(
            '    if words.startswith("DENIED"):\n'
        ),
        "TLS to a server without it only times out": (
            '    tls = scheme == "rediss" or (',
            "    tls = False and (",
        ),
        "a node of a cluster is taken for a server of its own without a word": (
            "    if isinstance(error, MovedError) and",
            "    if False and",
        ),
        "who asks for a password does not say where to write it": (
            '    if words.startswith(_NO_LOGIN):\n        return f"it',
            '    if False:\n        return f"it',
        ),
        "a primary behind sentinels is not asked why it cannot be used": (
            "    place = masters[service]",
            '    return ""\n    place = masters[service]',
        ),
        "sentinels that lack the primary's password are not told of": (
            " and isinstance(error, MasterNotFoundError):",
            " and False:",
        ),
        "a sentinel that asks for a password is not told of": never(
            '    if words.startswith(("DENIED", *_NO_LOGIN)):\n'
        ),
        "a service that sentinels do not know is not told of": (
            "    if not masters:\n",
            "    if service not in masters:\n",
        ),
    },
    "lmcache_hybrid/storage/open_store.py": {
        "a store that does not open leaves LMCache's event loop behind": (
            "                loop.call_soon_threadsafe(loop.stop)\n            thread.join(",
            "                loop.is_running()\n            abs(",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
