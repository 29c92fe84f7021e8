# SPDX-License-Identifier: Apache-2.0
"""The prompts every family is asked, and the order in which they are asked."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A prompt that is asked after another one was stored.

    Attributes:
        stored: asked first; its blocks and boundary are what the store holds.
        asked: asked then, on a cold engine with a warm store.
    """

    name: str
    stored: tuple[int, ...]
    asked: tuple[int, ...]


def _ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(32, 127) for _ in range(length))


def cases(block_size: int, seed: int = 0) -> list[Case]:
    """Repeated, extended and shortened prompts for a block size of N tokens.

    Every case has tokens of its own, so what it hits does not depend on the others.
    """
    rng = random.Random(seed)
    made: list[Case] = []

    def repeat(name: str, length: int) -> None:
        ids = _ids(rng, length)
        made.append(Case(name, ids, ids))

    # The last one is longer than a step of :class:`engine.Engine`.
    for shortest, longest in ((500, 1000), (1000, 1500), (2049, 2500)):
        length = rng.randrange(shortest, longest)
        repeat(f"random-{length}", length)
    for offset in (-1, 0, 1):
        repeat(f"2N{offset:+d}", 2 * block_size + offset)
    repeat("3N", 3 * block_size)
    for extra in (1, block_size, 700):
        ids = _ids(rng, 2 * block_size + 57)
        made.append(Case(f"extended+{extra}", ids, ids + _ids(rng, extra)))
    return made


def shortened(block_size: int, seed: int = 1) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A long prompt, and its prefixes cut one token past each interior boundary."""
    ids = _ids(random.Random(seed), 3 * block_size + 10)
    ends = range(block_size, len(ids), block_size)
    return ids, [ids[: end + 1] for end in ends]


def v2_cases(block_size: int, seed: int = 2) -> list[Case]:
    """Few and short: before, at and after a multiple of N, past two, and one that grows."""
    rng = random.Random(seed)
    lengths = (block_size - 1, block_size + 1, 2 * block_size, 2 * block_size + 57)
    made = [Case(str(length), *[_ids(rng, length)] * 2) for length in lengths]
    ids = _ids(rng, block_size + 57)
    return [*made, Case("extended", ids, ids + _ids(rng, block_size))]


def prompt(seed: int | str, length: int) -> list[int]:
    """Tokens that no prompt of another seed begins with."""
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(length)]
