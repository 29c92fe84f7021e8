# SPDX-License-Identifier: Apache-2.0
"""Identifies LoRA adapters by the content that vLLM has loaded on a rank.

vLLM reads an adapter's files when a request first needs it, again after it was evicted, and when it
is reloaded in place. Only the loaded tensors identify it; paths, sizes and times of files do not.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import xxhash
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from lmcache_hybrid.core.counts import Ledger
from lmcache_hybrid.core.faults import caught

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.worker_manager import WorkerLoRAManager

logger = init_logger("vllm.lmcache_hybrid.identity.adapters")

# Max adapters that lookups have read and that wait in host memory for vLLM.
MOST_WAITING = 4
UNKNOWN = b""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA adapter of a prefix.

    Attributes:
        lora: as the request names it.
        contents: digest of the adapter on each rank; empty until the ranks have reported it.
    """

    lora: LoRARequest
    contents: tuple[bytes, ...] = ()

    @property
    def tag(self) -> tuple[str, str]:
        """The tag in record keys. Covers all ranks: pages depend on the others' weights."""
        return "lora", hashlib.sha256(b"".join(self.contents)).hexdigest()[:32]


class _Waiting(NamedTuple):
    """An adapter that a lookup has read, and its files."""

    lora: LoRARequest
    files: tuple
    model: "LoRAModel"
    content: bytes

    def serves(self, lora: LoRARequest) -> bool:
        """Whether vLLM would read the same, unchanged files for ``lora``."""
        same = (lora.lora_name, lora.lora_path, lora.is_3d_lora_weight) == (
            self.lora.lora_name,
            self.lora.lora_path,
            self.lora.is_3d_lora_weight,
        )
        return same and not lora.load_inplace and _files(lora) == self.files


class LoadedAdapters:
    """The adapters that vLLM has loaded in this process, which is one rank. Thread-safe.

    vLLM loads on the thread that runs the model; the lookup thread calls :meth:`content`, and
    the load thread :meth:`holds`. They read an adapter that is not loaded, and vLLM takes that
    instead of reading the files again: so the request is computed with the content that its lookup
    named.

    Attributes:
        rank, ranks: number of this rank, and of all ranks of the engine. If experts are spread
            over more ranks, the content is unknown.
        stages: of the pipeline. With several the content is unknown: before a save each would have
            to know whether the others still hold the adapter, and they are at other steps.
        ledger: of this rank; counts errors. None until its store is open.
    """

    def __init__(self) -> None:
        self.rank, self.ranks, self.stages = 0, 1, 1
        self.ledger: Ledger[Any] | None = None
        self._manager: WorkerLoRAManager | None = None
        self._read: Callable[[WorkerLoRAManager, LoRARequest], LoRAModel] | None = None
        self._contents: dict[int, bytes] = {}
        # All contents that vLLM's own caches take for one adapter, by its names.
        self._ever: dict[tuple[str, ...], set[bytes]] = {}
        # With adapters in the encoder, its cache knows them by name and outlives resets.
        self._encoder_knows = False
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._lock = threading.Lock()

    # vLLM's calls

    def serve(
        self,
        manager: "WorkerLoRAManager",
        read: "Callable[[WorkerLoRAManager, LoRARequest], LoRAModel]",
    ) -> None:
        """Start over with this process's manager; ``read`` is vLLM's own loader."""
        with self._lock:
            self._manager, self._read = manager, read
            self._encoder_knows = manager.lora_config.enable_tower_connector_lora
            self._contents.clear()
            self._ever.clear()
            self._waiting.clear()

    def serves(self, manager: "WorkerLoRAManager") -> bool:
        """Whether ``manager`` is the one of :meth:`serve`."""
        return manager is self._manager

    def load(self, lora: LoRARequest) -> "LoRAModel":
        """Load an adapter for vLLM and note its content before vLLM uses it."""
        manager, read = self._manager, self._read
        assert manager is not None and read is not None
        with self._lock:
            waiting = self._waiting.pop(lora.lora_int_id, None)
        if waiting is not None and waiting.serves(lora):
            model, content = waiting.model, waiting.content
        else:
            model = read(manager, lora)
            content = self._content_of(manager, model)
        with self._lock:
            self._contents[lora.lora_int_id] = content
            self._ever.setdefault(self._name(lora), set()).add(content)
        return model

    # Queries

    def content(self, lora: LoRARequest) -> bytes:
        """Digest the adapter that a request with ``lora`` would get; UNKNOWN if unsure.

        Never raises. Reads the files of an adapter that is neither loaded nor waiting.
        """
        return self._content(lora, reads=True)

    def _content(self, lora: LoRARequest, reads: bool) -> bytes:
        try:
            return self._content_that_stays(lora, reads)
        except Exception as error:
            what = "requests of this LoRA adapter are computed"
            caught("adapter_content", error, what, self.ledger)
            return UNKNOWN

    def _content_that_stays(self, lora: LoRARequest, reads: bool) -> bytes:
        if self.stages > 1:
            logger.warning_once(
                "Requests with LoRA adapters are not cached with pipeline parallelism."
            )
            return UNKNOWN
        known = self._known(lora, reads)
        if known == UNKNOWN:
            return UNKNOWN
        with self._lock:
            ever = self._ever.get(self._name(lora), set())
            if not ever - {known}:
                return known
        logger.warning_once(
            "Requests of LoRA adapter %s are no longer cached: the content of %s has changed "
            "since this engine first loaded it, and vLLM's own caches still hold what the old "
            "one computed. Load changed weights %s.",
            lora.lora_name,
            lora.lora_path,
            "under a new name"
            if self._encoder_knows
            else "from a new path, or reset all caches (POST /reset_prefix_cache"
            "?reset_running_requests=true&reset_external=true)",
        )
        return UNKNOWN

    def holds(self, adapter: Adapter | None, *, reads: bool = False) -> bool:
        """Whether this rank has computed with the reported content ever since.

        Args:
            reads: whether to read the files of an adapter that is neither loaded nor waiting, which
                takes up to seconds: never on the thread that runs the model. Without, it is not
                held.
        """
        if adapter is None:
            return True
        said = adapter.contents[self.rank] if adapter.contents else UNKNOWN
        return said != UNKNOWN and said == self._content(adapter.lora, reads)

    def all_hold(self, adapters: Sequence[Adapter | None]) -> list[bool]:
        """Whether every rank of this engine holds each adapter.

        A collective call if there is an adapter: each rank makes it once per step, on the thread
        that runs the model, with the same adapters.
        """
        held = [self.holds(adapter) for adapter in adapters]
        if not any(adapters) or not torch.distributed.is_initialized():
            return held
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        if group.world_size == 1:
            return held
        flags = torch.tensor(held, dtype=torch.int32)
        minimum = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(flags, minimum, group=group.cpu_group)
        return flags.bool().tolist()

    def forget(self) -> None:
        """Forget earlier contents: vLLM's own prefix cache was reset."""
        if self._encoder_knows:
            return
        with self._lock:
            now = set(self._contents.values())
            for contents in self._ever.values():
                contents &= now

    def _name(self, lora: LoRARequest) -> tuple[str, ...]:
        """Return the names by which vLLM's own caches know an adapter."""
        return (lora.lora_name,) if self._encoder_knows else (lora.lora_name, lora.lora_path)

    def _known(self, lora: LoRARequest, reads: bool) -> bytes:
        manager = self._manager
        if manager is None:
            return UNKNOWN
        with self._lock:
            if lora.lora_int_id in manager.list_adapters():
                return self._contents.get(lora.lora_int_id, UNKNOWN)
            waiting = self._waiting.get(lora.lora_int_id)
        if waiting is not None and waiting.serves(lora):
            return waiting.content
        return self._read_ahead(manager, lora) if reads else UNKNOWN

    def _read_ahead(self, manager: "WorkerLoRAManager", lora: LoRARequest) -> bytes:
        """Read an adapter that is not loaded and keep it for vLLM."""
        if lora.load_inplace or self._read is None:
            return UNKNOWN  # vLLM always reads it again
        files = _files(lora)
        if not files:
            return UNKNOWN  # vLLM must download it, or its files cannot be checked for changes
        try:
            model = self._read(manager, lora)
        except Exception as error:
            # vLLM gets the same error and answers the request with it.
            logger.debug("LoRA adapter %s cannot be read: %r", lora.lora_name, error)
            return UNKNOWN
        content = self._content_of(manager, model)
        if content != UNKNOWN:
            with self._lock:
                self._waiting[lora.lora_int_id] = _Waiting(lora, files, model, content)
                while len(self._waiting) > MOST_WAITING:
                    self._waiting.popitem(last=False)
        return content

    def _content_of(self, manager: "WorkerLoRAManager", model: "LoRAModel") -> bytes:
        """Digest an adapter that was read; UNKNOWN if that fails. Must not fail vLLM's own load."""
        experts = manager._adapter_manager.moe_ep_load_spec
        if experts and experts.global_num_experts > experts.local_num_experts * self.ranks:
            return UNKNOWN  # some experts are on ranks of other engines
        try:
            return content_of(model)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, MemoryError) as error:
            logger.warning_once(
                "Requests of a LoRA adapter are not cached, because its tensors cannot be read: %r",
                error,
            )
            return UNKNOWN


def report_lost(ledger: Ledger, request_id: str) -> None:
    """Count and log a successful load whose adapter had changed meanwhile."""
    with ledger as counts:
        counts.failed_loads["adapter,none"] += 1
    logger.warning(
        "Reqid: %s, what was loaded is computed instead: its LoRA adapter has changed meanwhile.",
        request_id,
    )


# Shared by vLLM's loader and the connector in this process.
ADAPTERS = LoadedAdapters()


def content_of(model: "LoRAModel") -> bytes:
    """Digest all that an adapter computes with: tensors, ranks, factors, layout."""
    digest = xxhash.xxh3_128(repr((model.rank, model.is_3d_lora_weight)).encode())
    for facts, tensor in _parts(model):
        shape = None if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
        digest.update(repr((facts, shape)).encode())
        if tensor is not None:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
    return digest.digest()


def _parts(model: "LoRAModel") -> Iterator[tuple[tuple, torch.Tensor | None]]:
    for name, layer in sorted(model.loras.items()):
        facts = (name, layer.rank, layer.lora_alpha, layer.scaling)
        for side, given in (("a", layer.lora_a), ("b", layer.lora_b)):
            tensors = given if isinstance(given, list) else [given]
            for index, tensor in enumerate(tensors):
                yield (*facts, side, index), tensor
    for name, full in sorted(model.modules_to_save.items()):
        yield (name, "weight"), full.weight
        yield (name, "bias"), full.bias


def _files(lora: LoRARequest) -> tuple:
    """List names, inodes, sizes and times of an adapter's files; empty if not a local folder.

    Also empty if one of them cannot be read, as behind a broken link: its changes would go
    unnoticed.
    """
    found = []
    try:
        folder = Path(lora.lora_path).expanduser()
        for file in sorted(folder.glob("adapter_*")):
            status = file.stat()
            found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
    except (OSError, RuntimeError, ValueError) as error:  # no home directory, no path at all
        logger.warning_once(
            "Requests of LoRA adapter %s are not cached, because its files cannot be looked at: "
            "%s. Repair or remove what cannot be read there.",
            lora.lora_name,
            str(error),  # equal ones are logged once
        )
        return ()
    return tuple(found)
