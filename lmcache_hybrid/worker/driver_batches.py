# SPDX-License-Identifier: Apache-2.0
"""Queues copies between a device's KV cache and pinned host memory.

One asynchronous copy costs the host some five microseconds, and a long prompt has hundreds.
vLLM's batched copy hands them to the driver in one call. It is used for large pieces if vLLM, CUDA
and the driver have it and it passes a check at start-up.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from lmcache_hybrid.worker.copies import CopyJob
from lmcache_hybrid.worker.pages import Spans

logger = init_logger("vllm.lmcache_hybrid.worker.driver_batches")

# The CUDA version that added cuMemcpyBatchAsync, 12.8, in the driver's numbering.
BATCHES_SINCE = 12080
# cuMemcpyBatchAsync breaks on valid batches of many small copies to the device. Driver 580.159.04
# (CUDA 13.0) on an H100: four pieces of 256 to 2,048 bytes and 1,020 of 8,192 in one call end in
# "unspecified launch failure", and so does the engine, or now and then in OTHER BYTES WITHOUT AN
# ERROR, in either order of the source. All were right with 512 pieces a call, with 4,096 bytes and
# more in each, and to the host. vLLM's issue 49276 has crashes and hangs on another GPU.
# So a batch to the device has no smaller pieces than these, in bytes, and no batch has more of
# them. Lift that when `python -m benchmarks.gpu.batches` finds nothing with any driver in use.
MIN_BATCHED = 64 << 10
MAX_BATCH = 256
# The "legacy default" streams, on which the driver refuses batches. On one GPU vLLM's forward runs
# there: it makes a stream of its own for tensor parallelism, and for layers that ask for one.
DEFAULT_STREAMS = (0, 1)
# Pieces of the start-up check, and bytes between them. Only sizes that are batched later: a driver
# that breaks on others would end the engine.
CHECKED_PIECES = 40
CHECKED_GAP = 13

NOTHING = Spans(*[np.empty(0, np.int64)] * 4)
# Queues copies of records on the device's current stream, to the host if the bool is true, and
# returns at once. All memory must stay unchanged until the stream has passed the copies. Targets
# must not overlap: the copies of one call are unordered.
Transfer = Callable[[Sequence[CopyJob], bool], None]


def copy_one_by_one(items: Sequence[CopyJob], to_host: bool) -> None:
    """Queue one asynchronous copy per piece: the plain Transfer."""
    for item in items:
        for page, part in item.pieces():
            if to_host:
                part.copy_(page, non_blocking=True)
            else:
                page.copy_(part, non_blocking=True)


def join(spans: Sequence[Spans]) -> Spans:
    """Join neighbours that are adjacent both in the pages and in host memory.

    Returns:
        The same bytes in the same order, without empty copies. Pages of two allocations stay
        apart even if adjacent; host memory is of one pool.
    """
    if not spans:
        return NOTHING
    pages, host, sizes, memory = (np.concatenate(each) for each in zip(*spans, strict=True))
    some = sizes > 0
    if not some.any():
        return NOTHING
    pages, host, sizes, memory = pages[some], host[some], sizes[some], memory[some]
    goes_on = (
        (pages[1:] == pages[:-1] + sizes[:-1])
        & (host[1:] == host[:-1] + sizes[:-1])
        & (memory[1:] == memory[:-1])
    )
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return Spans(pages[first], host[first], np.add.reduceat(sizes, first), memory[first])


class BatchedTransfer:
    """The Transfer with vLLM's batched copy. May be called by several threads.

    It copies one by one where the driver copies wrong (small pieces to the device) and where it
    takes no batches, with unpinned memory. There vLLM's op would loop over single copies and ignore
    their errors, so a save could store wrong bytes. So would it on the legacy default stream: there
    batches run on a stream of their own, behind what the default one has and before what it gets.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given_up = False
        self._own = threading.local()

    def __call__(self, items: Sequence[CopyJob], to_host: bool) -> None:
        if not items:
            return
        if self._given_up or not _takes_batches(self._device, items[0].payload):
            copy_one_by_one(items, to_host)
            return
        batched, small = [], []
        for item in items:
            spans = item.spans()
            if to_host or spans.sizes.min(initial=MIN_BATCHED) >= MIN_BATCHED:
                batched.append(spans)
            else:
                small.append(item)
        copy_one_by_one(small, to_host)
        try:
            with self._stream_for_batches():
                queue_batched(join(batched), to_host)
        except Exception as error:
            self._given_up = True
            logger.warning(
                "vLLM's batched copy failed; from now on copies are queued one by one: %r", error
            )
            # Copying the same bytes again does no harm.
            copy_one_by_one(items, to_host)

    @contextmanager
    def _stream_for_batches(self) -> Iterator[None]:
        """Make a stream current on which the driver takes batches, in the order of this one."""
        queue = torch.cuda.current_stream(self._device)
        if queue.cuda_stream not in DEFAULT_STREAMS:
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(device=self._device)
        own = self._own.stream
        own.wait_stream(queue)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            queue.wait_stream(own)


def _takes_batches(device: torch.device, host: torch.Tensor) -> bool:
    """Whether the driver takes a batch of this host memory, called by this thread now."""
    return (
        # vLLM's op uses the current device's stream, whatever device the pointers are on.
        torch.cuda.current_device() == (device.index or 0)
        # The pool is one piece of memory, so one item is enough.
        and host.is_pinned()
    )


def queue_batched(spans: Spans, to_host: bool) -> None:
    """Queue copies on the current stream of the current device with vLLM's op.

    Args:
        spans: none of them empty, as of :func:`join`.

    Raises:
        RuntimeError: the driver refused; some may have been queued.
    """
    from vllm import _custom_ops

    source, target = (spans.pages, spans.host) if to_host else (spans.host, spans.pages)
    for start in range(0, len(spans.sizes), MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        # The driver has read these three when the call returns.
        _custom_ops.swap_blocks_batch(
            src_ptrs=torch.from_numpy(source[part]),
            dst_ptrs=torch.from_numpy(target[part]),
            sizes=torch.from_numpy(spans.sizes[part]),
            # A save reads what the forward before it writes, so its source must be read in stream
            # order. A load reads finished host memory that does not change until the stream has
            # been waited for: it may be read at any time.
            is_src_access_order_any=not to_host,
        )


# Choice


def transfer_for(device: torch.device) -> Transfer:
    """Choose how this rank copies, once, at start-up. Logs the choice.

    Copies some pieces both ways on ``device`` when vLLM's batched copy could be used.
    """
    reason = _why_not_batched(device)
    if reason is None:
        try:
            reason = _difference(device)
        except Exception as error:  # of any kind: the plain path needs none of this
            reason = f"it fails here: {error!r}"
        if reason is not None:
            logger.warning("vLLM's batched copy is not used: %s.", reason)
    if reason is None:
        logger.info("Copies of the KV cache are handed to the driver in batches.")
        return BatchedTransfer(device)
    logger.info("Copies of the KV cache are queued one by one (%s).", reason)
    return copy_one_by_one


def _why_not_batched(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return f"batches need CUDA, and this is {device.type}"
    built = _version(torch.version.cuda)
    if built < BATCHES_SINCE:
        return f"batches need CUDA 12.8, and torch is built for {torch.version.cuda}"
    driver = _driver_version()
    if driver < BATCHES_SINCE:
        return f"batches need a driver of CUDA 12.8, and this one is of {_text(driver)}"
    from vllm import _custom_ops

    if not hasattr(_custom_ops, "swap_blocks_batch") or not hasattr(
        torch.ops._C_cache_ops, "swap_blocks_batch"
    ):
        return "this vLLM has no batched copy"
    return None


def _version(text: str) -> int:
    major, minor = text.split(".")[:2]
    return int(major) * 1000 + int(minor) * 10


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else "an unknown version"


def _driver_version() -> int:
    """Return the CUDA version of the installed driver, 12080 for 12.8; 0 if unknown."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _spans(pages: torch.Tensor, host: torch.Tensor, cuts: Sequence[tuple[int, int]]) -> Spans:
    """Make spans of the same cuts, (start, end), of ``pages`` and ``host``."""
    starts, ends = np.array(cuts, np.int64).T
    memory = np.zeros_like(starts)
    return Spans(pages.data_ptr() + starts, host.data_ptr() + starts, ends - starts, memory)


def _difference(device: torch.device) -> str | None:
    """Copy pieces of odd sizes both ways in batches; return what is wrong, or None.

    The way back of each is a plain copy, so that no two mistakes cancel out.
    """
    cuts, end = _checked_cuts()
    data, back = _pinned(end), _pinned(end)
    data.copy_(torch.randint(1, 256, (end,), generator=torch.Generator().manual_seed(0)))
    expected = torch.zeros(end, dtype=torch.uint8, device="cpu")
    for start, stop in cuts:
        expected[start:stop] = data[start:stop]
    stream = _stream(device)
    with stream:
        there = torch.zeros(end, dtype=torch.uint8, device=device)
        try:
            queue_batched(join([_spans(there, data, cuts)]), False)
            back.copy_(there, non_blocking=True)
            stream.synchronize()
            if not torch.equal(back, expected):
                return "host to device it copies other bytes"
            back.zero_()
            there.zero_()
            # Do not wait: a copy that runs out of order must read zeros.
            there.copy_(data, non_blocking=True)
            queue_batched(join([_spans(there, back, cuts)]), True)
        finally:
            # Nothing of this may be freed while a copy is in flight.
            stream.synchronize()
    return None if torch.equal(back, expected) else "device to host it copies other bytes"


def _checked_cuts() -> tuple[list[tuple[int, int]], int]:
    """Return (start, end) of the pieces, the last two adjacent, and the bytes in all."""
    cuts, at = [], CHECKED_GAP
    for number in range(CHECKED_PIECES):
        end = at + MIN_BATCHED + number * number % 4097
        cuts.append((at, end))
        at = end + CHECKED_GAP
    end = cuts[-1][1]
    cuts.append((end, end + MIN_BATCHED))
    return cuts, end + MIN_BATCHED + CHECKED_GAP


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _stream(device: torch.device) -> Any:
    return torch.Stream(device=device)
