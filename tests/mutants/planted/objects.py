# SPDX-License-Identifier: Apache-2.0
"""Records in buckets, and other names of Redis."""

from tests.mutants.defect import always, each_of, gone, never

S3 = "lmcache_hybrid/storage/remote/s3.py"

MISTAKES = {
    "lmcache_hybrid/storage/remote/s3.py": {
        "a read that nobody waits for gives its memory back while S3's bytes still come": (
            "            request.finished_future.add_done_callback(lambda _: read.release())\n",
            "            read.release()\n",
        ),
        "a write that nobody waits for gives its memory back while S3's client reads it": (
            "        request.finished_future.add_done_callback(lambda _: "
            "memory.ref_count_down())\n",
            "        memory.ref_count_down()\n",
        ),
        "requests to S3 that nobody waits for go on": (
            "        except (asyncio.CancelledError, TimeoutError):\n"
            "            request.cancel()\n",
            "        except (asyncio.CancelledError, TimeoutError):\n",
        ),
        "a write to S3 may take for ever": (
            "        await self._answer(request, WRITE_SECONDS)\n",
            "        await self._answer(request)\n",
        ),
        "writes behind one that S3 did not answer wait their turn": (
            "                if self._unreachable >= asked:\n",
            "                if self._unreachable > time.monotonic():\n",
        ),
        "objects are asked for one after the other": (
            "        turns = asyncio.Semaphore(SIDE_BY_SIDE)\n",
            "        turns = asyncio.Semaphore(1)\n",
        ),
        "an object of which a part is missing is a record": (
            "        if self._memory is None or self._received != len(self._target):\n",
            "        if self._memory is None:\n",
        ),
        "memory for S3's message of an error": (
            "        if status_code not in (200, 206) or self._memory is not None:\n",
            "        if self._memory is not None:\n",
        ),
        "each part of an object goes to its beginning": (
            "self._target[offset : offset + len(chunk)]",
            "self._target[: len(chunk)]",
        ),
        "each part of an object is sent from its beginning": gone(
            "        self._at += len(part)\n"
        ),
        "a write that S3 refuses is not counted": (
            "                self._unreachable = time.monotonic()\n            self.failed(1)\n",
            "                self._unreachable = time.monotonic()\n",
        ),
        "nobody learns why an S3 takes no record": (
            "            self.failed(1)\n            self._explain(error)\n",
            "            self.failed(1)\n",
        ),
        "closing drops what waits to be written to S3": (
            "        if self._batches:\n",
            "        if not self._batches:\n",
        ),
        "closing leaves requests to S3 behind": gone(
            "        for request in rest:\n            request.cancel()\n"
        ),
        "where S3 fails a lookup it says that nothing is there": (
            "            if error.status == 403 and not error.code:\n                return error\n"
            "            raise\n",
            "            return False\n",
        ),
        "without s3:ListBucket an object that is missing hides those that are there": (
            " and time.monotonic() - self._let_in >= TRUSTED_SECONDS:\n",
            ":\n",
        ),
        "objects that may not be read are taken for missing without a word": (
            "self._let_in >= TRUSTED_SECONDS:\n",
            "self._let_in < 0:\n",
        ),
        "a lookup in S3 that waits for credentials does not say so": (
            "return silence or s3_failures.lack_of_credentials(theirs.credentials_provider)",
            "return silence",
        ),
        "an error of S3's client that names credentials is not explained": never(
            '        if isinstance(error, AwsCrtError) and "CREDENTIALS" in error.name:\n'
        ),
    },
    "lmcache_hybrid/config/stores/s3.py": {
        "a bucket's region may be missing": (
            '    if not extra.get("s3_region"):\n',
            '    if "s3_region" in extra and not extra["s3_region"]:\n',
        ),
        "a bucket with a dot, which AWS' certificates do not cover, is accepted": never(
            '    if dotted and not extra.get("disable_tls"):\n'
        ),
        "a bucket without TLS is not told": never(
            '        if not (config.extra_config or {}).get("disable_tls"):\n'
        ),
        "a bucket with a folder behind it is accepted": (
            " or parts.path or parts.query or alone:\n",
            " or parts.query:\n",
        ),
    },
    "lmcache_hybrid/config/other_names.py": {
        "valkey:// forgets TLS": ("{'rediss' if tls else 'redis'}", "{'redis'}"),
        "valkey:// forgets its cluster": (
            '        return f"redis-cluster://{server}"\n',
            '        return f"redis://{server}"\n',
        ),
        "valkey:// forgets the password": (
            'str(extra.pop("valkey_password", ""))',
            'str(extra.get("valkey_password", ""))',
        ),
        "resp:// does not log in as its environment says": (
            'or os.environ.get(RESP_PASSWORD, "")',
            'or ""',
        ),
        "options of valkey:// that have no meaning are ignored": (
            "        if _is_true(value) if name == _TTL else value is not None:\n",
            "        if _is_true(value):\n",
        ),
    },
    "lmcache_hybrid/tools/stored/opening.py": {
        "inspect looks for resp:// under its own name": gone("    name_as_redis(config)\n"),
    },
    "lmcache_hybrid/tools/doctor/backends.py": {
        "doctor does not say that a server is away": (
            "            if away := _away(store, name, key):\n",
            '            if away := "":\n',
        ),
    },
    "lmcache_hybrid/storage/remote/s3_failures.py": {
        "an S3 that speaks TLS only is not told": never("    if encrypted and not tls:\n"),
        "an S3 without TLS is not told": never(
            "    if tls and why in _PLAIN_ANSWERS and _answers(plain)[0]:\n"
        ),
        "an S3 whose TLS fails for another reason is called one without TLS": (
            "    if tls and why in _PLAIN_ANSWERS and _answers(plain)[0]:\n",
            "    if tls and not encrypted and _answers(plain)[0]:\n",
        ),
        "a certificate of S3 that nobody trusts is not told": (
            "        if tls:\n            said",
            "        if False:\n            said",
        ),
        "a certificate for another name is said to be of an unknown authority": never(
            '            if "mismatch" in said:  # of host name or address\n'
        ),
        "a proxy that S3 does not pass is not told": always(
            "            if _passes(proxy, host, port, tls):\n"
        ),
        "each failure of S3 is said to be the proxy's": never(
            "            if _passes(proxy, host, port, tls):\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
