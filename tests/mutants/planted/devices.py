# SPDX-License-Identifier: Apache-2.0
"""Copies on a device: how they are queued, their order, the memory of the pool."""

from tests.mutants.defect import Defect, always, each_of, gone, passes

COPIES = "lmcache_hybrid/worker/streams.py"

MISTAKES = {
    "lmcache_hybrid/storage/host_memory.py": {
        "a pool for whose pages no thread can be started ends the engine": (
            "            except (OSError, RuntimeError) as error:",
            "            except OSError as error:",
        ),
        "the pool is given back while the device may write to it": (
            "elif self._spec.unpin_memory(ptr):",
            "elif self._spec.unpin_memory(ptr) or True:",
        ),
        "a pool that CUDA did not register counts as pinned": (
            "if self._spec.pin_memory(address, len(memory)):",
            "if self._spec.pin_memory(address, len(memory)) or True:",
        ),
        "a pool of a power of two is thought not to be rounded": (
            "asked = size + PAGE",
            "asked = size",
        ),
        "a fork leaves the device with pages that the pool has left": gone(
            "    memory.madvise(mmap.MADV_DONTFORK)\n"
        ),
    },
    "lmcache_hybrid/worker/driver_batches.py": {
        "a save may read pages before the forward has written them": (
            "is_src_access_order_any=not to_host",
            "is_src_access_order_any=True",
        ),
        "copies are joined although their host memory lies apart": gone(
            "        & (host[1:] == host[:-1] + sizes[:-1])\n"
        ),
        "copies are joined although their pages lie apart": (
            "        (pages[1:] == pages[:-1] + sizes[:-1])\n        & (host",
            "        (host",
        ),
        "one copy spans two allocations": gone("        & (memory[1:] == memory[:-1])\n"),
        "small pieces are copied in batches, which drivers get wrong": always(
            "            if to_host or spans.sizes.min(initial=MIN_BATCHED) >= MIN_BATCHED:\n"
        ),
        "small pieces are not copied at all": gone("        copy_one_by_one(small, to_host)\n"),
        "a batch is larger than drivers take": ("MAX_BATCH = 256", "MAX_BATCH = 1024"),
        "pieces of any size are copied in batches": ("MIN_BATCHED = 64 << 10", "MIN_BATCHED = 256"),
        "a batched copy that was seen to be wrong is used": (
            "            reason = _difference(device)\n",
            "            _difference(device)\n",
        ),
        "batches are queued on a stream where vLLM's op ignores errors": always(
            "        if queue.cuda_stream not in DEFAULT_STREAMS:\n"
        ),
        "batches of a default stream run before the forward that writes their pages": gone(
            "        own.wait_stream(queue)\n"
        ),
        "a forward overwrites states whose batch is still queued": passes(
            "            queue.wait_stream(own)\n"
        ),
        "after a failed batch its copies are missing": (
            "again does no harm.\n            copy_one_by_one(items, to_host)\n",
            "again does no harm.\n            copy_one_by_one(items[:0], to_host)\n",
        ),
    },
    "lmcache_hybrid/worker/pages.py": {
        "the pages of a block lie where those of block 0 do": (
            "self._address + np.array(blocks, np.int64)[:, None] * self._stride",
            "self._address + 0 * np.array(blocks, np.int64)[:, None] * self._stride",
        ),
        "copies go to where the buffer's pool begins": (
            "        host = data.data_ptr() + self._offsets\n",
            "        host = data.untyped_storage().data_ptr() + self._offsets\n",
        ),
        "blocks are taken to lie back to back": (
            "[row.stride(0) for row in self.rows]",
            "[row.shape[1] for row in self.rows]",
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a load with a deadline goes by large parts": (
            "most = self._part_bytes if load.deadline == math.inf else 1",
            "most = self._part_bytes",
        ),
        "a part that found no room is tried as a whole again": (
            "in_parts(part, self._pages, 1)",
            "in_parts(part, self._pages, most)",
        ),
        "of a part that found no room only the beginning is restored": (
            "for piece in in_parts(part, self._pages, 1):",
            "for piece in list(in_parts(part, self._pages, 1))[:1]:",
        ),
        "a load waits for the mark of an earlier step": (
            "        after = self._copies.mark()\n",
            "        mark = self._copies.mark()\n"
            '        after, self._mark = getattr(self, "_mark", mark), mark\n',
        ),
    },
    "lmcache_hybrid/worker/streams.py": {
        "a load does not wait for its mark": gone("        stream.wait_event(after.event)\n"),
        "the mark is on the thread's current device, whichever that is": (
            "self._module.current_stream(self._device)",
            "self._module.current_stream()",
        ),
        "one event is recorded for every mark": (
            "        event = self._module.Event(**blocking)\n",
            '        event = self.__dict__.setdefault("_event", self._module.Event(**blocking))\n',
        ),
        "a load is reported before the device has copied it": passes(
            "            self._wait(self._record(stream))\n"
        ),
        "the checksum of a save is computed before the device has copied it": gone(
            "            self._wait(copied)\n"
        ),
        "all restoring threads share a stream": (
            "        self._restoring = threading.local()\n",
            '        self._restoring = type("Shared", (), {})()\n',
        ),
        "a load that fails leaves copies in flight": (
            "        finally:\n            # Even after an error",
            "        except ZeroDivisionError:\n            raise\n        else:\n"
            "            # Not after one",
        ),
        "a save that fails leaves copies in flight": (
            "            self._wait(self.mark())\n            raise\n",
            "            raise\n",
        ),
        "who waits for the device keeps a core busy": ('{"blocking": True} if', "{} if"),
        "a new thread waits with another device current": (
            "it would create a context.\n"
            "        self._module.set_device(self._device.index or 0)\n",
            "it would create a context.\n",
        ),
    },
    "lmcache_hybrid/worker/copy_threads.py": {
        "more threads copy than the docs say": ("COPIERS = 4\n", "COPIERS = 8\n"),
    },
    "lmcache_hybrid/worker/saver.py": {
        "the buffers of a save go to the store before the device has copied them": passes(
            "                rest()\n"
        ),
    },
}
DEFECTS = (
    *each_of(MISTAKES),
    Defect(
        "the mark is taken before the step zeroes blocks and saves",
        (
            (
                "lmcache_hybrid/worker/loads.py",
                "        after = self._copies.mark()\n",
                '        after = getattr(self, "_mark", None) or self._copies.mark()\n',
            ),
            (
                "lmcache_hybrid/worker/loads.py",
                "        results = KVConnectorTransferResults()\n",
                "        results = KVConnectorTransferResults()\n"
                "        self._mark = self._copies.mark()\n",
            ),
        ),
    ),
    Defect(
        "the mark is taken by the loading thread, on a stream of its own",
        (
            (
                "lmcache_hybrid/worker/loads.py",
                "        after = self._copies.mark()\n",
                "        after = StreamEvent(None)\n",
            ),
            (
                "lmcache_hybrid/worker/loads.py",
                "size = self._restore(load, claim, after)",
                "size = self._restore(load, claim, self._copies.mark())",
            ),
        ),
    ),
    Defect(
        "saves are copied on another stream",
        (
            (
                COPIES,
                "            self._transfer(items, True)\n",
                "            with self._module.stream(self._stream()):\n"
                "                self._transfer(items, True)\n",
            ),
            (
                COPIES,
                "        copied = self.mark()\n",
                "        copied = self._record(self._stream())\n",
            ),
        ),
    ),
)
