# SPDX-License-Identifier: Apache-2.0
"""How a damaged record is removed."""

from tests.mutants.defect import one

REMOVAL = "lmcache_hybrid/storage/hidden_records.py"

STORE = "lmcache_hybrid/storage/lmcache_store.py"

DEFECTS = (
    one(
        "a record that cannot be read is deleted although it may be whole",
        STORE,
        "            self._damaged.unreadable(self.engine_key(key), location)\n",
        "            self.discard(key, claim)\n",
    ),
    one(
        "a record that cannot be read is promised again and again",
        STORE,
        "            self._damaged.unreadable(self.engine_key(key), location)\n",
        "",
    ),
    one(
        "a record that could not be read once is never looked up again",
        REMOVAL,
        "until is not None and time.monotonic() < until",
        "until is not None",
    ),
    one(
        "a file of local_disk that cannot be opened counts as gone",
        "lmcache_hybrid/storage/disk/backend.py",
        '            if getattr(error, "errno", None) in NO_FILE:\n',
        "            if isinstance(error, OSError):\n",
    ),
    one(
        "a damaged copy costs a record its copies in other backends",
        REMOVAL,
        "            if location not in (None, name):\n",
        "            if not name:\n",
    ),
    one(
        "a damaged record that a store keeps is found there again",
        REMOVAL,
        "                self._hide(name, key)\n",
        "",
    ),
    one(
        "a damaged record that was written anew stays hidden",
        REMOVAL,
        "        self._hidden[backend].show(key)\n",
        "        pass\n",
    ),
    one(
        "a page that another rank wrote anew stays hidden",
        STORE,
        "                    self._damaged.written_elsewhere(name, self.engine_key(key))\n",
        "                    pass\n",
    ),
    one(
        "a page that another rank cannot write fails every second request",
        REMOVAL,
        "                _remember(self._doubted, key)\n",
        "",
    ),
    one(
        "a page stays hidden for ever where another rank failed to write it once",
        REMOVAL,
        "            if time.monotonic() >= self._doubted.get(key, 0.0):\n",
        "            if key not in self._doubted:\n",
    ),
    one(
        "a damaged record of one store is hidden in all of them",
        "lmcache_hybrid/storage/tier_lookup.py",
        "        skipped = hidden(tier.name)\n",
        '        skipped = hidden("RemoteBackend")\n',
    ),
    one(
        "damaged pages cost a record its copies in other backends",
        "lmcache_hybrid/worker/loads.py",
        "                self._store.discard(error.key, claim)\n",
        "                self._store.discard(error.key)\n",
    ),
)
