# SPDX-License-Identifier: Apache-2.0
"""The prompts of the soak run, and what a vLLM without a connector answers to them.

The last bits of pages and states depend on where the prefill that computed them was
cut, and so does every answer that later starts from them. Two ways to ask make these
bits the same whoever stored a record, so that one answer per prompt is the right one:

- ``granular``, on LFM2: every prefill is cut at every block, wherever it starts. Prompts share
  prefixes and branch off; each has a state at each of its boundaries.
- ``default``, on Qwen3-Next: vLLM's default retention, one state per prompt, and one more where
  a store that lost a part makes a prefill stop. Prefills are cut at every block here too.

That this holds for vLLM alone is seen here, before anything else runs.
"""

import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.figures import versions
from tests.e2e.engine import Answer, Engine

TOKENS = 4
# To measure what a batch changes.
BURSTS = 15
CHANCE_OF_BURST = 0.03
ENVIRONMENT = {
    # oneDNN keeps code for each shape of a batch, 1024 of them. Bursts that hit in part have ever
    # new shapes, and an engine grows by tens of MB per minute, with a connector or without.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
}
SECONDS_BETWEEN_SAMPLES = 2.0


@dataclass(frozen=True)
class Mode:
    """A way to ask.

    Attributes:
        size: N, tokens per block.
        options: of ``vllm.LLM``.
        bursts_compared: whether vLLM by itself answers in a batch as it does one at a time,
            up to rounding. On CPU it does not for LFM2: log-probabilities of the first token
            are up to 1.1 apart with independent prompts at once, in float32 too.
    """

    family: str
    size: int
    options: dict
    bursts_compared: bool


MODES = {
    "granular": Mode(
        "lfm2",
        128,
        {"max_num_batched_tokens": 128, "prefix_cache_retention_interval": None},
        bursts_compared=False,
    ),
    "default": Mode("qwen3_next", 384, {"max_num_batched_tokens": 384}, bursts_compared=True),
}


@dataclass
class Reference:
    """What is asked, and the answers.

    Attributes:
        prompts: asked one at a time and compared bit for bit.
        crowd: asked in bursts, where a batch changes last bits; shares no prefix with
            ``prompts``, because what it stores has other last bits too.
        noise: what batches changed here, without a connector: the largest difference.
        boundaries: answers from vLLM's own prefix cache that equalled the cold one.
        memory: of the engine while it is asked on and on, see :func:`memory`.
    """

    mode: Mode
    prompts: list[list[int]]
    crowd: list[list[int]]
    answers: list[Answer] = field(default_factory=list)
    crowd_answers: list[Answer] = field(default_factory=list)
    noise: float = 0.0
    boundaries: int = 0
    memory: dict = field(default_factory=dict)

    def deepest(self, ids: list[int]) -> int:
        """The deepest boundary a prompt can hit; its last token is always computed."""
        return (len(ids) - 1) // self.mode.size * self.mode.size


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(32, 127) for _ in range(length)]


def _length(rng: random.Random, size: int) -> int:
    """2 to 6 blocks, often on a boundary or one token beside it."""
    offset = rng.choice((-1, 0, 1, rng.randrange(2, size - 1)))
    return rng.randrange(2, 6) * size + offset


def make_prompts(name: str, count: int, rng: random.Random) -> Reference:
    mode, prompts = MODES[name], []
    size = mode.size
    while len(prompts) < count:
        if name == "default":
            prompts.append(_ids(rng, _length(rng, size)))
            continue
        stem = _ids(rng, 6 * size + 1)
        prompts += [stem, *(stem[: _length(rng, size)] for _ in range(2))]
        for _ in range(2):
            fork = rng.randrange(size, 4 * size)
            prompts.append(stem[:fork] + _ids(rng, rng.randrange(size, 2 * size)))
    crowd = [_ids(rng, _length(rng, size)) for _ in range(max(4, count // 6))]
    crowd += [ids[: 2 * size] + _ids(rng, size) for ids in crowd]
    return Reference(mode, prompts[:count], crowd)


def record(model: Path, name: str, count: int, seed: int, seconds: float) -> Reference:
    """Ask an engine without a connector.

    Args:
        seconds: how long to go on asking, to see how its memory grows by itself.

    Raises:
        AssertionError: vLLM by itself answers differently from its own prefix cache.
    """
    rng = random.Random(f"{seed} {name}")
    reference = make_prompts(name, count, rng)
    mode = reference.mode
    with Engine(model, env=ENVIRONMENT, **mode.options) as engine:
        assert engine.info["block_size"] == mode.size
        for ids in reference.prompts:
            engine.forget()
            cold = engine.ask(ids, TOKENS)
            reference.answers.append(cold)
            chosen = [reference.deepest(ids)]
            if name == "granular":
                ends = range(mode.size, chosen[0] + 1, mode.size)
                chosen = rng.sample(ends, min(2, len(ends)))
            for end in chosen:
                engine.forget()
                engine.ask(ids[: end + 1], 1)
                warm = engine.ask(ids, TOKENS)
                assert warm.cached == end and warm.output == cold.output, (name, len(ids), end)
                reference.boundaries += 1
        for ids in reference.crowd:
            engine.forget()
            reference.crowd_answers.append(engine.ask(ids, TOKENS))
        for _ in range(BURSTS):
            engine.forget()
            chosen = rng.sample(range(len(reference.crowd)), rng.randint(3, 8))
            answers = engine.ask_many([reference.crowd[i] for i in chosen], TOKENS)
            apart = [difference(a, reference.crowd_answers[i]) for a, i in zip(answers, chosen)]
            reference.noise = max(reference.noise, *apart)
        samples, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            engine.forget()
            if rng.random() < CHANCE_OF_BURST:
                engine.ask_many(rng.sample(reference.crowd, rng.randint(3, 8)), TOKENS)
            else:
                engine.ask(rng.choice(reference.prompts), TOKENS)
            sample(engine, samples)
        reference.memory = memory(samples, seconds)
    return reference


def sample(engine: Engine, samples: list[tuple[float, float]]) -> None:
    """Add the engine's (time, RSS in MB) to ``samples``, every other second at most."""
    if not samples or time.monotonic() - samples[-1][0] >= SECONDS_BETWEEN_SAMPLES:
        # Free memory that the heap keeps would hide what is in use.
        engine.call("trim")
        samples.append((time.monotonic(), rss(engine)))


def rss(engine: Engine) -> float:
    """Resident memory of the engine's process in MB."""
    pages = int(Path(f"/proc/{engine.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def difference(many: Answer, alone: Answer) -> float:
    """How far log-probabilities are apart, until the tokens are.

    Where a token differs, the lead that the other one had is what was made up for.
    """
    worst = 0.0
    for step, token in enumerate(alone.tokens):
        best, second = sorted(alone.logprobs[step].values())[-1:-3:-1]
        if many.tokens[step] != token:
            return max(worst, best - second)
        worst = max(worst, abs(many.logprobs[step][str(token)] - best))
    return worst


def memory(samples: list[tuple[float, float]], seconds: float) -> dict:
    """RSS of one engine's life in MB: medians of its first and last third after the warm-up."""
    result = {"seconds": round(seconds)}
    warm = samples[len(samples) // 4 :]
    third = len(warm) // 3
    if third < 5:
        return result
    first = statistics.median(size for _, size in warm[:third])
    last = statistics.median(size for _, size in warm[-third:])
    slope = statistics.linear_regression(*zip(*warm)).slope * 60
    result |= {
        "rss_start": round(samples[0][1], 1),
        "rss_first_third": round(first, 1),
        "rss_last_third": round(last, 1),
        "rss_end": round(samples[-1][1], 1),
        "growth": round(last - first, 1),
        "mb_per_minute": round(slope, 3),
        # Now and then, to see whether it levels off.
        "rss": [round(size) for _, size in samples[:: max(1, len(samples) // 24)]],
    }
    return result


def header(script: str) -> dict[str, object]:
    """What a soak's JSON file begins with: its command, the time and the releases that ran."""
    return {
        "command": " ".join(["python", "-m", f"tests.soak.{script}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "versions": {"python": platform.python_version(), **versions()},
    }
