# SPDX-License-Identifier: Apache-2.0
"""Traces: which prompts arrive in which order, and what is answered.

A prompt is a list of named spans; the tokens of a span follow from its name, so
two prompts share a prefix exactly as far as their spans are the same. An image is
a span like any other: its name is its identity, as vLLM's block hashes cover the
image's hash beside its placeholder tokens. Sizes are in tokens and do not depend on
the block size. The same arguments give the same trace, in every process.
"""

import functools
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

VOCABULARY = (0, 100_000)
# Answers where nothing depends on them: no later prompt contains them.
SHORT_ANSWER = 16


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` tokens that follow from ``name``."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its answer.

    Attributes:
        label: what its hits are counted under, besides all requests.
    """

    spans: tuple[Span, ...]
    output: Span
    label: str = ""

    @property
    def prompt_length(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival; each ends before the next one begins.

    Attributes:
        contents: the prefixes that come back, for a store that holds a share of them.
    """

    name: str
    seed: int
    requests: tuple[Request, ...]
    contents: tuple[tuple[Span, ...], ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_length for request in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return max(request.prompt_length + request.output.length for request in self.requests)


def tokens(
    spans: Sequence[Span],
    vocabulary: tuple[int, int] = VOCABULARY,
    known: Mapping[str, Sequence[int]] | None = None,
) -> list[int]:
    """The token ids of a prompt.

    Args:
        vocabulary: lowest id, and the one after the highest.
        known: tokens of spans that a real model has generated, by name.
    """
    ids: list[int] = []
    for span in spans:
        given = known.get(span.name) if known else None
        ids += _tokens(span, vocabulary) if given is None else given
    return ids


@functools.lru_cache(maxsize=2048)
def _tokens(span: Span, vocabulary: tuple[int, int]) -> tuple[int, ...]:
    seed = hashlib.blake2b(span.name.encode(), digest_size=8).digest()
    numbers = np.random.default_rng(int.from_bytes(seed, "big"))
    return tuple(numbers.integers(*vocabulary, size=span.length).tolist())


class _Draw:
    """Random sizes and orders of one trace.

    Args:
        scale: factor on all sizes in tokens.
    """

    def __init__(self, trace: str, seed: int, scale: float) -> None:
        self.random = random.Random(f"{trace}/{seed}")
        self._prefix = f"{trace}/{seed}"
        self._scale = scale

    def span(self, name: str, low: int, high: int | None = None) -> Span:
        """A span of ``low`` to ``high`` tokens, small ones as likely as large ones."""
        size = low if high is None else self.random.randint(low, high)
        return Span(f"{self._prefix}/{name}", max(1, round(size * self._scale)))

    def wide_span(self, name: str, low: int, high: int) -> Span:
        """The same with as many sizes from 2k to 4k as from 4k to 8k."""
        return self.span(name, round(math.exp(self.random.uniform(math.log(low), math.log(high)))))

    def mixed(self, sequences: Sequence[Sequence[Request]]) -> tuple[Request, ...]:
        """All requests, in a random order that keeps the order within each sequence."""
        turns = [number for number, each in enumerate(sequences) for _ in each]
        self.random.shuffle(turns)
        rest = [iter(each) for each in sequences]
        return tuple(next(rest[number]) for number in turns)


def repeat(seed: int = 0, scale: float = 1.0, prompts: int = 60, times: int = 5) -> Trace:
    """The same prompts, asked several times in random order."""
    draw = _Draw("repeat", seed, scale)
    spans = [draw.wide_span(f"prompt{i}", 2_000, 32_000) for i in range(prompts)]
    order = [i for i in range(prompts) for _ in range(times)]
    draw.random.shuffle(order)
    return Trace(
        "repeat",
        seed,
        tuple(
            Request((spans[i],), draw.span(f"answer{number}", SHORT_ANSWER))
            for number, i in enumerate(order)
        ),
    )


def chat(seed: int = 0, scale: float = 1.0, conversations: int = 24, turns: int = 10) -> Trace:
    """Conversations with one system prompt; each turn holds all turns and answers before it."""
    draw = _Draw("chat", seed, scale)
    sizes = _TurnSizes(1_500, (1_000, 6_000), (200, 1_200), (150, 700))
    return Trace("chat", seed, _conversations(draw, conversations, turns, sizes))


def short_chats(
    seed: int = 0, scale: float = 1.0, conversations: int = 75, turns: int = 4
) -> Trace:
    """The same with 200 to 1,500 tokens: most prompts are about as long as a block."""
    draw = _Draw("short chats", seed, scale)
    sizes = _TurnSizes(150, (50, 250), (30, 150), (50, 200))
    return Trace("short chats", seed, _conversations(draw, conversations, turns, sizes))


@dataclass(frozen=True)
class _TurnSizes:
    """Tokens of a conversation's parts: the system prompt's, and ranges of the others."""

    system: int
    first: tuple[int, int]
    later: tuple[int, int]
    answer: tuple[int, int]


def _conversations(
    draw: _Draw, conversations: int, turns: int, sizes: _TurnSizes
) -> tuple[Request, ...]:
    system = draw.span("system", sizes.system)
    made = []
    for i in range(conversations):
        spans, requests = (system,), []
        for turn in range(turns):
            spans += (draw.span(f"{i}/user{turn}", *(sizes.later if turn else sizes.first)),)
            answer = draw.span(f"{i}/answer{turn}", *sizes.answer)
            requests.append(Request(spans, answer, "later turns" if turn else "first turn"))
            spans += (answer,)
        made.append(requests)
    return draw.mixed(made)


def agent(seed: int = 0, scale: float = 1.0, tasks: int = 12, steps: int = 30) -> Trace:
    """Agents with one tool prompt, histories that branch, and a fixed text after the history.

    The fixed text comes after the newest step, so no prompt begins with a whole
    earlier prompt, and no answer is found again where it was generated.
    """
    draw = _Draw("agent", seed, scale)
    tools, tail = draw.span("tools", 6_000), draw.span("tail", 300)
    limit = round(30_000 * scale)
    made = []
    for i in range(tasks):
        histories = [(tools, draw.span(f"{i}/task", 200, 800))]
        requests = []
        for step in range(steps):
            # Mostly one step further, now and then back to one of the last few.
            back = 1 if draw.random.random() < 0.75 else draw.random.randint(1, 8)
            history = histories[-min(back, len(histories))]
            if sum(span.length for span in history) > limit:
                history = histories[draw.random.randrange(len(histories) // 2)]
            answer = draw.span(f"{i}/answer{step}", SHORT_ANSWER)
            requests.append(Request((*history, tail), answer))
            histories.append((*history, draw.span(f"{i}/step{step}", 250, 2_300)))
        made.append(requests)
    return Trace("agent", seed, draw.mixed(made))


def increment(seed: int = 0, scale: float = 1.0, sessions: int = 50, steps: int = 4) -> Trace:
    """Four images and a question; then the same with a fifth image before the question.

    The fifth image is another one each time. So these prompts share with the first one
    the four images, and never its end. Every session has an instruction of its own: its
    first incremental request finds pages, and no state among them.
    """
    return _images("increment", seed, scale, sessions, steps, growing=False)


def growing(seed: int = 0, scale: float = 1.0, sessions: int = 50, steps: int = 4) -> Trace:
    """Four images and a question; then the same with a fifth image inserted, then a sixth.

    The new image comes before one of the last three. So a prompt shares with the one
    before it the images up to the insertion, and never its end. Every session has an
    instruction of its own: its first incremental request finds pages, and no state
    among them.
    """
    return _images("growing", seed, scale, sessions, steps, growing=True)


def _images(name: str, seed: int, scale: float, sessions: int, steps: int, growing: bool) -> Trace:
    draw = _Draw(name, seed, scale)
    made = []
    for i in range(sessions):
        instruction, question = (
            draw.span(f"{i}/instruction", 600, 1_500),
            draw.span(f"{i}/question", 100, 300),
        )
        images = [draw.span(f"{i}/image{k}", 800, 1_600) for k in range(4)]
        requests = []
        for step in range(steps + 1):
            label = "four images" if step == 0 else "first increment" if step == 1 else "later ones"
            if step:
                new = draw.span(f"{i}/image{3 + step}", 800, 1_600)
                if growing:
                    images.insert(draw.random.randint(len(images) - 3, len(images) - 1), new)
                else:
                    images[4:] = [new]
            answer = draw.span(f"{i}/answer{step}", SHORT_ANSWER)
            requests.append(Request((instruction, *images, question), answer, label))
        made.append(requests)
    return Trace(name, seed, draw.mixed(made))


def documents(seed: int = 0, scale: float = 1.0, count: int = 60, questions: int = 360) -> Trace:
    """One instruction, then a document, then a question; documents in random order."""
    return _documents("documents", seed, scale, questions, [1.0] * count)


def popular(seed: int = 0, scale: float = 1.0, count: int = 60, questions: int = 360) -> Trace:
    """The same, with the k-th document asked about 1/k times as often as the first."""
    return _documents("popular", seed, scale, questions, [1 / (k + 1) for k in range(count)])


def one_offs(seed: int = 0, scale: float = 1.0, count: int = 60, questions: int = 360) -> Trace:
    """Those of ``popular``, among prompts that come once: 70 % of all."""
    asked, draw = popular(seed, scale, count, questions), _Draw("one-offs", seed, scale)
    others = []
    for i in range(round(questions * 0.7 / 0.3)):
        spans = draw.wide_span(f"prompt{i}", 3_000, 16_000), draw.span(f"question{i}", 30, 200)
        others.append(Request(spans, draw.span(f"answer{i}", SHORT_ANSWER), "once"))
    return Trace("one-offs", seed, draw.mixed([asked.requests, others]), asked.contents)


def _documents(
    name: str, seed: int, scale: float, questions: int, weights: Sequence[float]
) -> Trace:
    draw = _Draw(name, seed, scale)
    instruction = draw.span("instruction", 1_200)
    contents = tuple(
        (instruction, draw.wide_span(f"document{i}", 3_000, 16_000)) for i in range(len(weights))
    )
    requests = []
    for i, content in enumerate(draw.random.choices(contents, weights, k=questions)):
        question = draw.span(f"question{i}", 30, 200)
        requests.append(Request((*content, question), draw.span(f"answer{i}", SHORT_ANSWER)))
    return Trace(name, seed, tuple(requests), contents)


TRACES: dict[str, Callable[..., Trace]] = {
    "repeat": repeat,
    "chat": chat,
    "short chats": short_chats,
    "agent": agent,
    "increment": increment,
    "growing": growing,
    "documents": documents,
    "popular": popular,
    "one-offs": one_offs,
}
