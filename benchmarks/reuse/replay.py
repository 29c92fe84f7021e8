# SPDX-License-Identifier: Apache-2.0
"""Runs traces through the arms, and counts which share of the reusable tokens each reuses.

What is compared, and how it is kept fair:

- One request at a time, each to its end. What an arm remembers of the earlier ones is
  all that counts; batches would only blur it.
- *vLLM alone* has no store. Its own cache is never emptied, and its pool holds as many
  bytes as the other arms' store and working room together.
- *LMCache* arms have a store, and a pool with working room for the longest request.
  vLLM's own cache is emptied before each request, so every hit comes from the store.
  In the arm "beside vLLM's cache" it is not emptied, as in a usual deployment: with a
  full store that arm has exactly the bytes of vLLM alone.
- *Restarted* is what users run: vLLM's own cache has room for a tenth of all that the
  trace stores, beside the working room, and is emptied once, halfway. The store keeps all.
- The *oracle* has a state at every boundary ever computed and forgets nothing. 100 %
  is what it reuses; a token that cannot be reused by anybody counts for nobody.
- *LRU*, *Marconi* and *foresight* are policies over whole prefixes in a store of the same bytes,
  see :mod:`benchmarks.reuse.reference`. They have no store's or scheduler's rules to
  obey. The first two keep a state at each prompt's last boundary and where it branches
  off, the third where a later prompt will branch off.

Bytes are those of Qwen3.6-27B on one GPU: a block of 784 tokens has 51.4 MB of
attention in 16 layers, and a boundary's state in 48 layers has three times that. vLLM
has four groups there, of the same page size: three of states and one of attention. So
one page is the unit of both, the pool of vLLM and the store.
"""

import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.reuse.engine import Outcome, ReplayEngine, Setup
from benchmarks.reuse.reference import (
    STATE_PAGES,
    Foresight,
    LruReference,
    MarconiReference,
    Oracle,
)
from benchmarks.reuse.report import RESTARTED, THIRD, UNLIMITED
from benchmarks.reuse.traces import Span, Trace, tokens

BLOCK_SIZE = 784
ATTENTION_BYTES = 65_536  # per token: 16 layers, keys and values of 4 heads of 256 in bf16
BATCH = 8_192
ROOM_BESIDE = 256  # more blocks in vLLM's pool beside an unlimited store
# Traces that are replayed with a full store too.
FULL = ("documents", "popular", "one-offs")
CHATS = ("chat", "short chats")
# Arms of RESTARTED, and vLLM's own cache there, as a share of what the trace stores.
DEPLOYED, POOL_SHARE = ("vllm", "default"), 0.1
# Boundaries of the finer oracle, in tokens.
FINE = 16


@dataclass(frozen=True)
class Arm:
    """One way to remember.

    Attributes:
        interval: T in blocks, 0 for none; None for the default, a state at each chunk's end.
        beside: vLLM's own cache is not emptied.
        room: whether vLLM's pool has working room besides the store's bytes.
        plain: LMCache's own order, see :class:`benchmarks.reuse.engine.Setup`.
        policy: LMCache's ``cache_policy``, "" where it is not set.
        unit: ``--prefix-match-unit``, a divisor of N; 0 where it is not set.
        only: traces it is run on, empty for all.
    """

    name: str
    title: str
    store: bool = True
    interval: int | None = None
    save_decode: bool = False
    beside: bool = False
    room: bool = True
    plain: bool = False
    policy: str = ""
    unit: int = 0
    only: tuple[str, ...] = ()


ARMS = (
    Arm("vllm", "vLLM alone", store=False),
    Arm("vllm-bare", "vLLM alone, no working room", store=False, room=False, only=FULL),
    Arm("default", "LMCache, defaults"),
    Arm("last", "LMCache, last boundary only", interval=0),
    Arm("decode", "LMCache, generated tokens too", save_decode=True, only=CHATS),
    Arm("T16", "LMCache, T = 16 N", interval=16),
    Arm("T4", "LMCache, T = 4 N", interval=4),
    Arm("T2", "LMCache, T = 2 N", interval=2),
    Arm(
        "T4-decode", "LMCache, T = 4 N, generated too", interval=4, save_decode=True, only=("chat",)
    ),
    Arm("T1", "LMCache, T = N", interval=1),
    Arm("policy-lru", "LMCache, cache_policy LRU", policy="LRU", only=FULL),
    Arm("plain", "LMCache, its own eviction", plain=True, policy="LRU", only=FULL),
    Arm(
        "T4-plain",
        "LMCache, T = 4 N, its own eviction",
        interval=4,
        plain=True,
        policy="LRU",
        only=FULL,
    ),
    Arm("beside", "LMCache beside vLLM's cache", beside=True),
    Arm("vllm-U56", "vLLM alone, U = 56", store=False, unit=56),
    Arm("U16", "LMCache, U = 16", unit=16),
    Arm("U56", "LMCache, U = 56", unit=56),
    Arm("U98", "LMCache, U = N/8", unit=98),
    Arm("U56-T4", "LMCache, U = 56, T = 4 N", unit=56, interval=4),
    Arm("U56-decode", "LMCache, U = 56, generated too", unit=56, save_decode=True, only=CHATS),
)
REFERENCES: dict[str, tuple[str, Callable[["Job"], LruReference]]] = {
    "lru": ("LRU of whole prefixes", lambda job: LruReference(job.block_size, job.capacity)),
    "marconi": ("Marconi's eviction", lambda job: MarconiReference(job.block_size, job.capacity)),
    "foresight": (
        "Foresight of what was seen before",
        lambda job: Foresight(
            job.block_size, job.capacity, (tokens(r.spans) for r in job.trace.requests)
        ),
    ),
}


@dataclass(frozen=True)
class Job:
    """One replay: an arm or a reference on a trace, with a store that may be full.

    Attributes:
        store: UNLIMITED, THIRD or RESTARTED.
        capacity: of the store, in pages; of vLLM's pool where there is no store.
        cached: pages of vLLM's own cache besides working room, where it is emptied only once;
            None where the arm says how large it is and whether it is emptied.
    """

    trace: Trace
    store: str
    capacity: int
    block_size: int
    arm: Arm | None = None
    reference: str = ""
    cached: int | None = None

    @property
    def name(self) -> str:
        return self.arm.name if self.arm else self.reference

    @property
    def title(self) -> str:
        return self.arm.title if self.arm else REFERENCES[self.reference][0]


def jobs(traces: Sequence[Trace], block_size: int) -> list[Job]:
    """All replays."""
    made = []
    for trace in traces:
        arms = [
            arm
            for arm in ARMS
            if trace.name in (arm.only or (trace.name,)) and block_size % (arm.unit or 1) == 0
        ]
        if trace.name == "one-offs":  # long, and what T and U bring is seen on the others
            arms = [arm for arm in arms if not arm.interval and not arm.unit]
        unlimited = _pages_at_most(trace, block_size)
        made += [
            Job(trace, UNLIMITED, unlimited, block_size, a) for a in arms if a.room and not a.policy
        ]
        cached = round(POOL_SHARE * _pages_of((r.spans for r in trace.requests), block_size))
        made += [
            Job(trace, RESTARTED, unlimited, block_size, arm, cached=cached)
            for arm in arms
            if arm.name in DEPLOYED
        ]
        if trace.contents:
            third = _pages_of(trace.contents, block_size) // 3
            made += [Job(trace, THIRD, third, block_size, arm) for arm in arms]
            made += [Job(trace, THIRD, third, block_size, None, name) for name in REFERENCES]
    return made


def _pages_at_most(trace: Trace, block_size: int) -> int:
    """More than any arm can fill: every block of every request with a state, and one more."""
    tokens_in_all = trace.prompt_tokens + sum(r.output.length for r in trace.requests)
    return (1 + STATE_PAGES) * (tokens_in_all // block_size + len(trace.requests) + 1)


def _pages_of(contents: Iterable[Sequence[Span]], block_size: int) -> int:
    """Each content's pages and the state at its end; what they begin with counts once."""
    store = LruReference(block_size, math.inf)
    for spans in contents:
        store.ask(tokens(spans), ())
    return store.used


def run(job: Job, advance: Callable[[], None] = lambda: None) -> dict:
    """Replay a job.

    Args:
        advance: called after each request.

    Returns:
        Its figures, in tokens and bytes, ready for JSON.
    """
    started = time.perf_counter()
    saved = held = None
    if job.arm is None:
        store = REFERENCES[job.reference][1](job)
        outcomes = []
        for request in job.trace.requests:
            prompt, output = tokens(request.spans), tokens([request.output])
            outcomes.append(Outcome(0, store.ask(prompt, output), 0))
            advance()
    else:
        with ReplayEngine(setup_of(job)) as engine:
            outcomes = replay(engine, job, advance)
            saved, held = engine.saved_pages, engine.held_pages
            assert job.store == THIRD or held == saved, "a page was evicted"
    return {
        "trace": job.trace.name,
        "store": job.store,
        "arm": job.name,
        "title": job.title,
        "capacity_pages": job.capacity,
        **_figures(job, outcomes, saved),
        "held_pages": held,
        "seconds": round(time.perf_counter() - started, 1),
    }


def setup_of(job: Job) -> Setup:
    """The deployment of an arm."""
    arm = job.arm
    # The longest request with its states: running, restored, kept, for each group.
    room = job.trace.longest // job.block_size + 4 * STATE_PAGES + 4
    if not arm.store:
        pool = room * arm.room + (job.capacity if job.cached is None else job.cached)
        return Setup(job.block_size, pool, None, BATCH, unit=arm.unit)
    beside = ROOM_BESIDE * (arm.beside and job.store == UNLIMITED)
    return Setup(
        job.block_size,
        room + (beside if job.cached is None else job.cached),
        job.capacity,
        BATCH,
        None if arm.interval is None else arm.interval * job.block_size,
        arm.save_decode,
        plain=arm.plain,
        policy=arm.policy,
        unit=arm.unit,
    )


def replay(engine: ReplayEngine, job: Job, advance: Callable[[], None]) -> list[Outcome]:
    """All requests of the trace, in order."""
    outcomes, count = [], len(job.trace.requests)
    if job.cached is not None:
        forgetful = {count // 2}
    else:
        forgetful = set(range(count)) if job.arm.store and not job.arm.beside else set()
    for number, request in enumerate(job.trace.requests):
        if number in forgetful:
            engine.forget()
        outcomes.append(engine.run(tokens(request.spans), tokens([request.output])))
        advance()
    return outcomes


@functools.lru_cache(maxsize=4)
def oracle_tokens(trace: Trace, block_size: int) -> list[int]:
    """Of each request, the tokens that an oracle with boundaries ``block_size`` apart reuses."""
    oracle = Oracle(block_size)
    return [oracle.ask(tokens(r.spans), tokens([r.output])) for r in trace.requests]


def _figures(job: Job, outcomes: Sequence[Outcome], saved: int | None) -> dict:
    best = oracle_tokens(job.trace, job.block_size)
    finest = oracle_tokens(job.trace, FINE if job.block_size % FINE == 0 else job.block_size)
    by_label: dict[str, Counter] = defaultdict(Counter)
    extra_steps = 0
    inside = job.arm is not None and job.arm.unit > 0
    for request, outcome, most, fine in zip(job.trace.requests, outcomes, best, finest):
        hit, limit = outcome.local + outcome.external, fine if inside else most
        # A unit that is no multiple of the finer oracle's may end just behind its boundary.
        assert hit < limit + (FINE if inside else 1), f"{hit} tokens reused of {limit} computed"
        by_label[request.label].update(requests=1, hit=hit, oracle=most, finest=fine)
        extra_steps += outcome.prefill_steps - math.ceil((request.prompt_length - hit) / BATCH)
    requests = len(outcomes)
    hit, most = sum(c["hit"] for c in by_label.values()), sum(best)
    figures = {
        "hit_tokens": hit,
        "local_tokens": sum(outcome.local for outcome in outcomes),
        "oracle_tokens": most,
        "share": hit / most if most else None,
        "finest_tokens": sum(finest),
        "finest_share": hit / sum(finest),
        "by_label": {
            label: {
                **counts,
                "share": counts["hit"] / counts["oracle"] if counts["oracle"] else None,
                "finest_share": counts["hit"] / counts["finest"] if counts["finest"] else None,
            }
            for label, counts in by_label.items()
            if label
        },
        "saved_pages": saved,
    }
    if job.arm is not None:
        figures["extra_steps_per_request"] = extra_steps / requests
    if saved is not None and job.arm.store:
        page = job.block_size * ATTENTION_BYTES
        figures["bytes_per_prompt_token"] = saved * page / job.trace.prompt_tokens
    return figures


def describe(trace: Trace, block_size: int) -> dict:
    """What a trace is made of, in tokens."""
    lengths = [request.prompt_length for request in trace.requests]
    return {
        "seed": trace.seed,
        "requests": len(lengths),
        "prompt_tokens": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "output_tokens": sum(request.output.length for request in trace.requests),
        "oracle_tokens": sum(oracle_tokens(trace, block_size)),
        "finest_tokens": sum(oracle_tokens(trace, FINE if block_size % FINE == 0 else block_size)),
    }
