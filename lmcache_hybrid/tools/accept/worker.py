# SPDX-License-Identifier: Apache-2.0
"""Runs on each rank, as vLLM's ``worker_extension_cls``.

Every method runs on the worker's main thread, between steps, by ``collective_rpc``.
Results are made of plain types, because they are sent to other processes.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch

from lmcache_hybrid.config.options import read_options
from lmcache_hybrid.core.groups import Block
from lmcache_hybrid.core.keys import RecordKey
from lmcache_hybrid.storage.remote.record_connector import RecordConnector, unwrapped
from lmcache_hybrid.tools.accept.tiers import missing_of, refusals, tiers_of
from lmcache_hybrid.worker.copies import Copies, CopyJob
from lmcache_hybrid.worker.copy_threads import CopyThreads
from lmcache_hybrid.worker.streams import copies_for

if TYPE_CHECKING:
    from lmcache_hybrid.connector import HybridConnector
    from lmcache_hybrid.protocol.metadata import LoadSpec
    from lmcache_hybrid.storage.lmcache_store import LMCacheStore
    from lmcache_hybrid.worker.worker import HybridWorker

BYTE = torch.uint8
ROUNDS = 5
# No backend of LMCache has this name.
NOWHERE = ["nowhere"]
# Bytes of a timed copy: as much as a prompt of some thousand tokens restores.
COPIED_BYTES = 128 << 20


class AcceptExtension:
    """Mixed into vLLM's worker class."""

    vllm_config: Any
    device: torch.device

    def accept_facts(self) -> dict[str, Any]:
        """Return device, groups, layout and tiers; ``served`` is False without an open store."""
        connector = _connector()
        if connector is None or connector.worker is None:
            return {"served": False}
        plan, pages = connector.plan, connector.worker.pages
        store = _store(connector.worker)
        config = store._engine.config
        paged = (*plan.attention, *(window.group for window in plan.windows))
        return {
            "served": True,
            "block_size": plan.block_size,
            "unit": plan.unit,
            "chunk_unit": plan.chunk_unit,
            "num_blocks": min(group.num_blocks for group in pages.values()),
            "groups": {
                "attention": len(plan.attention),
                "window": len(plan.windows),
                "state": len(plan.states),
            },
            "group_kinds": [
                *((group, "state") for group in plan.states),
                *((group, "attention") for group in plan.attention),
                *((window.group, "window") for window in plan.windows),
            ],
            # vLLM's blocks for N tokens.
            "paged_blocks": sum(pages[group].count for group in paged),
            "block_bytes": sum(pages[group].block_bytes for group in paged),
            "state_bytes": sum(pages[group].block_bytes for group in plan.states),
            "layout": {
                kind: sorted({text for group in groups for text in pages[group].layout})
                for kind, groups in (("attention", paged), ("state", plan.states))
            },
            "attention_backends": self._backends(connector),
            "pool_bytes": int(config.max_local_cpu_size * (1 << 30)),
            "save_decode": bool(config.save_decode_cache),
            "tiers": tiers_of(store),
            "missing_tiers": missing_of(store),
            "refusals": refusals(
                read_options(self.vllm_config, config), store, plan.unit or plan.block_size
            ),
            **_device(self.device),
        }

    def _backends(self, connector: "HybridConnector") -> list[str]:
        context = self.vllm_config.compilation_config.static_forward_context
        groups = (*connector.plan.attention, *(w.group for w in connector.plan.windows))
        assert connector.worker is not None
        layers = [name for group in groups for name in connector.worker.pages[group].layers]
        backends = (getattr(context.get(name), "attn_backend", None) for name in layers)
        return sorted({each.__name__ for each in backends if each is not None})

    def accept_use(self, tiers: list[str] | None) -> None:
        """Restrict lookups and loads to these of LMCache's backends; None lifts it."""
        engine = _store(_worker())._engine
        if tiers is None:
            tiers = engine.config.retrieve_locations
        elif not tiers:
            tiers = NOWHERE  # an empty list means all of them to LMCache
        engine.retrieve_locations = tiers

    def accept_lose(self, group: int | None) -> None:
        """Zero the last block of a group after each load; None ends that.

        Loads are then wrong on purpose: no request may save meanwhile, and vLLM's own cache
        must be reset afterwards.
        """
        lose(_worker(), group)

    def accept_reads(self) -> dict[str, int]:
        """Return the records read since the start, by backend."""
        return dict(_store(_worker()).reads)

    def accept_pending(self) -> int:
        """Count writes that are still queued; waits for device copies in flight."""
        worker = _worker()
        worker.saves._finisher.submit(lambda: None).result()
        backends = _store(worker).manager.storage_backends.values()
        return sum(_writing(backend) for backend in backends)

    def accept_copies(self) -> dict[str, Any]:
        """Time copies of KV cache blocks to the host and back into other blocks.

        Call it while no request runs, after ``reset_prefix_cache``; the blocks get their
        contents back. Buffers come from LMCache's pool and are released.

        Returns:
            ``bytes``, ``wrong`` (bytes that came back changed), ``pinned``, and the seconds of
            ``gather``, ``scatter``, ``to_host`` and ``to_device`` (plain copies of the same size).
        """
        worker = _worker()
        threads = CopyThreads("accept")
        items, targets = _items(worker)
        try:
            copies = copies_for(self.device, threads)
            _wait(self.device)
            return _measure(copies, self.device, items, targets)
        finally:
            threads.close()
            for item in items:
                item.buffer.release()


def lose(worker: "HybridWorker", group: int | None) -> None:
    """Zero a group's last block at the end of each load, on the loading thread.

    Zeros are finite in every dtype, and no free block holds them by chance. Mutates ``worker``;
    None undoes it.
    """
    vars(worker.loads).pop("_restore", None)
    if group is None:
        return
    restore, pages = worker.loads._restore, worker.pages[group]

    def restore_and_lose(load: "LoadSpec", claim: Any, after: Any) -> int:
        size = restore(load, claim, after)
        _write(pages, _last_block(worker, load, group), torch.zeros(pages.block_bytes, dtype=BYTE))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return size

    vars(worker.loads)["_restore"] = restore_and_lose


def _last_block(worker: "HybridWorker", load: "LoadSpec", group: int) -> Block:
    plan = worker.plan
    blocks: dict[int, Sequence[Block]] = {}
    blocks |= zip(plan.states, ((block,) for block in load.state_blocks), strict=True)
    blocks |= zip(plan.attention, load.attention_blocks, strict=True)
    blocks |= zip((window.group for window in plan.windows), load.window_blocks, strict=True)
    return blocks[group][-1]


def _connector() -> "HybridConnector | None":
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_hybrid.connector import HybridConnector

    connector = get_kv_transfer_group()
    return connector if isinstance(connector, HybridConnector) else None


def _worker() -> "HybridWorker":
    connector = _connector()
    assert connector is not None and connector.worker is not None
    return connector.worker


def _store(worker: "HybridWorker") -> "LMCacheStore":
    return cast("LMCacheStore", worker.store)


def _writing(backend: Any) -> int:
    """Count the writes that a backend has queued."""
    total: int = len(getattr(backend, "put_tasks", ()))
    # LMCache does not list batched writes in put_tasks.
    connector = unwrapped(getattr(backend, "connection", None))
    return total + (connector.writing if isinstance(connector, RecordConnector) else 0)


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        from vllm.platforms import current_platform

        name = "CPU" if device.type == "cpu" else current_platform.get_device_name()
        return {"device": name, "cuda": None, "capability": None}
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda or torch.version.hip,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
    }


# Copies


def _items(worker: "HybridWorker") -> tuple[list[CopyJob], list[Block]]:
    """Choose blocks to copy, with a buffer each, and the blocks to copy them into.

    A block of each group, then attention and window blocks in turn, up to COPIED_BYTES; fewer if
    KV cache or pool are small. The caller owns the buffers.
    """
    plan, pages = worker.plan, worker.pages
    # Number of block IDs to copy from; those to copy to follow.
    most = min(group.num_blocks for group in pages.values()) // 2 - 1
    paged = (*plan.attention, *(window.group for window in plan.windows))
    wanted = [*plan.states, *paged]
    size = sum(pages[group].block_bytes for group in wanted)
    for group in cycle(paged):
        if size >= COPIED_BYTES or sum(pages[each].count for each in wanted) >= most:
            break
        wanted.append(group)
        size += pages[group].block_bytes
    items: list[CopyJob] = []
    targets: list[Block] = []
    first = 1
    for group in wanted:
        count = pages[group].count
        buffer = (
            worker.store.reserve(pages[group].block_bytes) if first + count <= most + 1 else None
        )
        if buffer is None:
            break
        source, target = (tuple(range(at, at + count)) for at in (first, most + first))
        items.append(CopyJob(RecordKey(0, group, b"", first), pages[group], source, buffer))
        targets.append(target)
        first += count
    return items, targets


def _measure(
    copies: Copies, device: torch.device, items: list[CopyJob], targets: list[Block]
) -> dict[str, Any]:
    if not items:
        return {"bytes": 0, "wrong": 0, "pinned": False}
    blocks = [*((i.pages, i.block) for i in items), *((i.pages, t) for i, t in zip(items, targets))]
    before = [_read(pages, block) for pages, block in blocks]
    restored = [item._replace(block=target) for item, target in zip(items, targets)]
    times: dict[str, list[float]] = {name: [] for name in ("gather", "scatter")}
    try:
        for seed, item in enumerate(items):
            _write(item.pages, item.block, _random(item.pages.block_bytes, seed))
        for _ in range(ROUNDS + 1):
            times["gather"].append(_seconds(device, lambda: copies.gather(items)))
            finish = copies.gather(items)
            if finish is not None:  # digests, which a worker thread would compute
                finish()
            times["scatter"].append(
                _seconds(device, lambda: copies.scatter(restored, copies.mark()))
            )
        wrong = 0
        for seed, (item, target) in enumerate(zip(items, targets)):
            expected = _random(item.pages.block_bytes, seed)
            wrong += int((_read(item.pages, target) != expected).sum())
            wrong += int((item.buffer.payload != expected).sum())
    finally:
        for (pages, block), content in zip(blocks, before):
            _write(pages, block, content)
    size = sum(item.pages.block_bytes for item in items)
    payload = items[0].buffer.payload
    return {
        "bytes": size,
        "wrong": wrong,
        "pinned": device.type != "cpu" and payload.is_pinned(),
        **{name: median(values[1:]) for name, values in times.items()},
        **_plain(device, size),
    }


def _plain(device: torch.device, size: int) -> dict[str, float]:
    """Time one plain copy of ``size`` bytes each way; empty if memory is too short."""
    try:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        there = torch.zeros(size, dtype=torch.uint8, device=device)
    except RuntimeError:  # vLLM has taken the device's memory
        return {}
    ways: dict[str, Callable[[], object]] = {
        "to_host": lambda: host.copy_(there, non_blocking=True),
        "to_device": lambda: there.copy_(host, non_blocking=True),
    }
    return {
        name: median([_seconds(device, work) for _ in range(ROUNDS + 1)][1:])
        for name, work in ways.items()
    }


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _random(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _read(pages: Any, block: Block) -> torch.Tensor:
    """Read a block's bytes, by plain copies one after another."""
    data = torch.empty(pages.block_bytes, dtype=torch.uint8)
    for page, part in pages.pieces(block, data):
        part.copy_(page)
    return data


def _write(pages: Any, block: Block, data: torch.Tensor) -> None:
    for page, part in pages.pieces(block, data):
        page.copy_(part)
