# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``OffloadingConnector`` where the KV cache lies in host memory.

vLLM's own worker copies on CUDA streams. All else of the connector is vLLM's: what it stores,
looks up, evicts and reports.
"""

from collections.abc import Iterator

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies whole blocks at once, and reports them with the next step."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        self._pages = [each.tensor for each in caches.tensors]
        self._kept = [torch.zeros(blocks, page.shape[1], dtype=torch.int8) for page in self._pages]
        self._groups = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        for index, page, kept in self._pairs(src_spec, dst_spec):
            self._kept[index][kept].copy_(self._pages[index][page])
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        for index, page, kept in self._pairs(dst_spec, src_spec):
            self._pages[index][page].copy_(self._kept[index][kept])
        self._done.append(TransferResult(job_id, True))
        return True

    def _pairs(
        self, pages: GPULoadStoreSpec, kept: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, int, int]]:
        """(tensor, block of the KV cache, block kept) of all that is copied."""
        at = 0
        for size, refs in zip(pages.group_sizes, self._groups, strict=True):
            for number in range(at, at + size):
                for ref in refs:
                    yield ref.tensor_idx, int(pages.block_ids[number]), int(kept.block_ids[number])
            at += size

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec with :class:`HostWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker
