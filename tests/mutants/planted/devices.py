# SPDX-License-Identifier: Apache-2.0
"""Copies on a device: how they are queued, their order, the memory of the pool."""

from tests.mutants.defect import Defect, one

WORKER = "lmcache_hybrid/worker/worker.py"
COPIES = "lmcache_hybrid/worker/copies.py"
TRANSFERS = "lmcache_hybrid/worker/device_copies.py"
PINNED = "lmcache_hybrid/storage/host_memory.py"

DEFECTS = (
    one(
        "a pool for whose pages no thread can be started ends the engine",
        PINNED,
        "            except (OSError, RuntimeError) as error:",
        "            except OSError as error:",
    ),
    # How copies are queued
    one(
        "a save may read pages before the forward has written them",
        TRANSFERS,
        "is_src_access_order_any=not to_host",
        "is_src_access_order_any=True",
    ),
    one(
        "copies are joined although their host memory lies apart",
        TRANSFERS,
        "        & (host[1:] == host[:-1] + sizes[:-1])\n",
        "",
    ),
    one(
        "copies are joined although their pages lie apart",
        TRANSFERS,
        "        (pages[1:] == pages[:-1] + sizes[:-1])\n        & (host",
        "        (host",
    ),
    one(
        "one copy spans two allocations",
        TRANSFERS,
        "        & (memory[1:] == memory[:-1])\n",
        "",
    ),
    one(
        "small pieces are copied in batches, which drivers get wrong",
        TRANSFERS,
        "            if to_host or spans.sizes.min(initial=MIN_BATCHED) >= MIN_BATCHED:\n",
        "            if True:\n",
    ),
    one(
        "small pieces are not copied at all",
        TRANSFERS,
        "        copy_one_by_one(small, to_host)\n",
        "",
    ),
    one(
        "a batch is larger than drivers take",
        TRANSFERS,
        "MAX_BATCH = 256",
        "MAX_BATCH = 1024",
    ),
    one(
        "the pages of a block lie where those of block 0 do",
        "lmcache_hybrid/worker/pages.py",
        "self._address + np.array(blocks, np.int64)[:, None] * self._stride",
        "self._address + 0 * np.array(blocks, np.int64)[:, None] * self._stride",
    ),
    one(
        "copies go to where the buffer's pool begins",
        "lmcache_hybrid/worker/pages.py",
        "        host = data.data_ptr() + self._offsets\n",
        "        host = data.untyped_storage().data_ptr() + self._offsets\n",
    ),
    one(
        "blocks are taken to lie back to back",
        "lmcache_hybrid/worker/pages.py",
        "[row.stride(0) for row in self.rows]",
        "[row.shape[1] for row in self.rows]",
    ),
    one(
        "pieces of any size are copied in batches",
        TRANSFERS,
        "MIN_BATCHED = 64 << 10",
        "MIN_BATCHED = 256",
    ),
    one(
        "a load with a deadline goes by large parts",
        "lmcache_hybrid/worker/loads.py",
        "most = self._part_bytes if load.deadline == math.inf else 1",
        "most = self._part_bytes",
    ),
    one(
        "of a part that found no room only the beginning is restored",
        "lmcache_hybrid/worker/loads.py",
        "for piece in in_parts(part, self._pages, most):",
        "for piece in list(in_parts(part, self._pages, most))[:1]:",
    ),
    one(
        "a large part that finds no room is not tried in small ones",
        "lmcache_hybrid/worker/loads.py",
        "for piece in in_parts(part, self._pages, most):",
        "for piece in (part,):",
    ),
    one(
        "a batched copy that was seen to be wrong is used",
        TRANSFERS,
        "            reason = _difference(device)\n",
        "            _difference(device)\n",
    ),
    one(
        "batches are queued on a stream where vLLM's op ignores errors",
        TRANSFERS,
        "        and torch.cuda.current_stream(device).cuda_stream not in DEFAULT_STREAMS\n",
        "",
    ),
    one(
        "after a failed batch its copies are missing",
        TRANSFERS,
        "            copy_one_by_one(items, to_host)\n\n\ndef _takes",
        "            copy_one_by_one(items[:0], to_host)\n\n\ndef _takes",
    ),
    # Memory of the pool
    one(
        "the pool is given back while the device may write to it",
        PINNED,
        "elif self._spec.unpin_memory(ptr):",
        "elif self._spec.unpin_memory(ptr) or True:",
    ),
    one(
        "a pool that CUDA did not register counts as pinned",
        PINNED,
        "if self._spec.pin_memory(address, len(memory)):",
        "if self._spec.pin_memory(address, len(memory)) or True:",
    ),
    one(
        "a pool of a power of two is thought not to be rounded",
        PINNED,
        "asked = size + PAGE",
        "asked = size",
    ),
    one(
        "a fork leaves the device with pages that the pool has left",
        PINNED,
        "    memory.madvise(mmap.MADV_DONTFORK)\n",
        "",
    ),
    # The order of copies on a device
    one(
        "a load does not wait for its mark",
        COPIES,
        "        stream.wait_event(after.event)\n",
        "",
    ),
    one(
        "a load waits for the mark of an earlier step",
        "lmcache_hybrid/worker/loads.py",
        "        after = self._copies.mark()\n",
        "        mark = self._copies.mark()\n"
        '        after, self._mark = getattr(self, "_mark", mark), mark\n',
    ),
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
                "size = restore(load, claim, after)",
                "size = restore(load, claim, self._copies.mark())",
            ),
        ),
    ),
    one(
        "the mark is on the thread's current device, whichever that is",
        COPIES,
        "self._module.current_stream(self._device)",
        "self._module.current_stream()",
    ),
    one(
        "one event is recorded for every mark",
        COPIES,
        "        event = self._module.Event(**blocking)\n",
        '        event = self.__dict__.setdefault("_event", self._module.Event(**blocking))\n',
    ),
    one(
        "a load is reported before the device has copied it",
        COPIES,
        "            self._wait(self._record(stream))\n",
        "            pass\n",
    ),
    Defect(
        "saves are copied on another stream",
        (
            (
                COPIES,
                "            self._transfer(items, to_host=True)\n",
                "            with self._module.stream(self._stream()):\n"
                "                self._transfer(items, to_host=True)\n",
            ),
            (
                COPIES,
                "        copied = self.mark()\n",
                "        copied = self._record(self._stream())\n",
            ),
        ),
    ),
    one(
        "the checksum of a save is computed before the device has copied it",
        COPIES,
        "            self._wait(copied)\n",
        "",
    ),
    one(
        "the buffers of a save go to the store before the device has copied them",
        "lmcache_hybrid/worker/saver.py",
        "                rest()\n",
        "                pass\n",
    ),
    one(
        "all restoring threads share a stream",
        COPIES,
        "        self._restoring = threading.local()\n",
        '        self._restoring = type("Shared", (), {})()\n',
    ),
    one(
        "a load that fails leaves copies in flight",
        COPIES,
        "        finally:\n            # Even after an error",
        "        except ZeroDivisionError:\n            raise\n"
        "        else:\n            # Not after one",
    ),
    one(
        "a save that fails leaves copies in flight",
        COPIES,
        "            self._wait(self.mark())\n            raise\n",
        "            raise\n",
    ),
    one(
        "who waits for the device keeps a core busy",
        COPIES,
        '{"blocking": True} if',
        "{} if",
    ),
    one(
        "a new thread waits with another device current",
        COPIES,
        "it would create a context.\n        self._module.set_device(self._device.index or 0)\n",
        "it would create a context.\n",
    ),
    one(
        "more threads copy than the docs say",
        COPIES,
        "COPIERS = 4\n",
        "COPIERS = 8\n",
    ),
)
