# SPDX-License-Identifier: Apache-2.0
"""How a damaged record is removed."""

from tests.mutants.defect import one

REMOVAL = "lmcache_hybrid/storage/removal.py"

DEFECTS = (
    one(
        "a damaged copy costs a record its copies in other backends",
        REMOVAL,
        "            if location not in (None, name):\n",
        "            if not name:\n",
    ),
    one(
        "a damaged record that a store keeps is found there again",
        REMOVAL,
        "        hidden.add(key)\n",
        "",
    ),
    one(
        "a damaged record that was written anew stays hidden",
        REMOVAL,
        "            hidden.difference_update(keys)\n",
        "            hidden.difference(keys)\n",
    ),
    one(
        "a damaged record of one store is hidden in all of them",
        "lmcache_hybrid/storage/tier_lookup.py",
        "        skipped = hidden(name)\n",
        '        skipped = hidden("RemoteBackend")\n',
    ),
    one(
        "damaged pages cost a record its copies in other backends",
        "lmcache_hybrid/worker/loads.py",
        "                self._store.discard(error.key, claim)\n",
        "                self._store.discard(error.key)\n",
    ),
)
