# SPDX-License-Identifier: Apache-2.0
"""Orders the copies between a device's pages and record buffers against the forward.

The host queues the copies, in :mod:`.driver_batches`, and goes on.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmcache_hybrid.storage.record_format import digests_of
from lmcache_hybrid.worker.copies import Copies, CopyJob, HostCopies, StreamEvent
from lmcache_hybrid.worker.copy_threads import CopyThreads
from lmcache_hybrid.worker.driver_batches import Transfer, copy_one_by_one, transfer_for


def copies_for(device: torch.device, threads: CopyThreads) -> Copies:
    """Make the copies for a KV cache on ``device``; saves use ``threads``."""
    if device.type == "cpu":
        return HostCopies(threads)
    return StreamCopies(device, transfer_for(device))


class StreamCopies:
    """Copies for a KV cache on a device with streams; buffers lie in pinned memory.

    Rules, each held by a test in ``tests/sim/test_streams.py``:

    - Saves are queued on the compute stream itself, or between two parts of it: the next forward,
      which may overwrite a state, runs behind them. The device spends the time of the transfer;
      the host spends none, and no device memory is needed, which vLLM has given away.
    - Loads run on streams of their own, behind a mark on the compute stream: forwards and
      saves that were queued before may still use a block that vLLM handed to the load.
    - A load returns once the device has copied, even after an error: vLLM then zeroes,
      reads or overwrites the blocks, and the buffers go back to the pool.
    - Buffers of a save are read and released once the device has copied, even after an error.
    - Each restoring thread has a stream of its own, so that no load waits for another's copies.

    This relies on vLLM (V1 and V2 model runner): the current stream of the thread that calls the
    connector is the one that zeroes blocks, moves states and runs the forward. Both runners
    switch to another stream only to copy sampled tokens and drafts to the host, and switch back
    before they call the connector. Microbatches on two streams (DBO) end on the compute stream,
    and V2 refuses them for hybrid models. ``bind_connector_metadata``, where loads start, runs on
    that thread after zeroing, copies on write and state moves were queued; a step without a
    forward also zeroes before it. The step's forward uses no block of a load. ``wait_for_save``
    and, with a drafter, the finalizing one run after the forward was queued.
    """

    def __init__(self, device: torch.device, transfer: Transfer = copy_one_by_one) -> None:
        self._device = device
        self._transfer = transfer
        # torch.cuda or the like: ``torch.Event`` ignores ``blocking``, so waiting for one keeps a
        # core busy, and ``torch.Stream`` as a context stores the stream that was current before
        # on itself, for all threads.
        self._module = torch.get_device_module(device)
        self._restoring = threading.local()

    def mark(self) -> StreamEvent:
        # This device's stream, not that of the thread's current device.
        return self._record(self._module.current_stream(self._device))

    def gather(self, items: Sequence[CopyJob]) -> Callable[[], None]:
        try:
            self._transfer(items, True)
        except BaseException:
            # The buffers are released next and must not be written later.
            self._wait(self.mark())
            raise
        copied = self.mark()

        def finish() -> None:
            self._wait(copied)
            for item in items:
                payload = memoryview(item.buffer.payload.numpy())
                item.buffer.digests = digests_of(payload, item.buffer.digester)

        return finish

    def scatter(self, items: Sequence[CopyJob], after: StreamEvent) -> None:
        for item in items:
            item.check()
        self._module.set_device(self._device.index or 0)
        stream = self._stream()
        stream.wait_event(after.event)
        try:
            with self._module.stream(stream):
                self._transfer(items, False)
        finally:
            # Even after an error: copies queued before it read the buffers.
            self._wait(self._record(stream))

    def _stream(self) -> Any:
        """The calling thread's own stream."""
        if not hasattr(self._restoring, "stream"):
            self._restoring.stream = self._module.Stream(device=self._device)
        return self._restoring.stream

    def _record(self, stream: Any) -> StreamEvent:
        """Record a new event on ``stream``; a thread that waits for it sleeps."""
        blocking = {"blocking": True} if self._device.type == "cuda" else {}
        event = self._module.Event(**blocking)
        event.record(stream)
        return StreamEvent(event)

    def _wait(self, mark: StreamEvent) -> None:
        """Block the calling thread until the device has passed ``mark``."""
        # A new thread's current device is the first one, where it would create a context.
        self._module.set_device(self._device.index or 0)
        assert mark.event is not None
        mark.event.synchronize()
