# SPDX-License-Identifier: Apache-2.0
"""Records in buckets, and other names of Redis."""

from tests.mutants.defect import one

S3 = "lmcache_hybrid/storage/remote/s3.py"
S3_OPTIONS = "lmcache_hybrid/config/stores/s3.py"
NAMES = "lmcache_hybrid/config/other_names.py"
OPENING = "lmcache_hybrid/tools/stored/opening.py"
DOCTOR = "lmcache_hybrid/tools/doctor/backends.py"

DEFECTS = (
    one(
        "a read that nobody waits for gives its memory back while S3's bytes still come",
        S3,
        "            request.finished_future.add_done_callback(lambda _: read.release())\n",
        "            read.release()\n",
    ),
    one(
        "a write that nobody waits for gives its memory back while S3's client reads it",
        S3,
        "        request.finished_future.add_done_callback(lambda _: memory.ref_count_down())\n",
        "        memory.ref_count_down()\n",
    ),
    one(
        "requests to S3 that nobody waits for go on",
        S3,
        "        except (asyncio.CancelledError, TimeoutError):\n            request.cancel()\n",
        "        except (asyncio.CancelledError, TimeoutError):\n",
    ),
    one(
        "a write to S3 may take for ever",
        S3,
        "        await self._answer(request, WRITE_SECONDS)\n",
        "        await self._answer(request)\n",
    ),
    one(
        "writes behind one that S3 did not answer wait their turn",
        S3,
        "                if self._unreachable >= asked:\n",
        "                if self._unreachable > time.monotonic():\n",
    ),
    one(
        "objects are asked for one after the other",
        S3,
        "        turns = asyncio.Semaphore(SIDE_BY_SIDE)\n",
        "        turns = asyncio.Semaphore(1)\n",
    ),
    one(
        "an object of which a part is missing is a record",
        S3,
        "        if self._memory is None or self._received != len(self._target):\n",
        "        if self._memory is None:\n",
    ),
    one(
        "memory for S3's message of an error",
        S3,
        "        if status_code not in (200, 206) or self._memory is not None:\n",
        "        if self._memory is not None:\n",
    ),
    one(
        "each part of an object goes to its beginning",
        S3,
        "self._target[offset : offset + len(chunk)]",
        "self._target[: len(chunk)]",
    ),
    one(
        "each part of an object is sent from its beginning",
        S3,
        "        self._at += len(part)\n",
        "",
    ),
    one(
        "a write that S3 refuses is not counted",
        S3,
        "        except (ConnectionError, S3Error):\n            self.failed(1)\n",
        "        except (ConnectionError, S3Error):\n",
    ),
    one(
        "closing drops what waits to be written to S3",
        S3,
        "        if self._writing:\n",
        "        if not self._writing:\n",
    ),
    one(
        "closing leaves requests to S3 behind",
        S3,
        "        for request in rest:\n            request.cancel()\n",
        "",
    ),
    one(
        "where S3 fails a lookup it says that nothing is there",
        S3,
        "            if error.status == 404:\n                return False\n            raise\n",
        "            return False\n",
    ),
    one(
        "a bucket's region may be missing",
        S3_OPTIONS,
        '    if not extra.get("s3_region"):\n',
        '    if "s3_region" in extra and not extra["s3_region"]:\n',
    ),
    one(
        "a bucket without TLS is not told",
        S3_OPTIONS,
        '        if not (config.extra_config or {}).get("disable_tls"):\n',
        "        if False:\n",
    ),
    one(
        "a bucket with a folder behind it is accepted",
        S3_OPTIONS,
        " or parts.path or parts.query:\n",
        " or parts.query:\n",
    ),
    one(
        "valkey:// forgets TLS",
        NAMES,
        "{'rediss' if tls else 'redis'}",
        "{'redis'}",
    ),
    one(
        "valkey:// forgets its cluster",
        NAMES,
        '        return f"redis-cluster://{server}"\n',
        '        return f"redis://{server}"\n',
    ),
    one(
        "valkey:// forgets the password",
        NAMES,
        'str(extra.pop("valkey_password", ""))',
        'str(extra.get("valkey_password", ""))',
    ),
    one(
        "resp:// does not log in as its environment says",
        NAMES,
        'or os.environ.get(RESP_PASSWORD, "")',
        'or ""',
    ),
    one(
        "options of valkey:// that have no meaning are ignored",
        NAMES,
        "        if _is_true(value) if name == _TTL else value is not None:\n",
        "        if _is_true(value):\n",
    ),
    one(
        "inspect looks for resp:// under its own name",
        OPENING,
        "    name_as_redis(config)\n",
        "",
    ),
    one(
        "doctor does not say that a server is away",
        DOCTOR,
        "            if away := _away(store, name, key, _place(config, name)):\n",
        '            if away := "":\n',
    ),
)
