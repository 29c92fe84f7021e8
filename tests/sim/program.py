# SPDX-License-Identifier: Apache-2.0
"""Random programs for the simulated engines, and how they are run."""

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from lmcache_hybrid.core.counts import CHECKS

from .asleep import MODES, sleep, wake
from .device import Device
from .engine import SimEngine
from .model import RATIO
from .offers import note_offers
from .reset import reload_weights
from .setup import Setup
from .storage import N, Pool
from .truth import VOCABULARY

# Prompts are prefixes of these; a branch leaves its trunk at some token.
TRUNKS = [random.Random(seed).choices(range(VOCABULARY), k=400) for seed in range(3)]
SALTS = ("", "", "", "tenant")
# One token of five ends a part of a session, and some requests.
STOPS = range(0, VOCABULARY, 5)
SPREAD = "states loaded beside a part of each block's tokens"


@dataclass
class Tally:
    """What happened in all programs; a simulation without hits proves nothing."""

    steps: int = 0
    steps_on_devices: int = 0
    programs: int = 0
    events: Counter = field(default_factory=Counter)


_number = st.integers(0, 1 << 16)


@st.composite
def setups(draw) -> Setup:
    attention = draw(st.sampled_from(("a", "a", "m", "aa", "am", "mm", "d", "da", "dm")))
    wide = "d" in attention
    windows = 0 if wide else draw(st.sampled_from((0, 0, 1, 2)))
    states = draw(st.integers(0 if windows else 1, 3))
    scratch = draw(st.sampled_from((0, 0, 0, 1)))
    letters = attention + "w" * windows + "s" * states + "c" * scratch
    groups = "".join(draw(st.permutations(letters)))
    drafts = draw(st.sampled_from((0, 0, 0, 1, 2)))
    runner = draw(st.sampled_from(("v1", "v2")))
    interior = draw(st.sampled_from((0, 0, 1, 2)))
    junctions = drafts > 0 and draw(st.booleans())
    ranks = draw(st.sampled_from((1, 1, 2, 3, 4)))
    # Only the ranks of one stage hold pages alike, and here each stage is one rank.
    stages = ranks > 1 and not drafts and "m" not in attention and draw(st.booleans())
    dcp = draw(st.sampled_from((1, 1, 2, 2, 3)))
    if drafts or windows or scratch or stages or (wide and len(attention) > 1):
        dcp = 1
    elif dcp > 1:
        ranks = dcp * draw(st.integers(1, 4 // dcp))
    return Setup(
        groups=groups,
        ranks=ranks,
        engines=draw(st.sampled_from((1, 1, 2))),
        blocks=2
        + states * (3 + drafts + bool(interior))
        + (len(attention) + windows + scratch) * draw(st.integers(5, 24)),
        batch=draw(st.sampled_from((N // 2, N, N + 3, 2 * N, 3 * N + 5, 8 * N))),
        seqs=draw(st.integers(1, 5)),
        # vLLM keeps hits off tokens that are not compressed yet.
        hash_size=max(RATIO * scratch, draw(st.sampled_from(UNITS[junctions]))),
        retention=draw(st.sampled_from((0, 0, None, 2 * N * dcp))),
        drafts=drafts,
        mtp=junctions or (drafts > 0 and draw(st.booleans())),
        # vLLM's V1 runner does not schedule ahead of a pipeline, and the toy one not of drafts.
        overlap=not (runner == "v1" and (stages or drafts)) and draw(st.booleans()),
        priority=draw(st.booleans()),
        load_limit=draw(st.sampled_from((0, 0, 0, 2 * N))) * dcp,
        checkpoint=draw(st.sampled_from((0, 0, N, 2 * N, 3 * N))) * (1 + wide) * dcp,
        chunk_ends=draw(st.booleans()),
        share=draw(st.booleans()),
        save_decode=draw(st.booleans()),
        window=draw(st.sampled_from((2, N, N + 1, N + 2, 2 * N, 3 * N + 3))),
        part_bytes=draw(st.sampled_from((1, 1 << 20))),
        answers=draw(st.sampled_from((0, 1, 3))),
        runner="v2 deferred" if drafts and runner == "v2" and draw(st.booleans()) else runner,
        device=draw(st.sampled_from(("",) * 15 + ("late", "random", "early"))),
        seed=draw(_number),
        interior=interior,
        junctions=junctions,
        faster=draw(st.integers(0, 3)) == 3,
        stages=stages,
        waiting=draw(st.sampled_from((0, 1, 16))),
        old_hashes=drafts > 0 and draw(st.booleans()),
        marked=draw(st.booleans()),
        dcp=dcp,
        interleave=draw(st.sampled_from((1, 2, N))),
    )


# Tokens per hash, without and with junctions inside a block.
UNITS = (N, N, N // 2, N // 4, N // 8), (N // 2, N // 4)
# Weights by repetition; the first ones are what a failing program shrinks to.
_VERBS = (
    ["step"] * 20
    + ["add"] * 8
    + ["again"] * 14
    + ["part"] * 8
    + ["fan"] * 6
    + ["drop"] * 5
    + ["keep"] * 6
    + ["wait"]
    + ["open"] * 3
    + ["load", "begin", "hold", "abort"] * 2
    + ["reset"] * 3
    + ["reset running", "clear", "reload", "reload", "lose", "lose many", "shrink", "restart"]
    + ["sleep", "flip", "header", "swap", "fail", "break", "break", "full", "unhealthy", "silent"]
)
# Operations after which a fault of an engine ends by itself.
FAULT_LASTS = 4
operations = st.tuples(st.sampled_from(_VERBS), st.integers(0, 3), _number, _number)
programs = st.tuples(setups(), st.lists(operations, min_size=20, max_size=100))


class Run:
    """One program on its engines."""

    def __init__(self, setup: Setup, tally: Tally) -> None:
        self.setup, self.tally = setup, tally
        Device.known.clear()
        self.pool = Pool()
        self.engines = [self._make_engine() for _ in range(setup.engines)]
        self._prompts: list[list[int]] = []
        self._added = 0

    def _make_engine(self) -> SimEngine:
        return note_offers(SimEngine(self.setup, self.pool))

    def play(self, operations) -> None:
        try:
            for number, (verb, which, x, y) in enumerate(operations):
                engine = self.engines[which % len(self.engines)]
                if number % FAULT_LASTS == 0:
                    engine.heal()
                getattr(self, "_" + verb.replace(" ", "_"))(engine, x, y)
            for engine in self.engines:
                engine.heal()
                engine.drain()
                engine.check_empty()
            self.pool.close()
        finally:
            for engine in self.engines:
                engine.threads.end()
            self.pool.reset()
            for engine in self.engines:
                self._count(engine)
            self.tally.programs += 1
            self.tally.events["evictions beside kept records"] += self.pool.spared

    def _count(self, engine: SimEngine) -> None:
        self.tally.steps += engine.steps
        self.tally.events.update(engine.events)
        self.tally.events["steps of pipelines"] += engine.steps * engine.setup.stages
        counts = engine.hybrid.counts
        self.tally.events.update(
            {
                "hits": counts.lookups.get("hit", 0),
                "hit tokens": counts.hit_tokens.total(),
                "hits not loaded": counts.skipped_loads.total(),
                "offers dropped": counts.dropped_offers.total(),
                "lookups that waited for others": counts.delayed_lookups,
                "shared prefills": counts.shared_prefills,
                **{f"drops {outcome}": number for outcome, number in counts.drops.items()},
                **{f"keeps {outcome}": number for outcome, number in counts.keeps.items()},
            }
        )
        self.tally.events["preempted"] += sum(
            request.num_preemptions for request in engine.requests.values()
        )
        for rank in engine.ranks:
            worker = rank.connector.worker.counts
            if rank.replicated and rank.rank > 0:
                self.tally.events["pages of another rank"] += worker.loaded_attention
            self.tally.events.update(
                {
                    "states saved": worker.saved_states,
                    "states loaded": worker.loaded_states,
                    "records rejected": sum(
                        times
                        for label, times in worker.failed_loads.items()
                        if label.split(",")[0] in CHECKS
                    ),
                    "loads given up": worker.failed_loads["slow,none"],
                    "saves skipped": worker.skipped_saves.total(),
                    "checkpoints inside a chunk": rank.checkpoints,
                    "resumed as new requests": rank.resumed,
                    SPREAD: worker.loaded_states * (engine.setup.dcp > 1),
                }
            )
        if engine.setup.device:
            self._count_device(engine)

    def _count_device(self, engine: SimEngine) -> None:
        events = Counter(engine.events)
        for rank in engine.ranks:
            events.update(rank.device.events)
            events["parts side by side"] += rank.connector.worker.loads._threads.beside
        self.tally.steps_on_devices += engine.steps
        self.tally.events.update({f"device: {name}": count for name, count in events.items()})

    # One method per verb

    def _step(self, engine: SimEngine, x: int, y: int) -> None:
        for _ in range(1 + x % 16):
            if not engine.holding:
                engine.load()
            if engine.scheduler.has_requests():
                engine.step()

    def _add(self, engine: SimEngine, x: int, y: int) -> None:
        longest = engine.setup.longest
        output = 1 + y % 20
        # Around the block boundaries, where most goes wrong.
        length = max(1, min(longest - output, (x % 16) * N + (x >> 4) % 3 - 1 + (x >> 6) % 2 * 3))
        prompt = TRUNKS[x % len(TRUNKS)][:length]
        if y & 8:
            branch = (y >> 4) % length
            prompt = prompt[:branch] + TRUNKS[(y >> 4) % len(TRUNKS)][length : 2 * length - branch]
        self._prompts.append(prompt)
        self._submit(engine, prompt, output, x, y)

    def _again(self, engine: SimEngine, x: int, y: int) -> None:
        """A prompt asked before, cut or extended."""
        if not self._prompts:
            return
        output = 1 + y % 20
        prompt = self._prompts[x % len(self._prompts)]
        cut = (y >> 4) % 6 * N if y & 8 else 0
        more = TRUNKS[0][: (x >> 8) % 20] if y & 128 else []
        prompt = (prompt[: max(1, len(prompt) - cut)] + more)[: engine.setup.longest - output]
        self._submit(engine, prompt, output, x, y)

    def _drop(self, engine: SimEngine, x: int, y: int) -> None:
        """A prompt asked before, whose records leave the store, some of them or all."""
        if not self._prompts:
            return
        output = 1 + y % 4
        prompt = self._prompts[x % len(self._prompts)][: engine.setup.longest - output]
        start = (y >> 2) % (len(prompt) + 2) if y & 2 else 0
        params = {"lmcache.drop": True, "lmcache.drop_from": start}
        self._submit(engine, prompt, output, x, y, params)

    def _keep(self, engine: SimEngine, x: int, y: int) -> None:
        """A prompt, asked before or new, that is evicted last for a while, or no longer."""
        if not self._prompts:
            return
        output = 1 + y % 4
        prompt = self._prompts[x % len(self._prompts)][: engine.setup.longest - output]
        params = {"lmcache.keep": (5, 60, 60, 0)[(y >> 4) % 4]}
        if y & 2:
            params["lmcache.keep_to"] = 1 + (y >> 6) % (len(prompt) + 1)
        self._submit(engine, prompt, output, x, y, params)

    def _wait(self, engine: SimEngine, x: int, y: int) -> None:
        """Time passes for what is kept."""
        self.pool.clock += 1 + x % 20

    def _fan(self, engine: SimEngine, x: int, y: int) -> None:
        """Prompts with one prefix arrive together."""
        output = 1 + y % 8
        shared = min((x >> 2) % 12 * N + y % 3, engine.setup.longest - output - 1)
        for number in range(2 + y % 2):
            more = TRUNKS[1][number * 90 :][: 1 + (y >> 4) % (3 * N)]
            prompt = TRUNKS[x % len(TRUNKS)][: max(0, shared)] + more
            self._submit(engine, prompt[: engine.setup.longest - output], output, x, y)

    def _submit(
        self,
        engine: SimEngine,
        prompt: list[int],
        output: int,
        x: int,
        y: int,
        params: dict | None = None,
    ) -> None:
        self._added += 1
        salt = SALTS[(x >> 12) % len(SALTS)]
        stops = STOPS if x >> 14 == 3 else ()
        priority = (y >> 10) % 3
        reads = (x + y) % 14 != 7  # of no request of shrunk.py
        engine.add(
            f"r{self._added}", prompt, output, salt, priority, stops, params=params, reads=reads
        )

    def _open(self, engine: SimEngine, x: int, y: int) -> None:
        """A session begins; its first part leaves room for others."""
        self._added += 1
        output = 1 + y % 8
        length = max(1, min(engine.setup.longest // 4, (x % 8) * N + (x >> 4) % 3 - 1))
        prompt, salt = TRUNKS[x % len(TRUNKS)][:length], SALTS[(x >> 12) % len(SALTS)]
        if length + output <= engine.setup.longest:
            name, priority = f"session{self._added}", (y >> 10) % 3
            engine.sessions.begin(name, prompt, output, salt=salt, priority=priority, stops=STOPS)

    def _part(self, engine: SimEngine, x: int, y: int) -> None:
        """A session's next part, while the last one runs or when it has ended."""
        live = engine.sessions.live
        if not live:
            return
        name = live[x % len(live)]
        self._prompts.append(list(engine.requests[name].all_token_ids))
        length, output = 1 + (x >> 4) % (2 * N), 1 + y % 8
        if engine.sessions.asked[name] + length + output <= engine.setup.longest:
            prompt = TRUNKS[(y >> 4) % len(TRUNKS)][:length]
            engine.sessions.go_on(name, prompt, output, STOPS if y >> 15 else ())

    def _load(self, engine: SimEngine, x: int, y: int) -> None:
        engine.load(x)

    def _begin(self, engine: SimEngine, x: int, y: int) -> None:
        engine.begin_load(x)

    def _hold(self, engine: SimEngine, x: int, y: int) -> None:
        engine.holding = not engine.holding

    def _abort(self, engine: SimEngine, x: int, y: int) -> None:
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        live = engine.live
        if y & 1:
            live = [r for r in live if engine.requests[r].status == loading] or live
        if live:
            engine.abort(live[x % len(live)])

    def _reset(self, engine: SimEngine, x: int, y: int) -> None:
        engine.reset_prefix_cache(False)

    def _reset_running(self, engine: SimEngine, x: int, y: int) -> None:
        engine.reset_prefix_cache(True)

    def _clear(self, engine: SimEngine, x: int, y: int) -> None:
        engine.clear_store()

    def _reload(self, engine: SimEngine, x: int, y: int) -> None:
        reload_weights(engine)

    def _sleep(self, engine: SimEngine, x: int, y: int) -> None:
        """Memory is freed and allocated anew, unless vLLM refuses."""
        if sleep(engine, MODES[x % len(MODES)]):
            wake(engine, 1 + y % 2)

    def _lose(self, engine: SimEngine, x: int, y: int) -> None:
        self.pool.lose(x)

    def _lose_many(self, engine: SimEngine, x: int, y: int) -> None:
        for i in range(y % 20):
            self.pool.lose(x + 7 * i)

    def _flip(self, engine: SimEngine, x: int, y: int) -> None:
        self.pool.damage(x, "flip")

    def _header(self, engine: SimEngine, x: int, y: int) -> None:
        self.pool.damage(x, "header")

    def _swap(self, engine: SimEngine, x: int, y: int) -> None:
        self.pool.damage(x, "swap")

    def _fail(self, engine: SimEngine, x: int, y: int) -> None:
        engine.stores[x % len(engine.stores)].failing += 1

    def _break(self, engine: SimEngine, x: int, y: int) -> None:
        """One of the next copies is refused."""
        device = engine.ranks[x % len(engine.ranks)].device
        if device is not None:
            device.breaking, device.after = 1, y % 3

    def _full(self, engine: SimEngine, x: int, y: int) -> None:
        engine.stores[x % len(engine.stores)].full = True

    def _unhealthy(self, engine: SimEngine, x: int, y: int) -> None:
        engine.views[x % len(engine.views)].healthy = False

    def _silent(self, engine: SimEngine, x: int, y: int) -> None:
        engine.silent = ("lost", "late", "unheard")[x % 3]

    def _shrink(self, engine: SimEngine, x: int, y: int) -> None:
        self.pool.shrink(16 + x % 150)

    def _restart(self, engine: SimEngine, x: int, y: int) -> None:
        """The engine is killed; a new one with an empty cache finds the store."""
        engine.kill()
        self._count(engine)
        self.engines[self.engines.index(engine)] = self._make_engine()
        self.tally.events["restarts"] += 1
