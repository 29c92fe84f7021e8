# SPDX-License-Identifier: Apache-2.0
"""What requests ask to be kept, and what came of it.

The ranks are asked once a request is admitted, while it is computed: nothing waits for the answer,
and lookups of other requests come before each call.
"""

import hashlib
import itertools
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger

from lmcache_hybrid.core.counts import Ledger, SchedulerCounts
from lmcache_hybrid.core.faults import caught
from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.protocol.keep import KeepRequest, KeepResult
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.scheduler.drops import UNCACHEABLE
from lmcache_hybrid.scheduler.lookup_queue import LookupQueue
from lmcache_hybrid.scheduler.prompt import inner_hashes
from lmcache_hybrid.scheduler.step_ends import StepEnds

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.keeps")
OFF = "this engine keeps nothing (hybrid_keep_share: 0)."
SHORT = "the prompt, or lmcache.keep_to, is shorter than a block. Nothing is kept."
NOTHING = "nothing of this prompt is stored, and this request does not store it. Nothing is kept."
NO_BACKEND = (
    "no backend of this engine can keep records: fs://, Redis and S3 evict by orders of their own."
)
UNKNOWN_ADAPTER = (
    "a rank does not know the content of the LoRA adapter, or did not answer. Nothing is kept: "
    "repeat it."
)
UNANSWERED = (
    "a rank did not answer in time, or cannot read its store. Some ranks may keep their part: "
    "repeat it."
)
UNEXPECTED = "an unexpected error, see the engine's log. It may not have been kept: repeat it."
RESET = "all caches were reset meanwhile: repeat it once that has succeeded."
DROPPED = "records were dropped meanwhile, maybe of this prompt. Nothing is kept: repeat it."
UNSTORED = (
    "the request has ended before its prompt was stored. Only what was stored before it is kept: "
    "repeat it."
)
UNFINISHED = (
    "the request has ended before all ranks had answered. It may not have been kept: repeat it."
)


class _RefusedError(Exception):
    """Nothing is kept; says why.

    Attributes:
        outcome: for the counter.
    """

    def __init__(self, why: str, outcome: str = "refused") -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass
class Keep:
    """What a request asks to be kept.

    Used by the scheduler's thread only, but for ``result`` and ``sent``, which the queue's sets.

    Attributes:
        seconds: from its admission on; 0 to keep its prompt no longer.
        to: in tokens; only records that end up to there are kept. None for the whole prompt.
        error: why nothing is kept; "" while that is not known.
        asked: tokens in vLLM's own cache when it last asked what can be loaded.
        begun: whether the ranks are asked.
        result: the answer; None until they have answered.
        promised: boundary in blocks that it has yet to store; 0 for none.
        sent: the call that keeps, and the boundary in blocks that was stored before; None until
            it is made.
        broken: whether it has ended before that.
    """

    seconds: float = 0
    to: int | None = None
    error: str = ""
    asked: int = 0
    begun: bool = False
    result: dict[str, Any] | None = None
    promised: int = 0
    sent: tuple[KeepRequest, int] | None = None
    broken: bool = False

    def begin(
        self,
        plan: GroupPlan,
        share: float,
        tokens: int,
        cacheable: bool,
        marks: StepEnds | None,
    ) -> None:
        """Find out whether anything can be kept. Mutates ``marks``.

        Args:
            share: of a backend's bytes that may be kept; 0 for nothing.
            tokens: of its prompt.
            cacheable: whether that may be cached.
            marks: where its steps end; None where nothing of it is stored.
        """
        size, to = plan.block_size, self.to
        if self.error:
            return
        if not share:
            self.error = OFF
        elif not cacheable:
            self.error = UNCACHEABLE
        elif to is not None and to > tokens:
            self.error = f"lmcache.keep_to={to} lies past the prompt of {tokens} tokens."
        elif (tokens if to is None else to) < (plan.unit or size):
            self.error = SHORT
        elif to is not None and self.seconds and marks is not None:
            # Prompts that go on otherwise need the state there, so a step of this one ends there.
            marks.kept = marks.up_to(to // size * size)

    def answer(self) -> dict[str, Any]:
        """Return what the client is told. Never waits."""
        answer = self.result
        if self.error or answer is None:
            return {"error": self.error or UNFINISHED}
        return {"error": UNSTORED} if self.broken and "kept" in answer else answer


class Keeps:
    """The keeps of all requests. Used by the scheduler's thread, but for what says otherwise."""

    def __init__(
        self, plan: GroupPlan, share: float, queue: LookupQueue, ledger: Ledger[SchedulerCounts]
    ) -> None:
        """
        Args:
            share: of a backend's bytes that may be kept; 0 for nothing.
        """
        self._plan, self._share, self._queue, self._ledger = plan, share, queue, ledger
        self._numbers = itertools.count(1)
        self._epoch = 0  # of the caches; those of the last one are empty

    def reset(self) -> None:
        """Keep nothing that was asked for so far: the caches are about to be emptied."""
        self._epoch += 1

    def admit(
        self,
        keep: Keep,
        request: "Request",
        prefix: Prefix,
        marks: StepEnds,
        save: bool,
        start: int,
    ) -> None:
        """Ask the ranks, once. Never blocks.

        Args:
            prefix, marks, save: see :class:`.tracker.RequestTracker`.
            start: tokens that the request starts from; it stores states past them only.
        """
        if keep.error or keep.begun:
            return
        keep.begun = True
        to = request.num_prompt_tokens if keep.to is None else keep.to
        end = min(marks.kept or marks.end, marks.end)
        computes = keep.to is None or bool(marks.kept)
        computes &= save and start < end and marks.ends_at(end)
        salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
        call = KeepRequest(
            prefix,
            (end // self._plan.block_size,) if computes else (),
            hashlib.blake2b(salt, digest_size=16).digest() if salt else b"",
            keep.seconds,
            self._share,
            number=next(self._numbers) if keep.seconds else 0,
        )
        keep.promised = call.boundaries[0] if computes and keep.seconds else 0
        barred = tuple(marks.barred)
        try:
            parts = self._keep(keep, request, to, barred, call, self._epoch)
            self._queue.in_turns(self._answer(keep, parts))
        except RuntimeError:  # the engine ends
            keep.error = UNFINISHED

    def take_back(self, keep: Keep, pages: int) -> None:
        """Keep no longer what a request has promised, as it has ended before. Never blocks.

        Args:
            pages: leading blocks whose attention pages it has stored or found.
        """
        promised, keep.promised, keep.broken = keep.promised, 0, True
        with suppress(RuntimeError):  # the engine ends
            self._queue.in_turns(self._take_back(keep, promised, pages))

    # On the queue's thread

    def _take_back(self, keep: Keep, promised: int, pages: int) -> Generator[None, None, None]:
        """Keep a promised boundary no longer, once it is kept.

        Args:
            pages: leading blocks whose pages stay kept.
        """
        if keep.sent is None:
            return
        call, found = keep.sent
        stays = min(pages, len(call.prefix.hashes)), found
        call = msgspec.structs.replace(call, boundaries=(promised,), seconds=0, stays=stays)
        later = "what a request has not stored is kept until its time is over"
        try:
            self._send(call)
        except _RefusedError:
            logger.warning_once("No rank, or not every one, could end a keep: %s.", later)
        except Exception as error:
            caught("keep_records", error, later, self._ledger)
        yield

    def _answer(
        self, keep: Keep, parts: Generator[None, None, dict[str, Any]]
    ) -> Generator[None, None, None]:
        """Note what the client is told, whatever comes of ``parts``."""
        try:
            answer, outcome = (yield from parts), "done"
        except _RefusedError as why:
            answer, outcome = {"error": str(why)}, why.outcome
        except Exception as error:
            self._count("failed")
            keep.result = {"error": UNEXPECTED}
            caught("keep_records", error, "a request's records may not be kept", self._ledger)
            return
        self._count(outcome)
        keep.result = answer

    def _keep(
        self,
        keep: Keep,
        request: "Request",
        to: int,
        barred: tuple[int, ...],
        call: KeepRequest,
        epoch: int,
    ) -> Generator[None, None, dict[str, Any]]:
        """Keep what the request asks for; a part for each call of the ranks.

        Args:
            to: in tokens; nothing past it is kept.
            barred: boundaries in tokens that no request may start from.
            call: with the boundary that the request will store, if any.
            epoch: of the caches that it was asked for.

        Raises:
            _RefusedError: nothing, or not all of it, is kept.
        """
        plan, size = self._plan, self._plan.block_size
        drops = self._queue.num_drops
        prefix = self._queue.identified(call.prefix)
        if prefix is None or (request.lora_request is not None and prefix.adapter is None):
            raise _RefusedError(UNKNOWN_ADAPTER, "failed")
        if prefix.adapter is not None:  # its ranks were called
            yield
        blocks = min(to // size, len(prefix.hashes))
        prefix, tail = prefix.up_to(blocks), 0
        if plan.unit:
            # Beside a drafter the last boundary may have no hash, see prompt.extended.
            last = min(to, len(request.block_hashes) * plan.unit)
            inner = inner_hashes(request, range(plan.unit, last + 1, plan.unit), plan)
            prefix, tail = prefix.with_inner(inner), max(0, min(last - blocks * size, size - 1))
        if not call.seconds:
            self._send(msgspec.structs.replace(call, prefix=prefix))
            return {"kept": {}}
        name = f"lmcache.keep of {request.request_id}"  # a lookup that LMCache does not count
        found = yield from self._queue.find(
            LookupRequest(name, prefix, blocks, 0, again=True, limit_tail=tail, barred=barred)
        )
        yield
        if not found.available:
            raise _RefusedError(UNANSWERED, "failed")
        stored = found.tokens(size)
        ends = {*call.boundaries, found.boundary * (not found.tail)} - {0}
        kept = max([stored, *(end * size for end in ends)])
        if not kept:
            raise _RefusedError(NOTHING)
        inside = {stored: prefix.inner[stored]} if found.tail else {}
        prefix = prefix.up_to(kept // size).with_inner(inside)
        call = msgspec.structs.replace(call, prefix=prefix, boundaries=tuple(sorted(ends)))
        full = self._send(call)
        yield
        free = [backend for backend, why in full.items() if not why]
        full = {backend: why for backend, why in full.items() if why}
        if not free:
            raise _RefusedError(
                " ".join(f"{each}: {why}" for each, why in full.items()) or NO_BACKEND
            )
        if self._epoch != epoch:
            raise _RefusedError(RESET)
        if self._queue.num_drops != drops:
            raise _RefusedError(DROPPED)
        call = msgspec.structs.replace(call, backends=tuple(free))
        keep.sent = call, found.boundary
        self._send(call)
        answer = {"kept": dict.fromkeys(free, kept), "stored": stored, "seconds": call.seconds}
        return answer | ({"full": full} if full else {})

    def _send(self, call: KeepRequest) -> dict[str, str]:
        """Call all ranks; return, for each backend that all have, why one of them is full."""
        results: list[KeepResult] = self._queue.keep(call)
        if not results:
            raise _RefusedError(UNANSWERED, "failed")
        for result in results:
            if result.failure:
                raise _RefusedError(result.failure, "failed")
        backends = [name for name in results[0].full if all(name in each.full for each in results)]
        return {
            name: next((each.full[name] for each in results if each.full[name]), "")
            for name in backends
        }

    def _count(self, outcome: str) -> None:
        with self._ledger as counts:
            counts.keeps[outcome] += 1
