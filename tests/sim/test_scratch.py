# SPDX-License-Identifier: Apache-2.0
"""Groups that hold scratch only: nothing of them is stored, and a hit needs nothing of them."""

import pytest

from lmcache_hybrid.storage.key_names import parse_key

from .engine import SimEngine
from .setup import Setup
from .storage import N, Pool
from .warm import PROMPT, hits


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("hash_size", [N, N // 4], ids=["whole blocks", "inside a block"])
@pytest.mark.parametrize("groups", ["csa", "sca", "sac"])
def test_a_hit_goes_on_without_the_scratch_of_who_stored_it(groups, hash_size, drafts):
    """Each step checks the scratch, too: it is empty at a boundary and filled behind it."""
    pool = Pool()
    engine = SimEngine(Setup(groups=groups, ranks=2, hash_size=hash_size, drafts=drafts), pool)
    for name, output in (("first", 2), ("again", 5)):
        engine.add(name, PROMPT, output)
        engine.drain()
        engine.reset_prefix_cache(False)
    assert hits(engine) == 1
    stored = {parse_key(key.to_string()).label for key, _ in pool.records}
    assert stored == {f"a{groups.index('a')}", f"s{groups.index('s')}"}
    engine.check_empty()
    pool.close()
