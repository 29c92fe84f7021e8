# SPDX-License-Identifier: Apache-2.0
"""Pages that all ranks hold alike: once in stores that ranks share, per rank everywhere else."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from lmcache_hybrid.core.errors import LoadError, RecordError
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.agreement import agree
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage import hidden_records
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_names import Replicas
from lmcache_hybrid.storage.remote.record_connector import unwrapped

from ..helpers import payload_of, put
from ..store_box import MAX_PAYLOAD, Box, N, assert_failed_put_releases, flip, until

BLOCKS = 3
PAGES, STATES = 3, 0  # groups
HASHES = tuple(bytes([1 + block]) * 32 for block in range(BLOCKS))
PAGE_KEYS = [
    RecordKey(ATTENTION, PAGES, each, (block + 1) * N) for block, each in enumerate(HASHES)
]
STATE_KEY = RecordKey(STATE, STATES, HASHES[-1], BLOCKS * N)
KEYS = [*PAGE_KEYS, STATE_KEY]
REPLICAS = Replicas(frozenset({PAGES}), b"all ranks alike.", 0, b"salt" * 4)

shared = pytest.mark.parametrize("kind", ["fs", "redis"])
private = pytest.mark.parametrize("kind", ["ram", "disk"])


@pytest.fixture
def ranks(box):
    """Make the stores of all ranks of an engine, on one folder or server."""

    def make(kind: str, count: int = 2, replicas: Replicas | None = REPLICAS, **settings):
        return [
            box(
                kind,
                rank=rank,
                ranks=count,
                fingerprint=bytes([rank + 1]) * 16,
                replicas=replicas,
                **settings,
            )
            for rank in range(count)
        ]

    return make


def save(one: Box, keys=KEYS, size: int = MAX_PAYLOAD) -> None:
    put(one.store, keys, size)
    one.settle()


def values(one: Box) -> dict[str, int]:
    """Bytes of every record that is really in a shared store, by LMCache's key."""
    if one.kind == "redis":
        names = [name.decode() for name in one.redis.keys("*kv_bytes")]
        return {name: one.redis.strlen(name) for name in names}
    return {file.name: file.stat().st_size for file in one.folder.glob("*.data")}


def assert_reads(one: Box, keys=KEYS) -> None:
    for key, payload in zip(keys, one.read(keys), strict=True):
        assert torch.equal(payload, payload_of(key, MAX_PAYLOAD))


@shared
@pytest.mark.parametrize("count", [2, 4])
def test_a_shared_store_gets_pages_once_and_every_ranks_states(ranks, kind, count):
    made = ranks(kind, count)
    for one in made:
        save(one)
    stored = values(made[0])
    assert len(stored) == BLOCKS + count
    # Header, digests and LMCache's own header are all that comes on top of the unique bytes.
    assert 0 < sum(stored.values()) - (BLOCKS + count) * MAX_PAYLOAD < (BLOCKS + count) * 240
    for one in made:
        assert_reads(one)
        one.assert_pool_is_free()
    # All the same without: what is measured is not the page's size.
    alone = ranks(kind, count, replicas=None)
    for one in alone:
        save(one)
    assert len(values(made[0])) == len(stored) + count * BLOCKS


@shared
def test_bytes_per_block_of_a_large_page_are_its_unique_bytes(ranks, kind):
    """Kimi-K3's ratio of latent pages to header is far larger yet: it has 21 MB a block."""
    size = 64 << 10
    made = ranks(kind, 4, max_payload=size)
    for one in made:
        save(one, PAGE_KEYS, size)
    per_block = sum(values(made[0]).values()) / BLOCKS
    assert size < per_block <= 1.01 * size


@shared
def test_only_the_first_rank_writes_pages(ranks, kind):
    first, second = ranks(kind)
    save(second)
    assert list(second.store.locate(KEYS)) == [STATE_KEY]
    assert not first.store.locate(KEYS)
    save(first)
    for one in (first, second):
        assert list(one.store.locate(KEYS)) == KEYS
        one.assert_pool_is_free()


def could_not_read(one: Box, key: RecordKey = PAGE_KEYS[1]) -> None:
    one.store._damaged.unreadable(one.store.engine_key(key), "RemoteBackend")
    assert key not in one.store.locate(KEYS)


@shared
def test_a_page_that_no_rank_could_read_is_hit_once_the_engine_has_written_it(ranks, kind):
    made = ranks(kind)
    for one in made:
        save(one)
    for one in made:
        could_not_read(one)
        save(one)
    for one in made:
        assert list(one.store.locate(KEYS)) == KEYS, "only the rank that writes looks for it"
        assert_reads(one)


@shared
def test_a_page_that_its_writer_cannot_write_fails_no_second_load(ranks, kind, monkeypatch):
    """Another rank does not know of its writes: it believes in one for a while."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr(hidden_records, "time", clock)
    first, second = ranks(kind)
    save(first)
    save(second)
    for _ in range(2):
        could_not_read(second)
        save(second)
        assert PAGE_KEYS[1] in second.store.locate(KEYS)
        for _ in range(2):
            could_not_read(second)
            save(second)
            assert PAGE_KEYS[1] not in second.store.locate(KEYS), "every second request fails"
        later[0] += hidden_records.HIDDEN_SECONDS


@shared
def test_a_page_that_is_not_written_to_a_store_stays_hidden_there(ranks, kind):
    first, second = ranks(kind)
    save(first)
    could_not_read(second)
    second.engine.store_location = "LocalCPUBackend"
    save(second)
    assert PAGE_KEYS[1] not in second.store.locate(KEYS)


@private
def test_what_only_one_rank_sees_each_rank_fills_for_itself(ranks, kind):
    first, second = ranks(kind)
    save(first)
    assert not second.store.locate(KEYS)
    save(second)
    assert_reads(second)
    for key in KEYS:
        first.store.discard(key)
    assert not first.store.locate(KEYS)
    assert_reads(second)
    second.assert_pool_is_free()


def test_a_restart_finds_each_ranks_pages_on_local_disk(ranks):
    made = ranks("disk")
    for one in made:
        save(one)
    files = sorted(made[0].folder.iterdir())
    assert len(files) == 2 * len(KEYS)
    for one in made:
        one.close()
    first, second = ranks("disk")
    assert_reads(first)
    assert_reads(second)
    # One rank's eviction leaves the other's files alone.
    for key in KEYS:
        second.store.discard(key)
    second.backend.others.deleter.finish()
    assert sorted(first.folder.iterdir()) == sorted(first.path(key) for key in KEYS)
    assert_reads(first)


def test_ranks_keep_pages_in_their_own_ram_beside_a_shared_store(ranks):
    first, second = ranks("fs", local_cpu=True)
    put(second.store, KEYS, MAX_PAYLOAD)
    assert set(second.store.locate(KEYS).values()) == {"LocalCPUBackend"}
    put(first.store, KEYS, MAX_PAYLOAD)
    until(lambda: len(values(first)) == BLOCKS + 2, "the records were not written")
    for key in PAGE_KEYS:
        second.manager.local_cpu_backend.remove(second.store.engine_key(key))
    assert list(second.store.locate(KEYS).values()) == ["RemoteBackend"] * BLOCKS + [
        "LocalCPUBackend"
    ]
    assert_reads(second)


@pytest.mark.parametrize("location, kept", [("RemoteBackend", 1), ("LocalCPUBackend", len(KEYS))])
def test_store_location_holds_for_such_pages_too(ranks, location, kept):
    _, second = ranks("fs", local_cpu=True, store_location=location)
    put(second.store, KEYS, MAX_PAYLOAD)
    until(lambda: second.store.locate([STATE_KEY]), "the record was not written")
    until(lambda: not unwrapped(second.backend.connection).writing, "more is being written")
    located = second.store.locate(KEYS)
    assert len(located) == kept and set(located.values()) == {location}


@shared
def test_a_page_that_one_rank_finds_damaged_is_gone_for_all(ranks, kind):
    first, second = ranks(kind)
    save(first)
    save(second)
    first.overwrite(PAGE_KEYS[1], flip(-1)(first.raw(PAGE_KEYS[1])))
    second.scrub()
    with pytest.raises((LoadError, RecordError)):
        second.read(PAGE_KEYS)
    left = [key for key in KEYS if key != PAGE_KEYS[1]]
    for one in (first, second):
        assert list(one.store.locate(KEYS)) == left
    # All ranks save it anew, and one of them writes it.
    save(second, [PAGE_KEYS[1]])
    save(first, [PAGE_KEYS[1]])
    for one in (first, second):
        assert_reads(one)


@shared
def test_after_a_reset_ranks_share_pages_under_a_new_name(ranks, kind):
    first, second = ranks(kind)
    for one in (first, second):
        save(one)
        one.store.clear(1)
        assert not one.store.locate(KEYS)
    for one in (first, second):
        save(one)
    assert len(values(first)) == 2 * (BLOCKS + 2)
    for one in (first, second):
        assert_reads(one)
    # Another start has another salt, so nobody else takes the new name.
    other = ranks(kind, replicas=dataclasses.replace(REPLICAS, salt=b"else" * 4))[1]
    assert_reads(other, PAGE_KEYS)
    other.store.clear(1)
    assert not other.store.locate(PAGE_KEYS)
    # Nor does a rank that missed a reset serve what was stored before it.
    first.store.clear(2)
    assert not first.store.locate(PAGE_KEYS)


def test_ranks_that_name_pages_differently_do_not_share_them(ranks):
    first, _ = ranks("fs")
    save(first)
    other = dataclasses.replace(REPLICAS, fingerprint=b"computes else...")
    assert not ranks("fs", replicas=other)[1].store.locate(PAGE_KEYS)


@shared
def test_a_hit_needs_the_page_and_every_ranks_state(ranks, kind):
    """Whichever is missing, and on whichever rank: all ranks agree on a miss, and hold nothing."""
    made = ranks(kind)
    plan = GroupPlan(N, (PAGES,), (STATES,), replicated=(PAGES,))
    lookups = [RankLookup(plan, one.store) for one in made]

    def found() -> int:
        request = LookupRequest("r", Prefix(HASHES), BLOCKS, 0)
        result = agree(lambda asked: [each.answer(asked) for each in lookups], request)
        held = [len(each._claims) for each in lookups]
        for each in lookups:
            each.release("r")
        assert held == [int(result.hit)] * len(made)
        return result.boundary

    save(made[1])
    assert found() == 0, "the second rank's state is there, and no page"
    save(made[0], PAGE_KEYS)
    assert found() == 0, "the first rank's state is missing"
    save(made[0], [STATE_KEY])
    assert found() == BLOCKS
    made[0].remove(PAGE_KEYS[0])
    assert found() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_put_releases_its_buffers(ranks, rank):
    assert_failed_put_releases(ranks("ram")[rank], PAGE_KEYS, MAX_PAYLOAD)
