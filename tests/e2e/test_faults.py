# SPDX-License-Identifier: Apache-2.0
"""Faults of the stores under a running engine.

Whatever breaks, the answer is the one computed without a store, the engine lives,
nothing stays pinned or allocated, and records that are good still serve. A load
that was promised and failed is warned of once, with the request's ID and the reason.
"""

import shutil

import pytest

from lmcache_hybrid.storage.record_format import VERSION
from tests.e2e import disks, records
from tests.e2e.broken_store import Prompt, Site, new_prompt
from tests.e2e.engine import Answer
from tests.marks import slow

pytestmark = pytest.mark.engine
AWAY = "is gone from|did not answer|does not say where"


def on(*kinds: str) -> pytest.MarkDecorator:
    """Stores to break. RAM has no fault of its own, so only ``make test-all`` breaks it."""
    marked = [slow(kind)[0] if kind == "ram" else kind for kind in kinds]
    return pytest.mark.parametrize("opened", marked, indirect=True, scope="module")


# Values


@on("ram", "disk", "redis")
@pytest.mark.parametrize(
    "damage, label, reason",
    [
        (records.flipped, "%s0-", "^checksum"),
        (records.flipped, "%s1-", "^checksum"),
        (records.flipped, "%a2-", "^checksum"),
        (records.flipped_in_header, "%s0-", "^header"),
        (records.of_another_version, "%s0-", f"^version: record version {VERSION + 1},"),
        (records.foreign, "%s0-", "^magic"),
    ],
    ids=["state", "other state", "attention", "header", "version", "foreign"],
)
def test_a_damaged_record_is_rejected_and_computed_instead(
    site: Site, damage, label: str, reason: str
) -> None:
    prompt = site.store()
    site.damage(prompt, damage, label)
    seen = site.fails(lambda: site.engine.ask(prompt.ids), prompt, reason)
    assert seen.worker["rejected_records"] == 1
    site.serves(prompt)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("damage", [records.truncated, records.emptied])
def test_a_record_that_was_cut_off_is_never_served(site: Site, damage) -> None:
    """A value has its own length; a file's end leaves what was in the buffer before."""
    prompt = site.store()
    site.damage(prompt, damage, "%s0-")
    cut = "cannot be read from RemoteBackend" if damage is records.emptied else "^length"
    reason = cut if site.kind == "redis" else "^checksum|^magic"
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, reason)
    site.serves(prompt)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("label", ["%s0-", "%a2-"])
def test_another_requests_bytes_under_the_right_key_are_rejected(site: Site, label: str) -> None:
    prompt, other = site.store(), site.store()
    theirs = site.shelf.read(other.record(label))
    site.damage(prompt, lambda data: theirs, label)
    seen = site.fails(lambda: site.engine.ask(prompt.ids), prompt, "^key: holds another")
    assert seen.worker["rejected_records"] == 1
    site.serves(prompt, other)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("label", ["%s0-", "%a2-"])
def test_a_record_gone_before_the_lookup_is_not_served(site: Site, label: str) -> None:
    """Only local_disk, which looks at its index and not at the files, still promises it."""
    prompt = site.store()
    site.shelf.remove(prompt.record(label))
    if site.kind == "disk":
        site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from LocalDiskBackend")
    else:
        site.misses(prompt)
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_records_evicted_between_lookup_and_load_fail_the_load(site: Site) -> None:
    prompt = site.store()
    site.fails(
        lambda: site.engine.ask_held(prompt.ids, lambda: site.lose(prompt)), prompt, "is gone from"
    )
    site.serves(prompt)


@on("ram")
def test_what_was_promised_is_not_evicted_for_room(site: Site) -> None:
    prompt = site.store()
    seen = site.watch(
        lambda: site.engine.ask_held(prompt.ids, lambda: site.inside("evict")), prompt
    )
    assert seen.warnings == [] and seen.worker["loaded_states"] == 1
    assert site.shelf.names() == prompt.records
    site.recovers(site.good)


# LMCache


@on("disk", "redis")
def test_without_memory_to_load_into_the_prompt_is_computed(site: Site) -> None:
    prompt = site.store()

    def ask() -> Answer:
        try:
            return site.engine.ask_held(prompt.ids, lambda: site.inside("fill_pool"))
        finally:
            site.inside("free_pool")

    seen = site.fails(ask, prompt, "no room to read into .max_local_cpu_size")
    # Nor is there room to store what was computed.
    assert seen.worker["skipped_saves"] > 0 == seen.worker["saved_states"]
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_without_memory_to_save_from_nothing_is_stored(site: Site) -> None:
    ids = new_prompt()
    names = site.shelf.names()
    assert site.inside("fill_pool") > 0
    before = site.engine.counts()
    cold = site.engine.ask(ids)
    after = site.engine.counts()
    site.inside("free_pool")
    assert after["worker"]["skipped_saves"] > before["worker"]["skipped_saves"]
    assert after["live"] == before["live"]
    assert site.engine.log.count("storing failed, so later requests compute what is missing") == 1
    assert site.shelf.names() == names
    prompt = Prompt(ids, cold.output)
    site.misses(prompt)
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_an_lmcache_that_turns_unhealthy_fails_the_load(site: Site) -> None:
    prompt = site.store()

    def ask() -> Answer:
        try:
            return site.engine.ask_held(prompt.ids, lambda: site.inside("healthy", value=False))
        finally:
            site.inside("healthy", value=True)

    seen = site.fails(ask, prompt, "LMCache is unhealthy")
    assert seen.worker["skipped_saves"] > 0
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_aborted_requests_keep_their_blocks_until_their_loads_ended(site: Site) -> None:
    """One load runs and one is queued behind it; the blocks stay theirs until both ended."""
    prompts = [site.store(), site.store()]
    site.engine.forget()
    before = site.engine.counts()["live"]
    loading, held = site.inside("abort_in_load", prompts=[p.ids for p in prompts])
    assert loading == 2
    assert held > before["used_blocks"], "blocks were freed under a load"
    assert site.engine.counts()["live"] == before
    site.serves(*prompts)


# Redis


@on("redis")
def test_redis_killed_in_a_load_fails_it(site: Site) -> None:
    """The connection ends within a value, and Redis takes no new one."""
    prompt = site.store()
    size = len(site.shelf.read(prompt.record()))

    def die() -> None:
        site.proxy.cut_after(size // 2)

    try:
        site.fails(lambda: site.engine.ask_held(prompt.ids, die), prompt, AWAY)
    finally:
        site.proxy.restore()
    site.recovers(prompt, seconds=30)


@on("redis")
def test_redis_killed_between_lookup_and_load_and_restarted_empty(site: Site) -> None:
    prompt = site.store()
    try:
        site.fails(
            lambda: site.engine.ask_held(prompt.ids, site.server.terminate),
            prompt,
            AWAY,
        )
    finally:
        site.server.start()
    site.shelf.client = site.server.client()
    assert site.shelf.names() == set()
    site.recovers(prompt, site.good, seconds=30)


@on("redis")
def test_an_emptied_redis_is_a_miss(site: Site) -> None:
    prompt = site.store()
    site.shelf.client.flushall()
    site.misses(prompt)
    site.recovers(prompt, site.good)


@on("redis")
def test_redis_paused_in_a_load_fails_it(site: Site) -> None:
    """For longer than blocking_timeout_secs."""
    prompt = site.store()
    site.engine.settle()

    def ask() -> Answer:
        try:
            return site.engine.ask_held(prompt.ids, site.proxy.pause)
        finally:
            site.proxy.resume()

    site.fails(ask, prompt, "is gone from|failed|did not answer")
    site.recovers(prompt, seconds=30)


@on("redis")
def test_redis_paused_in_a_lookup_is_left_alone_for_a_while(site: Site) -> None:
    """For longer than lookup_timeout_ms: the cache is left alone for a while."""
    prompt = site.store()

    def ask() -> Answer:
        site.proxy.pause()
        try:
            return site.engine.ask(prompt.ids)
        finally:
            site.proxy.resume()

    claims = site.engine.counts()["live"]["claims"]
    try:
        # The answer may still come, to nobody.
        seen = site.watch(ask, prompt, but="claims")
        assert seen.log.count("RemoteBackend did not answer a cache lookup in time") == 1
        assert seen.warnings == [] and seen.worker["failed_loads"] == 0
    finally:
        site.recovers(prompt, site.good, seconds=30)
    assert site.engine.counts()["live"]["claims"] == claims


@on("redis")
def test_redis_that_refuses_authentication_fails_a_load_and_then_misses(site: Site) -> None:
    prompt = site.store()

    def lock() -> None:
        site.shelf.client.config_set("requirepass", "secret")
        site.shelf.client.client_kill_filter(_type="normal", skipme=True)

    def unlock() -> None:
        site.shelf.client.config_set("requirepass", "")

    try:
        site.fails(lambda: site.engine.ask_held(prompt.ids, lock), prompt, AWAY)
        site.misses(prompt)
    finally:
        unlock()
    site.recovers(prompt, seconds=30)


@on("redis")
def test_redis_out_of_memory_serves_what_it_holds(site: Site) -> None:
    """What it holds it still serves; what it does not take is missed and stored later."""
    site.shelf.client.config_set("maxmemory", "1")
    try:
        new, failed_writes = site.compute()
        assert failed_writes > 0
        site.misses(new)
        site.serves(site.good)
    finally:
        site.shelf.client.config_set("maxmemory", "0")
    site.misses(new)
    site.serves(new)


@on("redis")
def test_a_record_that_redis_evicted_is_a_miss(site: Site) -> None:
    prompt = site.store()
    site.shelf.client.delete(prompt.record() + "kv_bytes")
    site.misses(prompt)
    site.serves(prompt)


@on("redis")
def test_a_foreign_size_in_redis_fails_the_load(site: Site) -> None:
    """What stands beside a value is not read; a value larger than any record is refused."""
    prompt = site.store()
    site.shelf.client.set(prompt.record() + "metadata", b"\xff" * 28)
    site.serves(prompt)
    site.shelf.client.set(prompt.record() + "kv_bytes", bytes(64 << 20))
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, "cannot be read from")
    site.serves(prompt)


# Disk


@on("disk")
def test_a_read_only_disk_serves_what_it_holds(site: Site) -> None:
    """What it holds it still serves; new prompts are missed and stored later."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    damaged = site.store()
    site.damage(damaged, records.flipped, "%s0-")
    with disks.read_only(site.shelf.folder.parent):
        new, failed_writes = site.compute()
        assert failed_writes > 0
        site.misses(new)
        site.serves(site.good)
        # A damaged record that cannot be deleted is not promised twice.
        site.fails(lambda: site.engine.ask(damaged.ids), damaged, "^checksum")
        site.misses(damaged)
    assert site.engine.log.count("cannot be written (Read-only file system)") == 1
    site.recovers(new, damaged)


@on("disk")
def test_a_full_disk_makes_room_by_its_oldest_records(site: Site) -> None:
    """The oldest records make room for new ones."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    site.store()
    site.serves(site.good)
    with disks.disk_full(site.shelf.folder.parent):
        held = site.shelf.names()
        new, failed_writes = site.compute()
        assert failed_writes == 0
        site.serves(site.good, new)
        assert held - site.shelf.names() - site.good.records
    assert site.engine.log.count("ends before max_local_disk_size") == 1


@on("disk")
def test_a_full_disk_where_deleting_makes_no_room_evicts_a_few_and_stops(site: Site) -> None:
    """A few records are evicted in vain and no more; nothing new is written or promised."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    spare = [site.store() for _ in range(3)]  # evicted before the good one
    site.serves(site.good)
    folder = site.shelf.folder
    with disks.kept_by_links(folder), disks.disk_full(folder.parent):
        held = site.shelf.names()
        new, failed_writes = site.compute()
        left = site.shelf.names()
        assert failed_writes == len(spare[0].records)
        assert left < held
        site.misses(new)
        assert site.shelf.names() == left
        site.serves(site.good)
    assert site.engine.log.count("cannot be written") == 1
    site.recovers(new)


@on("disk")
def test_a_removed_folder_promises_nothing(site: Site) -> None:
    prompt, folder = site.store(), site.shelf.folder
    shutil.rmtree(folder)
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from LocalDiskBackend")
    # Nothing can be stored, and nothing is promised.
    site.misses(prompt)
    folder.mkdir()
    site.misses(prompt)
    site.recovers(prompt, site.good)
