# SPDX-License-Identifier: Apache-2.0
"""A device whose queued work runs as late, as early or as randomly as CUDA allows.

A stream is a queue. Its entries run in order; entries of different streams in any order
that the recorded events and waits permit. Nothing runs before it must in mode "late",
everything at once in "early", whatever a seed says in "random". :class:`DeviceModule`
stands in for ``torch.cuda`` in ``lmcache_hybrid.worker.streams``, so that the real
:class:`StreamCopies` moves the bytes.
"""

import itertools
import threading
import types
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager

import torch

from lmcache_hybrid.worker import copies, streams, worker
from lmcache_hybrid.worker.pages import GroupPages

from .threads import Threads

# How many entries run on their own after something was queued, in mode "random".
BURSTS = (0, 0, 0, 1, 3, 1000)
# How probable it is that somebody who waits for the device goes on waiting.
PATIENCE = 0.8


class HostAccess(AssertionError):
    """The host reads or writes device memory, or calls the device in a way that is not allowed."""


class BrokenCopy(RuntimeError):
    """A copy that the device refuses, as a program wished."""


class Point:
    """Where an event was recorded."""

    __slots__ = ("stream", "done")

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.done = stream, False


class Stream:
    """A queue of work; entries are functions to run, points to pass and points to wait for."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.queue: deque = deque()
        self.user: int | None = None  # thread that has made it current
        device.streams.append(self)

    @property
    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].done)

    def add(self, kind: str, what) -> None:
        self.queue.append((kind, what))
        self.device.go_on()

    def run_one(self) -> None:
        kind, what = self.queue.popleft()
        if kind == "run":
            try:
                what()
            except Exception as error:
                # Not to the host, which is somewhere else by now.
                self.device.errors.append(error)
        elif kind == "record":
            what.done = True

    # What streams.py calls

    def wait_event(self, event: "Event") -> None:
        self.device.threads.pause()
        if event.point is not None:
            self.add("wait", event.point)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """The latest point at which it was recorded; none: nothing to wait for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.point: Point | None = None
        self.blocking = blocking

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or here.current_device.current
        stream.device.threads.pause()
        self.point = Point(stream)
        stream.add("record", self.point)

    def synchronize(self) -> None:
        point = self.point
        if point is None:
            return
        device = point.stream.device
        if not self.blocking:
            device.errors.append(HostAccess("a thread keeps a core busy while it waits"))
        here.check_device(device)
        # The device is behind, and others go on.
        device.threads.pause()
        while not point.done and device.threads.random.random() < PATIENCE:
            device.threads.pause()
        device.reach(point)


class Device:
    """One rank's device.

    Attributes:
        compute: the stream of the forward, current in the main thread. It is not the one that is
            current in new threads, as where vLLM sets a stream of its own (``current_stream``).
        errors: what went wrong on it, or was asked of it.
        breaking: so many next copies are refused, from the ``after``-th on.
        freed: the KV cache has no memory.
    """

    known: dict[int, "Device"] = {}

    def __init__(self, mode: str, threads: Threads, reuses: Counter) -> None:
        self.mode, self.threads, self._reuses = mode, threads, reuses
        self.errors: list[Exception] = []
        self.events: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.compute, self._default = Stream(self), Stream(self)
        # Small numbers, as torch's are; 0 is what is current in a new thread, and no device.
        self.index = next(i for i in itertools.count(1) if i not in Device.known)
        self.torch_device = torch.device("cuda", self.index)
        self.breaking = self.after = 0
        self.freed = False
        self._saves: Counter[int] = Counter()  # that are queued, by page
        Device.known[self.index] = self

    def retire(self) -> None:
        del Device.known[self.index]

    @property
    def current(self) -> Stream:
        """The calling thread's current stream on this device."""
        return here.streams.get(self.index, self._default)

    def enter(self) -> None:
        """Make the calling thread the rank's main thread."""
        here.device, here.streams[self.index] = self.index, self.compute

    def go_on(self) -> None:
        """Run what the mode says, now that there is more to run."""
        if self.mode == "late":
            return
        random = self.threads.random
        for _ in range(1000 if self.mode == "early" else random.choice(BURSTS)):
            ready = [stream for stream in self.streams if stream.ready]
            if not ready:
                return
            random.choice(ready).run_one()

    def reach(self, point: Point) -> None:
        """Run no more than must be done for ``point`` to be passed."""
        while not point.done:
            stream = point.stream
            while stream.queue[0][0] == "wait" and not stream.queue[0][1].done:
                stream = stream.queue[0][1].stream
            stream.run_one()

    def drain(self) -> None:
        for stream in self.streams:
            point = Point(stream)
            stream.queue.append(("record", point))
            self.reach(point)

    def copy(self, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor) -> None:
        """Queue a copy on the current stream; ``host`` is the one of both in host memory."""
        if self.breaking:
            self.after -= 1
            if self.after < 0:
                self.breaking -= 1
                self.events["broken copies"] += 1
                raise BrokenCopy("a fault of the simulation")
        self._check_memory()
        address = host.data_ptr()
        given = self._reuses[address & ~0xFFF]

        to_device = source is host
        page = (target if to_device else source).data_ptr()

        def run() -> None:
            if self._reuses[address & ~0xFFF] != given:
                raise AssertionError("a buffer was released before its copy ended")
            self._check_memory()
            target.copy_(source)
            if not to_device:
                self._saves[page] -= 1

        if to_device:
            self.events["pages loaded"] += 1
            self.events["loads of blocks that were saved"] += page in self._saves
            self.events["loads of blocks that are being saved"] += self._saves[page] > 0
            self.events["loads beside a forward"] += bool(self.compute.queue)
        else:
            self.events["pages saved"] += 1
            self._saves[page] += 1
        self.current.add("run", run)

    def _check_memory(self) -> None:
        if self.freed:
            raise HostAccess("a copy to or from memory that is freed")

    def check(self) -> None:
        """Raises the first error."""
        if self.errors:
            raise self.errors[0]


class _Here(threading.local):
    """What CUDA remembers of a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}

    @property
    def current_device(self) -> Device:
        return Device.known[self.device]

    def check_device(self, device: Device) -> None:
        if self.device != device.index:
            device.errors.append(
                HostAccess(f"device {device.index} is used while {self.device} is current")
            )


here = _Here()


class DeviceModule:
    """What streams.py takes of ``torch.cuda``, with the meaning that it has there."""

    Event = Event

    @staticmethod
    def _device(device: "torch.device | int | None") -> Device:
        if device is None:
            return Device.known[here.device]
        return Device.known[device if isinstance(device, int) else device.index]

    def Stream(self, device=None) -> Stream:
        return Stream(self._device(device))

    def current_stream(self, device=None) -> Stream:
        return self._device(device).current

    def set_device(self, device) -> None:
        here.device = self._device(device).index
        Device.known[here.device].threads.pause()

    def synchronize(self, device=None) -> None:
        self._device(device).drain()

    @contextmanager
    def stream(self, stream: Stream):
        device, me = stream.device, threading.get_ident()
        here.check_device(device)
        before = here.streams.get(device.index)
        if stream.user not in (None, me):
            device.errors.append(HostAccess("two threads use one stream at once"))
        stream.user, here.streams[device.index] = me, stream
        try:
            yield
        finally:
            stream.user = None
            here.streams.pop(device.index)
            if before is not None:
                here.streams[device.index] = before


# Views: nothing is read or written.
_VIEWS = ("narrow", "select", "split", "unbind", "view", "as_strided", "flatten", "reshape")
_FACTS = ("shape", "dtype", "ndim", "dim", "size", "stride", "numel", "element_size")
_FACTS += ("data_ptr", "untyped_storage", "storage_offset", "is_contiguous")


class DeviceRow:
    """Device memory as the host sees it: it may be cut, measured and named in a queued copy."""

    def __init__(self, memory: torch.Tensor, owner: Device) -> None:
        self.memory, self.owner, self.device = memory, owner, owner.torch_device

    def _cut(self, part: torch.Tensor) -> "DeviceRow":
        assert part.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()
        return DeviceRow(part, self.owner)

    def __getitem__(self, index) -> "DeviceRow":
        return self._cut(self.memory[index])

    def __getattr__(self, name: str):
        if name in _FACTS:
            return getattr(self.memory, name)
        if name not in _VIEWS:
            raise HostAccess(f"the host calls {name} of device memory")

        def cut(*args):
            parts = getattr(self.memory, name)(*args)
            if isinstance(parts, torch.Tensor):
                return self._cut(parts)
            return tuple(self._cut(part) for part in parts)

        return cut

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "DeviceRow":
        if not isinstance(source, torch.Tensor):
            raise HostAccess("a copy within the device")
        self.owner.copy(self.memory, source, host=source)
        if not non_blocking:
            self.owner.current.synchronize()
        return self

    @classmethod
    def __torch_function__(cls, function: Callable, kinds, args=(), kwargs=None):
        if function is not torch.Tensor.copy_ or isinstance(args[0], cls):
            raise HostAccess(f"the host calls {function.__name__} on device memory")
        target, row = args[0], args[1]
        row.owner.copy(target, row.memory, host=target)
        if not (kwargs or {}).get("non_blocking", False):
            row.owner.current.synchronize()
        return target


def on_device(pages: GroupPages, device: Device) -> GroupPages:
    """The same pages in device memory."""
    pages.rows = [DeviceRow(row, device) for row in pages.rows]
    pages._host = None  # the views of pages in host memory
    return pages


def install(patch) -> None:
    """Put the simulated device in place of torch's; ``patch`` takes it out again."""
    module = DeviceModule()
    names = dict(vars(torch))
    for name in ("cuda", "accelerator", "Stream", "Event"):
        names.pop(name, None)  # none of them reaches the simulated device
    names["get_device_module"] = lambda device: module
    patch.setattr(streams, "torch", types.SimpleNamespace(**names))
    # The plain transfer: others are for real devices only.
    patch.setattr(
        worker,
        "copies_for",
        lambda on, threads: (
            copies.HostCopies(threads) if on.type == "cpu" else streams.StreamCopies(on)
        ),
    )
    patch.setattr(Device, "known", {})
