# SPDX-License-Identifier: Apache-2.0
"""Who may read and write: keys, passwords, TLS."""

from tests.mutants.defect import each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/storage/record_format.py": {
        "seals are not looked at": gone("    check_seal(record, digester)\n"),
    },
    "lmcache_hybrid/core/digests.py": {
        "a seal stands for any header": (
            "blake3(header, key=self._headers)",
            "blake3(header[:8], key=self._headers)",
        ),
        "the digest of the digests needs no key": (
            "blake3(data, key=self._digests).digest(length=DIGEST_BYTES)",
            "xxhash.xxh3_128_digest(data)",
        ),
        "stores with and without a key share names": (
            "        return blake3(self.key_id + fingerprint).digest(length=len(fingerprint))\n",
            "        return fingerprint\n",
        ),
    },
    "lmcache_hybrid/core/secret_files.py": {
        "a key that everybody can read is taken": (
            "if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):",
            "if status.st_mode & stat.S_IWGRP:",
        ),
    },
    "lmcache_hybrid/storage/lmcache_store.py": {
        "loads check the payload without the key": (
            "key: LMCacheBuffer(memory, self._digester)",
            "key: LMCacheBuffer(memory, PLAIN)",
        ),
    },
    "lmcache_hybrid/storage/open_store.py": {
        "the store is opened without the key": (
            "fingerprint, max_payload, digester, replicas, residency\n",
            "fingerprint, max_payload, replicas=replicas, residency=residency\n",
        ),
    },
    "lmcache_hybrid/config/lmcache_config.py": {
        "LMCache logs the passwords that a server of settings sends": passes(
            "        vars(record).update(msg=without_secrets(record.getMessage()), args=())\n"
        ),
        "LMCache is told the password": gone("    hide_passwords(config)\n"),
    },
    "lmcache_hybrid/storage/remote/clients.py": {
        "Redis is used without login and TLS": (
            "    options = connection_options(url) | {",
            "    options = {",
        ),
        "Redis is told who the client is, and twemproxy ends the connection": gone(", **_QUIET"),
        "sentinels are asked without TLS": (
            "{name: options[name] for name in _OF_SENTINELS if name in options}",
            "{}",
        ),
    },
    "lmcache_hybrid/tools/cli/purge.py": {
        "purge looks at sealed records without the key": (
            "verify(store, entry, self.digester)",
            "verify(store, entry)",
        ),
    },
    "lmcache_hybrid/config/redis_credentials.py": {
        "an error shows the password of a URL that cannot be read": (
            '        raise ValueError(\n            "its port is not a number;',
            '        raise ValueError(\n            f"{url}: its port is not a number;',
        ),
        "a password in the query of a URL is told": passes(
            '        bare = _IN_QUERY.sub("", bare).rstrip("?&")\n'
        ),
        "a password in the environment wins over the one in the file": (
            "    if not path:\n",
            "    if not path or PASSWORD in os.environ:\n",
        ),
    },
    "lmcache_hybrid/config/stores/redis.py": {
        "records cross the network in the clear without a word": (
            "        return unencrypted(place.url)\n",
            "        return None\n",
        ),
        "a Redis plugin gets records in the clear without a word": (
            "        return unencrypted(place.url)\n",
            "        return None if place.plugin else unencrypted(place.url)\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
