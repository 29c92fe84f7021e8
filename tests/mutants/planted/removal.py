# SPDX-License-Identifier: Apache-2.0
"""How a damaged record is removed."""

from tests.mutants.defect import each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/storage/lmcache_store.py": {
        "a record that cannot be read is deleted although it may be whole": (
            "            self._damaged.unreadable(self.engine_key(key), location)\n",
            "            self.discard(key, claim)\n",
        ),
        "a record that cannot be read is promised again and again": gone(
            "            self._damaged.unreadable(self.engine_key(key), location)\n"
        ),
        "a page that another rank wrote anew stays hidden": passes(
            "                    self._damaged.written_elsewhere(name, self.engine_key(key))\n"
        ),
    },
    "lmcache_hybrid/storage/hidden_records.py": {
        "a record that could not be read once is never looked up again": (
            "until is not None and time.monotonic() < until",
            "until is not None",
        ),
        "a damaged copy costs a record its copies in other backends": (
            "            if location not in (None, name):\n",
            "            if not name:\n",
        ),
        "a damaged record that a store keeps is found there again": gone(
            "                self._hide(name, key)\n"
        ),
        "a damaged record that was written anew stays hidden": passes(
            "        self._hidden[backend].show(key)\n"
        ),
        "a page that another rank cannot write fails every second request": gone(
            "                _remember(self._doubted, key)\n"
        ),
        "a page stays hidden for ever where another rank failed to write it once": (
            "            if time.monotonic() >= self._doubted.get(key, 0.0):\n",
            "            if key not in self._doubted:\n",
        ),
    },
    "lmcache_hybrid/storage/disk/backend.py": {
        "a file of local_disk that cannot be opened counts as gone": (
            '            if getattr(error, "errno", None) in NO_FILE:\n',
            "            if isinstance(error, OSError):\n",
        ),
    },
    "lmcache_hybrid/storage/tier_lookup.py": {
        "a damaged record of one store is hidden in all of them": (
            "        skipped = hidden(tier.name)\n",
            '        skipped = hidden("RemoteBackend")\n',
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "damaged pages cost a record its copies in other backends": (
            "                self._store.discard(error.key, claim)\n",
            "                self._store.discard(error.key)\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
