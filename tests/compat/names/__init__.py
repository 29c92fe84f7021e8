# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM, LMCache, redis and torch that the product uses.

What is merely imported is not listed, because :func:`imports` reads it off the product's files.
Whoever assigns to or uses another attribute of theirs adds it: to :mod:`.vllm` or
:mod:`.lmcache`, or to :mod:`.vllm_read` where it is only read. Tests compare the assignments
in the code with ``replaced_in`` and all uses with the names, and look each name up in
upstream's source (tests/unit/test_hooks.py); ``make compat`` does so for other releases.
"""

import dataclasses
from pathlib import Path

from lmcache_hybrid.upstream import lmcache_home, signatures
from tests.compat.names.lmcache import LMCACHE
from tests.compat.names.resolver import Hook, imported
from tests.compat.names.vllm import VLLM
from tests.compat.names.vllm_read import READ

ROOT = Path(__file__).parents[3]
PACKAGES = ("vllm", "lmcache", "redis", "torch")
# Parameters of what the product itself looks up in untested releases are said there only.
TAKES = {f"{module}.{name}": takes for module, name, takes in signatures.listed(signatures.ALL)}
HOOKS = tuple(
    dataclasses.replace(hook, takes=TAKES.get(str(hook), hook.takes))
    for hook in (*VLLM, *READ, *LMCACHE)
)


def imports() -> list[Hook]:
    """What the product's files import from upstream, or take from LMCache's in-process part."""
    files = [f for name in ("vllm_patch", "lmcache_hybrid") for f in (ROOT / name).rglob("*.py")]
    taken = {(f"lmcache.{module}", name) for name, module in lmcache_home.NAMES.items()}
    return [Hook(module, name) for module, name in sorted(taken.union(imported(files, PACKAGES)))]
