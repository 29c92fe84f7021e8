# SPDX-License-Identifier: Apache-2.0
"""Makes the prompts: around multiples of N, longer ones, a branch, a chat, a batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

ANSWER_TOKENS = 8
# On a CPU a long prompt takes minutes.
LONGEST = {"cpu": 4096}
LONGEST_ELSEWHERE = 16_384

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Prompts that belong together; a case has no token sequence in common with another.

    Attributes:
        name: as it is reported, N for the block size.
        kind: ``repeat`` (one prompt twice), ``series`` (prompts that extend or leave each
            other), ``chat`` (each step is appended to the prompt and answer before it) or
            ``batch`` (asked at once).
        steps: token ids.
    """

    name: str
    kind: str
    steps: tuple[Ids, ...]


@dataclass(frozen=True)
class Limits:
    """Limits on an engine's prompts.

    Attributes:
        block: N, tokens.
        longest: max tokens of a prompt and its answer together.
        together: max tokens of all prompts of a case, which must be kept at once.
        unit: U, tokens between two boundaries inside a block; 0 for none.
    """

    block: int
    longest: int
    together: int
    unit: int = 0


@dataclass(frozen=True)
class Plan:
    """The cases to ask.

    Attributes:
        left_out: names of cases that exceed the limits.
    """

    cases: tuple[Case, ...]
    left_out: tuple[str, ...]


def chunk_of(facts: dict) -> int:
    """Return the tokens between two chunk ends that leave a state, 0 if none does."""
    block, budget = facts["chunk_unit"], facts["chunk_budget"]
    return max(1, budget // block) * block if budget else 0


def limits_of(facts: dict, longest: int = 0) -> Limits:
    """Compute the limits from the engine's context, KV cache and LMCache's pool.

    Uses half of the KV cache and of the pool: a case's prompts must still be there when they are
    asked again.

    Args:
        facts: of :meth:`lmcache_hybrid.tools.accept.child.Child.start`.
        longest: the user's choice in tokens, 0 for none; four blocks at least.
    """
    block = facts["block_size"]
    usable = facts["num_blocks"] // 2 - 4 * facts["groups"]["state"]
    pool = facts["pool_bytes"] // 2 - 3 * facts["state_bytes"]
    # States that a long prefill leaves, per block; vLLM does not keep those of chunk ends.
    kept = block / facts["checkpoint_tokens"] if facts["checkpoint_tokens"] else 0
    stored = kept + (block / chunk_of(facts) if chunk_of(facts) else 0)
    blocks = usable / (facts["paged_blocks"] + kept * facts["groups"]["state"])
    records = pool / (facts["block_bytes"] + stored * facts["state_bytes"])
    room = max(0, int(min(blocks, records))) * block
    wanted = max(longest or LONGEST.get(facts["device_type"], LONGEST_ELSEWHERE), 4 * block)
    return Limits(block, min(wanted, facts["max_model_len"], room), room, facts["unit"])


def plan_prompts(limits: Limits, ordinary: Sequence[int], quick: bool = False) -> Plan:
    """Make all prompts, the same for the same arguments.

    Args:
        ordinary: token ids to draw from, none of them special.
        quick: two short cases only.
    """
    draw = _Draw(ordinary)
    n, half = limits.block, limits.block // 2
    cases = [_repeat(draw, "N+1", n + 1), _repeat(draw, "2N", 2 * n)]
    if not quick:
        cases = [
            _repeat(draw, "N", n),
            _repeat(draw, "N+1", n + 1),
            _repeat(draw, "2N-1", 2 * n - 1),
            _repeat(draw, "2N", 2 * n),
            _repeat(draw, "2N+1", 2 * n + 1),
            _extended(draw, n, half),
            _branch(draw, n, half),
            Case("chat", "chat", (draw(n + half), draw(half), draw(half + 3))),
        ]
        lengths = (2 * n + 1, 2 * n + half, n + half + 7, 2 * n + n // 3)
        cases.append(Case("batch", "batch", tuple(draw(length) for length in lengths)))
        longest = limits.longest - ANSWER_TOKENS
        if longest > 3 * n + half:
            cases.append(_repeat(draw, "longest", longest))
    if limits.unit:
        cases.append(_repeat(draw, "U+1", limits.unit + 1))
        cases.append(_repeat(draw, "N/2", n // 2))
    kept = [case for case in cases if _fits(case, limits)]
    return Plan(tuple(kept), tuple(case.name for case in cases if case not in kept))


def length_of(case: Case) -> int:
    """Return the tokens of the case's longest prompt, answers in a chat included."""
    if case.kind == "chat":
        return sum(map(len, case.steps)) + ANSWER_TOKENS * (len(case.steps) - 1)
    return max(map(len, case.steps))


def other_prefix(prompt: Sequence[int], boundary: int, ordinary: Sequence[int]) -> Ids:
    """Replace the tokens before ``boundary``, as a wrong hit would."""
    draw = _Draw(ordinary, seed=len(prompt))
    return draw(boundary) + tuple(prompt[boundary:])


def _fits(case: Case, limits: Limits) -> bool:
    kept = sum(len(prompt) + ANSWER_TOKENS for prompt in set(case.steps))
    return length_of(case) + ANSWER_TOKENS <= limits.longest and kept <= limits.together


class _Draw:
    """Draws random token IDs, the same ones every time."""

    def __init__(self, ordinary: Sequence[int], seed: int = 0) -> None:
        self._ordinary, self._random = ordinary, random.Random(seed)

    def __call__(self, length: int) -> Ids:
        return tuple(self._random.choices(self._ordinary, k=length))


def _repeat(draw: _Draw, name: str, length: int) -> Case:
    ids = draw(length)
    return Case(name, "repeat", (ids, ids))


def _extended(draw: _Draw, n: int, half: int) -> Case:
    """Make a prompt that goes on past the next boundary, and starts there when asked again."""
    first = draw(n + half + 1)
    longer = first + draw(n)
    return Case("extended", "series", (first, longer, longer))


def _branch(draw: _Draw, n: int, half: int) -> Case:
    """Make two prompts that branch off a third one in its middle, where no prompt ended."""
    trunk = draw(3 * n + half)
    shared = trunk[: 2 * n + half // 2]
    first, second = shared + draw(n), shared + draw(n)
    return Case("branch", "series", (trunk, first, second, second))
