# SPDX-License-Identifier: Apache-2.0
"""Queues copies between a device's KV cache and pinned host memory.

One asynchronous copy costs the host some five microseconds, and a long prompt has hundreds.
vLLM's own batched copy hands them to the driver in one call; it is used where this
release, CUDA and its driver have it and it has shown at start-up that it copies right.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.lmcache_hybrid.worker.batched_copies")

# (target, source): one is device memory, the other host memory.
Pair = tuple[torch.Tensor, torch.Tensor]

# Queues copies (target, source) on the device's current stream and returns at once. One of
# each pair is device memory, the other pinned host memory, both dense uint8 of one size. All
# must stay as they are until the stream has passed the copies; targets must not overlap, for
# the copies of one call have no order among themselves.
Transfer = Callable[[Sequence[Pair]], None]

# cuMemcpyBatchAsync came with CUDA 12.8, as the driver counts its versions.
BATCHES_SINCE = 12080
# Drivers were seen to crash on 50,000 copies in one call; a call costs next to nothing.
MAX_BATCH = 1024
# The streams that the driver calls "legacy default": it refuses batches there.
DEFAULT_STREAMS = (0, 1)
# Bytes of the pieces that are copied at start-up, and between them.
CHECKED_SIZES = (1, 255, 4096, 4097, 65_537, 100_001)
CHECKED_GAP = 13


def copy_one_by_one(copies: Sequence[Pair]) -> None:
    """The plain Transfer: one asynchronous copy per pair."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def copy_joined(copies: Sequence[Pair]) -> None:
    """The plain Transfer with what lies side by side in one copy."""
    copy_one_by_one(join(copies))


def join(copies: Sequence[Pair]) -> list[Pair]:
    """Make one copy of neighbours whose targets and sources both continue each other.

    Args:
        copies: dense uint8 views.

    Returns:
        The same bytes to the same places in the same order, without empty copies. Memory
        that is adjacent by accident, of two allocations, stays apart: no copy may span two.

    Raises:
        ValueError: a pair that is not two dense runs of equally many bytes.
    """
    runs: list[tuple[Pair, int]] = []
    for target, source in copies:
        size = _size_of(target, source)
        if not size:
            continue
        if runs:
            (first_target, first_source), length = runs[-1]
            if _continues(first_target, length, target) and _continues(
                first_source, length, source
            ):
                runs[-1] = (first_target, first_source), length + size
                continue
        runs.append(((target, source), size))
    return [(_stretch(target, size), _stretch(source, size)) for (target, source), size in runs]


def _size_of(target: torch.Tensor, source: torch.Tensor) -> int:
    for tensor in (target, source):
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise ValueError(
                f"{tensor.dtype} of strides {tensor.stride()} is no dense run of bytes"
            )
    if target.numel() != source.numel():
        raise ValueError(f"{source.numel()} bytes cannot be copied to {target.numel()}")
    return target.numel()


def _continues(first: torch.Tensor, length: int, following: torch.Tensor) -> bool:
    return (
        following.data_ptr() == first.data_ptr() + length
        and following.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


def _stretch(first: torch.Tensor, size: int) -> torch.Tensor:
    """``size`` bytes from where ``first`` starts."""
    if first.numel() == size:
        return first
    return first.as_strided((size,), (1,), first.storage_offset())


class BatchedTransfer:
    """The Transfer over vLLM's batched copy. May be called by several threads.

    It copies one by one what the driver does not take in batches: on the legacy default
    stream, and from or to memory that is not pinned. There vLLM's op would loop over copies
    whose errors it ignores, and a save that fails unseen stores other bytes than it says.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given_up = False

    def __call__(self, copies: Sequence[Pair]) -> None:
        joined = join(copies)
        if len(joined) < 2 or self._given_up or not _takes_batches(self._device, joined[0]):
            copy_one_by_one(joined)
            return
        try:
            queue_batched(joined)
        except Exception as error:
            self._given_up = True
            logger.warning(
                "vLLM's batched copy failed; from now on copies are queued one by one: %r", error
            )
            # The same bytes again, behind what may have been queued: no harm.
            copy_one_by_one(joined)


def _takes_batches(device: torch.device, pair: Pair) -> bool:
    """Whether the driver takes a batch now, on this thread, of pairs like this one."""
    # The pool is one piece of memory, so one pair of a call speaks for all.
    host = next(tensor for tensor in pair if tensor.device.type == "cpu")
    return (
        # vLLM's op takes the stream of the current device, whatever the pointers say.
        torch.cuda.current_device() == (device.index or 0)
        and torch.cuda.current_stream(device).cuda_stream not in DEFAULT_STREAMS
        and host.is_pinned()
    )


def queue_batched(copies: Sequence[Pair]) -> None:
    """Queue copies on the current stream of the current device with vLLM's op.

    Args:
        copies: at least one, none of them empty, as of :func:`join`.

    Raises:
        RuntimeError: the driver refuses them; some may have been queued.
    """
    from vllm import _custom_ops

    # A save reads what the forward queued before it writes, so its source must be read in the
    # order of the stream. A load reads host memory that the host wrote, checked, and leaves
    # alone until the stream has been waited for: it may be read before the stream gets there.
    any_order = all(source.device.type == "cpu" for _, source in copies)
    for start in range(0, len(copies), MAX_BATCH):
        part = copies[start : start + MAX_BATCH]
        # The driver has read these three when the call returns.
        _custom_ops.swap_blocks_batch(
            src_ptrs=_int64([source.data_ptr() for _, source in part]),
            dst_ptrs=_int64([target.data_ptr() for target, _ in part]),
            sizes=_int64([target.numel() for target, _ in part]),
            is_src_access_order_any=any_order,
        )


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


# Choice


def transfer_for(device: torch.device) -> Transfer:
    """Choose how this rank copies, once, at start-up. Logs the choice.

    Copies some pieces both ways on ``device`` when vLLM's batched copy could be used.
    """
    reason = _why_not_batched(device)
    if reason is None:
        try:
            reason = _difference(device, queue_batched)
        except Exception as error:  # of whatever kind: the plain path needs none of this
            reason = f"it fails here: {error!r}"
        if reason is not None:
            logger.warning("vLLM's batched copy is not used: %s.", reason)
    if reason is None:
        logger.info("Copies of the KV cache are handed to the driver in batches.")
        return BatchedTransfer(device)
    logger.info("Copies of the KV cache are queued one by one (%s).", reason)
    return copy_joined


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
    """CUDA's version of the installed driver, 12080 for 12.8; 0 where it does not say."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _difference(device: torch.device, transfer: Transfer) -> str | None:
    """Copy pieces of odd sizes both ways with ``transfer``; what is wrong, None when nothing.

    The plain path does the other half of each way, so that no two mistakes cancel out.
    """
    spans, end = _checked_spans()
    data, back = _pinned(end), _pinned(end)
    data.copy_(torch.randint(1, 256, (end,), generator=torch.Generator().manual_seed(0)))
    expected = torch.zeros(end, dtype=torch.uint8, device="cpu")
    for start, stop in spans:
        expected[start:stop] = data[start:stop]
    stream = _stream(device)
    with stream:
        there = torch.zeros(end, dtype=torch.uint8, device=device)
        try:
            transfer([(there[start:stop], data[start:stop]) for start, stop in spans])
            back.copy_(there, non_blocking=True)
            stream.synchronize()
            if not torch.equal(back, expected):
                return "host to device it copies other bytes"
            back.zero_()
            there.zero_()
            # Not waited for: a copy that is out of order reads zeros.
            there.copy_(data, non_blocking=True)
            transfer([(back[start:stop], there[start:stop]) for start, stop in spans])
        finally:
            # Nothing of this may be freed while a copy is in flight.
            stream.synchronize()
    return None if torch.equal(back, expected) else "device to host it copies other bytes"


def _checked_spans() -> tuple[list[tuple[int, int]], int]:
    """(start, end) of the pieces, the last of which continues the one before, and all bytes."""
    spans, at = [], CHECKED_GAP
    for size in CHECKED_SIZES:
        spans.append((at, at + size))
        at += size + CHECKED_GAP
    end = spans[-1][1]
    spans.append((end, end + CHECKED_GAP))
    return spans, end + 2 * CHECKED_GAP


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _stream(device: torch.device) -> Any:
    return torch.Stream(device=device)
