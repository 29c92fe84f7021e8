# SPDX-License-Identifier: Apache-2.0
"""Makes the rounds of prompts, as token IDs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = list[int]
# Every tokenizer has these IDs, and their meaning does not matter.
LOWEST, HIGHEST = 32, 126
QUESTION_TOKENS = 48
# The round in which nothing can hit.
NEW = "new documents"
# Parts of a conversation; it grows by one in each turn.
TURNS = 3


@dataclass(frozen=True)
class Round:
    """Prompts that are asked together.

    Attributes:
        title: as the table shows it.
        prompts: token IDs.
        forget: reset vLLM's own cache first, as if other prompts had evicted all.
        restart: ask a restarted server.
        measured: whether it is in the table; others only prepare.
    """

    title: str
    prompts: Sequence[Prompt]
    forget: bool = False
    restart: bool = False
    measured: bool = True


def rounds(documents: int, tokens: int, seed: int) -> list[Round]:
    """Make all rounds, in order.

    Args:
        documents: number of documents, and of conversations.
        tokens: of a document with its question, and of a conversation's last turn.
        seed: each seed makes other prompts.
    """
    draw = random.Random(seed)

    def some(count: int) -> Prompt:
        return [draw.randint(LOWEST, HIGHEST) for _ in range(count)]

    texts = [some(tokens - QUESTION_TOKENS) for _ in range(documents)]

    def asked() -> list[Prompt]:
        return [text + some(QUESTION_TOKENS) for text in texts]

    first = asked()
    talks = [some(tokens) for _ in range(documents)]
    turns = [[talk[: tokens * turn // TURNS] for talk in talks] for turn in range(1, TURNS + 1)]
    return [
        Round("warm up", [some(tokens)], measured=False),
        Round(NEW, first),
        Round("the same prompts at once", first),
        Round("the same prompts after others", first, forget=True),
        Round("another question to each document", asked(), forget=True),
        *(Round(f"turn {turn}", turns[turn - 1], True, measured=False) for turn in range(1, TURNS)),
        Round("the next turn of a conversation", turns[-1], forget=True),
        Round("documents after a restart", asked(), restart=True),
    ]
