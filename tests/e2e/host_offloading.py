# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``OffloadingConnector`` where the KV cache lies in host memory.

vLLM's own worker copies on CUDA streams. All else of the connector is vLLM's: what it stores,
looks up, evicts and reports.
"""

import time
from collections.abc import Callable, Iterator

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies whole blocks at once, and reports them with the next step.

    Args:
        keep: makes the tensor that keeps pages of so many bytes, int8 of shape (blocks, bytes).
    """

    def __init__(self, caches: CanonicalKVCaches, keep: Callable[[int], torch.Tensor]) -> None:
        self._pages = [each.tensor for each in caches.tensors]
        self._kept = [keep(page.shape[1]) for page in self._pages]
        self._groups = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        started, size = time.perf_counter(), 0
        for index, page, kept in self._pairs(src_spec, dst_spec):
            self._kept[index][kept].copy_(self._pages[index][page])
            size += self._pages[index].shape[1]
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - started))
        return True

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        started, size = time.perf_counter(), 0
        for index, page, kept in self._pairs(dst_spec, src_spec):
            self._pages[index][page].copy_(self._kept[index][kept])
            size += self._pages[index].shape[1]
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - started))
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
            self._worker = HostWorker(
                kv_caches, lambda size: torch.zeros(self.num_chunks, size, dtype=torch.int8)
            )
        return self._worker


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with further tiers, such as files, with :class:`HostWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region.create_next_worker_view)
        return self._worker
