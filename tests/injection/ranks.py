# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, with the collective calls between them."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LOCAL = threading.local()


class Alone(BaseException):
    """A rank waits in a collective call that another one does not make. Nobody catches it."""


class Meeting:
    """Collective calls. Each is made by all ranks, or the ranks that wait for it raise Alone."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._said: dict[int, dict[int, Any]] = {}  # by call, by rank
        self._made = [0] * ranks
        self._running: set[int] = set()

    def install(self, patch: Any) -> None:
        """Put it in the place of ``torch.distributed`` and vLLM's groups of ranks."""
        state = "vllm.distributed.parallel_state"
        patch.setattr("torch.distributed.is_initialized", lambda: hasattr(LOCAL, "rank"))
        patch.setattr(f"{state}.get_world_group", self._group)
        patch.setattr(f"{state}.get_tp_group", self._group)

        def all_gather_object(ranks: list, own: Any, group: str) -> None:
            assert group == "cpu"
            ranks[:] = self._exchange(own)

        def all_reduce(flags: Any, operation: Any, group: str) -> None:
            assert group == "cpu"
            for each in self._exchange(flags.clone()):
                flags.copy_(flags.minimum(each))

        patch.setattr("torch.distributed.all_gather_object", all_gather_object)
        patch.setattr("torch.distributed.all_reduce", all_reduce)

    def _group(self) -> SimpleNamespace:
        return SimpleNamespace(
            world_size=self._ranks, cpu_group="cpu", rank_in_group=LOCAL.rank, rank=LOCAL.rank
        )

    def _exchange(self, own: Any) -> list[Any]:
        rank = LOCAL.rank
        with self._changed:
            call, self._made[rank] = self._made[rank], self._made[rank] + 1
            said = self._said.setdefault(call, {})
            said[rank] = own
            self._changed.notify_all()
            while len(said) < self._ranks:
                missing = set(range(self._ranks)) - said.keys()
                if not missing <= self._running:
                    raise Alone(f"rank {rank} waits for {sorted(missing - self._running)}")
                self._changed.wait()
            return [said[each] for each in range(self._ranks)]

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call ``work`` on a thread for each rank; raises the first error once all have ended."""
        results: list[Any] = [None] * self._ranks
        errors: list[BaseException] = []
        self._running = set(range(self._ranks))

        def run(rank: int) -> None:
            LOCAL.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
            finally:
                with self._changed:
                    self._running.discard(rank)
                    self._changed.notify_all()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Alone))
        assert len(set(self._made)) == 1, f"collective calls by rank: {self._made}"
        return results
