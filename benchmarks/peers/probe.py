# SPDX-License-Identifier: Apache-2.0
"""Prompts asked one after another: are answers right, how much is hit, and what is it worth.

The reference is vLLM alone: for each prompt and each boundary the answer after a hit in vLLM's own
cache there. An answer is wrong if it has other tokens than the reference at the boundary of its own
hit, or log-probabilities that differ by more than :data:`NOISE`.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

from benchmarks.peers.servers import SETTLE_SECONDS, Engine, Peer

# What batches of several prompts differ by without any cache is below it, a wrong state above.
NOISE = 2e-3
OUTPUT, REPEATS, LATER = 8, 7, 5
LONG = 10
Prompt = list[int]
Answer = dict[str, Any]
# [prompt][boundary in blocks]
Reference = list[list[Answer]]


def prompts(size: int, seed: str) -> list[Prompt]:
    """Short ones, k N, k N and some more, and such that branch off others: inside a block, at a
    block's end, and deep in a long one. Of ``size`` tokens a block."""
    rng = random.Random(seed)

    def new(count: int) -> Prompt:
        return [rng.randrange(32, 127) for _ in range(count)]

    n = size
    first = [new(k) for k in (n - 10, n, n + 1, 2 * n, 2 * n + 1, 3 * n + 17, 5 * n + 100)]
    first.append(new(6 * n + 40))
    return [
        *first,
        first[5][: n + 5] + new(n),
        first[5][: 2 * n] + new(50),
        first[6][: 2 * n + 50] + new(2 * n),
        first[6][: 3 * n] + new(200),
        first[7][: 5 * n] + new(n + 30),
    ]


def ask(engine: Engine, prompt: Prompt, output: int = OUTPUT) -> Answer:
    """Tokens, log-probabilities, tokens hit, and seconds until all of it was there."""
    body = {"model": engine.model, "prompt": prompt, "max_tokens": output, "temperature": 0}
    body |= {"logprobs": 1, "ignore_eos": True}
    started = time.perf_counter()
    answer = engine.post("/v1/completions", body)
    seconds = time.perf_counter() - started
    (choice,) = answer["choices"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return {
        "tokens": choice["logprobs"]["tokens"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "hit": details.get("cached_tokens") or 0,
        "seconds": seconds,
    }


def reference(engine: Engine, asked: Sequence[Prompt], size: int) -> Reference:
    """Answers of vLLM alone, by prompt and by the boundary of the hit."""
    found: Reference = []
    for prompt in asked:
        answers = []
        for blocks in range((len(prompt) - 1) // size + 1):
            engine.forget(0.0)
            if blocks:
                ask(engine, prompt[: blocks * size + 1], 1)
            answer = ask(engine, prompt)
            if answer["hit"] != blocks * size:
                raise AssertionError(f"vLLM hit {answer['hit']} tokens, not {blocks * size}")
            answers.append(answer)
        found.append(answers)
    return found


def far(answer: Answer, right: Answer) -> float:
    """Largest difference of log-probabilities; infinite if tokens differ."""
    if answer["tokens"] != right["tokens"]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(answer["logprobs"], right["logprobs"], strict=True))


def judge(answers: Sequence[Answer], right: Reference, size: int) -> dict[str, Any]:
    """Count wrong answers; those of prompt i are at i, i + len(right), ..."""
    wrong: list[dict[str, Any]] = []
    exact, largest = 0, 0.0
    for index, answer in enumerate(answers):
        blocks, rest = divmod(answer["hit"], size)
        known = right[index % len(right)]
        if rest or blocks >= len(known):
            raise AssertionError(f"a hit of {answer['hit']} tokens is at no boundary of {size}")
        distance = far(answer, known[blocks])
        if distance > NOISE:
            wrong.append(
                {
                    "prompt": index % len(right),
                    "time": index // len(right),
                    "hit": blocks,
                    "as_at": [b for b, other in enumerate(known) if far(answer, other) <= NOISE],
                    "differs": None if distance == float("inf") else distance,
                }
            )
        exact += distance == 0
        if distance != float("inf"):
            largest = max(largest, distance)
    return {
        "answers": len(answers),
        "wrong": len(wrong),
        "exact": exact,
        "largest": largest,
        "which": wrong,
    }


def answers_of(peer: Peer, asked: Sequence[Prompt], right: Reference, size: int) -> dict[str, Any]:
    """Ask all prompts, then twice with vLLM's own cache emptied before each, then 4 at a time.

    Of vLLM alone not twice: it would only compute them.
    """
    engine = peer.engine
    engine.forget()
    first = [ask(engine, prompt) for prompt in asked]
    again: list[Answer] = []
    for _ in range(2 if peer.arm.connector else 0):
        for prompt in asked:
            engine.forget(0.3 if again else SETTLE_SECONDS)
            again.append(ask(engine, prompt))
    engine.forget()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: ask(engine, prompt), asked))
    possible = sum((len(prompt) - 1) // size * size for prompt in asked)
    return {
        "one_at_a_time": judge([*first, *again], right, size),
        "four_at_a_time": judge(together, right, size),
        "hit_share": sum(answer["hit"] for answer in again) / (2 * possible) if again else None,
        "hits": [answer["hit"] // size for answer in again],
        "possible": [(len(prompt) - 1) // size for prompt in asked],
    }


def first_token(peer: Peer, prompt: Prompt) -> dict[str, Any]:
    """Milliseconds to the first token: computed, after vLLM's own hit, and after the store's."""
    engine = peer.engine
    cold = ask(engine, prompt, 1)
    own = [ask(engine, prompt, 1) for _ in range(REPEATS)]
    stored = []
    for _ in range(REPEATS if peer.arm.connector else 0):
        engine.forget(0.3)
        stored.append(ask(engine, prompt, 1))
    return {
        "cold_ms": 1000 * cold["seconds"],
        "own_ms": [1000 * each["seconds"] for each in own],
        "own_hit": own[-1]["hit"],
        "stored_ms": [1000 * each["seconds"] for each in stored],
        "stored_hits": [each["hit"] for each in stored],
    }


def from_store(engine: Engine, asked: Sequence[Prompt]) -> dict[str, Any]:
    """Milliseconds to the first token of each prompt when only the store has it, then from vLLM.

    The first prompt warms up and is in none of the figures. What a hit leaves to be done in the
    background (the copy into a RAM tier) is over before vLLM's own hits are asked.
    """
    stored = [ask(engine, prompt, 1) for prompt in asked][1:]
    time.sleep(SETTLE_SECONDS)
    before = engine.counts()["external_hit_tokens"]
    own = [ask(engine, prompt, 1) for prompt in asked][1:]
    loaded = engine.counts()["external_hit_tokens"] - before
    if loaded:
        raise AssertionError(f"{loaded:.0f} tokens of vLLM's own hits came from the store")
    return {
        "own_ms": [1000 * each["seconds"] for each in own],
        "stored_ms": [1000 * each["seconds"] for each in stored],
        "stored_hits": [each["hit"] for each in stored],
    }


def later(engine: Engine, asked: Sequence[Prompt]) -> dict[str, Any]:
    """The tokens hit when each is asked for the first time after a restart."""
    return {"hits": [ask(engine, prompt, 1)["hit"] for prompt in asked]}


def damaged(peer: Peer, asked: Sequence[Prompt], right: Reference, size: int) -> dict[str, Any]:
    """Change every stored record, then ask what was stored."""
    outcomes = {"wrong": 0, "right": 0, "computed": 0, "error": 0}
    records = peer.damage()
    lines: list[str] = []
    for prompt, known in zip(asked, right, strict=True):
        try:
            answer = ask(peer.engine, prompt)
        except HTTPError as error:
            outcomes["error"] += 1
            lines.append(f"{error}: {error.read().decode(errors='replace')[:300]}")
            continue
        except OSError as error:  # the engine is gone
            outcomes["error"] += 1
            lines.append(f"{type(error).__name__}: {error}")
            continue
        if answer["hit"] == 0 and far(answer, known[0]) <= NOISE:
            outcomes["computed"] += 1
        elif far(answer, known[answer["hit"] // size]) <= NOISE:
            outcomes["right"] += 1
        else:
            outcomes["wrong"] += 1
    return {"records": records, **outcomes, "errors": lines}
