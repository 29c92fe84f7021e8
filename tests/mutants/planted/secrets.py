# SPDX-License-Identifier: Apache-2.0
"""Who may read and write: keys, passwords, TLS."""

from tests.mutants.defect import one

DIGESTS = "lmcache_hybrid/core/digests.py"
RECORD = "lmcache_hybrid/storage/record_format.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"

DEFECTS = (
    # Records sealed with a key
    one(
        "seals are not looked at",
        RECORD,
        "    check_seal(record, digester)\n",
        "",
    ),
    one(
        "a seal stands for any header",
        DIGESTS,
        "blake3(header, key=self._headers)",
        "blake3(header[:8], key=self._headers)",
    ),
    one(
        "the digest of the digests needs no key",
        DIGESTS,
        "blake3(data, key=self._digests).digest(length=DIGEST_BYTES)",
        "xxhash.xxh3_128_digest(data)",
    ),
    one(
        "loads check the payload without the key",
        STORE,
        "key: LMCacheBuffer(memory, self._digester)",
        "key: LMCacheBuffer(memory, PLAIN)",
    ),
    one(
        "stores with and without a key share names",
        DIGESTS,
        "        return blake3(self.key_id + fingerprint).digest(length=len(fingerprint))\n",
        "        return fingerprint\n",
    ),
    one(
        "the store is opened without the key",
        "lmcache_hybrid/storage/open_store.py",
        "fingerprint, max_payload, digester, replicas, residency\n",
        "fingerprint, max_payload, replicas=replicas, residency=residency\n",
    ),
    # Logins and TLS of Redis
    one(
        "LMCache is told the password",
        "lmcache_hybrid/config/lmcache_config.py",
        "    hide_passwords(config)\n",
        "",
    ),
    one(
        "Redis is used without login and TLS",
        "lmcache_hybrid/storage/remote/clients.py",
        "    options = connection_options(url) | {",
        "    options = {",
    ),
    one(
        "sentinels are asked without TLS",
        "lmcache_hybrid/storage/remote/clients.py",
        "{name: options[name] for name in _OF_SENTINELS if name in options}",
        "{}",
    ),
    one(
        "purge looks at sealed records without the key",
        "lmcache_hybrid/tools/cli/purge.py",
        "verify(store, entry, self.digester)",
        "verify(store, entry)",
    ),
    one(
        "an error shows the password of a URL that cannot be read",
        "lmcache_hybrid/config/redis_credentials.py",
        '        raise ValueError(\n            "its port is not a number;',
        '        raise ValueError(\n            f"{url}: its port is not a number;',
    ),
    one(
        "a password in the query of a URL is told",
        "lmcache_hybrid/config/redis_credentials.py",
        '        bare = _IN_QUERY.sub("", bare).rstrip("?&")\n',
        "        pass\n",
    ),
    one(
        "a key that everybody can read is taken",
        DIGESTS,
        "if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):",
        "if status.st_mode & stat.S_IWGRP:",
    ),
    one(
        "a password in the environment wins over the one in the file",
        "lmcache_hybrid/config/redis_credentials.py",
        "    if not path:\n",
        "    if not path or PASSWORD in os.environ:\n",
    ),
    one(
        "records cross the network in the clear without a word",
        "lmcache_hybrid/config/stores/redis.py",
        "        return unencrypted(place.url)\n",
        "        return None\n",
    ),
    one(
        "a Redis plugin gets records in the clear without a word",
        "lmcache_hybrid/config/stores/redis.py",
        "        return unencrypted(place.url)\n",
        "        return None if place.plugin else unencrypted(place.url)\n",
    ),
)
