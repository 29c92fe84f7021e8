# SPDX-License-Identifier: Apache-2.0
"""The classes of a rank's tiers, one for each kind of LMCache's backends."""

import pytest
from lmcache.v1.storage_backend.audit_backend import AuditBackend

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.lmcache_store import LMCacheStore

from ..store_box import FINGERPRINT, MAX_PAYLOAD, MODEL, every_kind


@every_kind
def test_what_a_tier_says_of_itself(box, kind):
    tier = box(kind).tier
    local = kind in ("ram", "disk")
    assert (tier.indexed, tier.in_place, tier.shared) == (local, kind == "ram", not local)


@every_kind
def test_a_backend_of_another_kind_is_refused(box, kind):
    """Nothing would be found in it, and nobody would say so."""
    one = box(kind)
    backends = one.manager.storage_backends
    real = dict(backends)
    backends[one.tier.name] = AuditBackend(one.backend)
    with pytest.raises(ConfigError, match=f"opened {one.tier.name} .AuditBackend., in which no"):
        LMCacheStore(one.engine, MODEL, FINGERPRINT, MAX_PAYLOAD)
    backends.update(real)
