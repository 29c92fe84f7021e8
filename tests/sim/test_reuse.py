# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are reused: one request after the other on simulated engines.

Exact figures, because vLLM's scheduler decides here as it does on a real engine;
the simulation checks every byte on the way.
"""

import dataclasses

import pytest
from vllm.v1.request import RequestStatus

from lmcache_hybrid.core.keys import ATTENTION, STATE
from lmcache_hybrid.protocol.hit_records import record_keys
from lmcache_hybrid.protocol.prefix import Prefix

from .engine import SimEngine
from .program import TRUNKS
from .setup import Setup
from .storage import N, Pool

A, B, C = TRUNKS


@pytest.fixture
def pool():
    with_pool = Pool()
    yield with_pool
    with_pool.reset()


class Story:
    """One engine, asked one prompt at a time."""

    def __init__(self, pool: Pool, **setup) -> None:
        self.engine = SimEngine(Setup(**{"blocks": 120, "batch": 200, **setup}), pool)
        self.asked = 0

    def ask(self, prompt: list[int], output: int = 1, forget: bool = True) -> tuple[int, int]:
        """(tokens from the store, tokens from vLLM's own cache).

        Args:
            forget: empty vLLM's own cache before.
        """
        engine = self.engine
        if forget:
            engine.reset_prefix_cache(False)
        self.asked += 1
        engine.add(name := f"q{self.asked}", prompt, output)
        stats = engine.requests[name].prefill_stats
        engine.drain()
        assert engine.requests[name].status == RequestStatus.FINISHED_LENGTH_CAPPED
        return stats.num_external_cached_tokens, stats.num_local_cached_tokens

    def answer(self, prompt: list[int]) -> list[int]:
        """What was generated for the latest prompt."""
        return list(self.engine.requests[f"q{self.asked}"].output_token_ids)

    def lose(self, group: int, block: int, kind: int = ATTENTION) -> None:
        """Evict one record of the latest prompt."""
        engine = self.engine
        hashes = engine.requests[f"q{self.asked}"].block_hashes
        prefix = Prefix(tuple(bytes(h) for h in hashes))
        (key,) = record_keys(prefix, block, N, kind, (group,))
        assert engine.stores[0].manager.local_cpu_backend.remove(engine.stores[0].engine_key(key))

    @property
    def loads(self) -> int:
        return self.engine.events["loads"]


def test_where_requests_branch_a_state_is_left(pool):
    story = Story(pool)
    story.ask(A[: 10 * N + 3])
    # No state lies within what both share: the second computes all, and leaves one there.
    assert story.ask(A[: 6 * N] + B[: 4 * N]) == (0, 0)
    assert story.ask(A[: 6 * N] + C[: 4 * N]) == (6 * N, 0)


def test_a_junction_in_the_middle_of_a_block(pool):
    story = Story(pool)
    story.ask(A[: 10 * N])
    story.ask(A[: 5 * N + 3] + B[: 4 * N])
    assert story.ask(A[: 5 * N + 5] + C[: 4 * N]) == (5 * N, 0)


def test_a_junction_costs_one_step(pool):
    story = Story(pool)
    story.ask(A[: 10 * N + 3])
    first = story.engine.steps
    story.ask(B[: 10 * N + 3])
    without = story.engine.steps - first
    story.ask(A[: 6 * N] + C[: 4 * N + 3])
    assert story.engine.steps - first - without == without + 1


def test_a_junction_past_a_hit(pool):
    story = Story(pool)
    story.ask(A[: 4 * N + 1])
    story.ask(A[: 10 * N])  # hits at 4, leaves a state at 9
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (4 * N, 0)
    assert story.ask(A[: 7 * N] + C[: 3 * N]) == (7 * N, 0)


def test_another_engine_on_the_same_store_hits_the_junction(pool):
    one, other, third = (Story(pool) for _ in range(3))
    one.ask(A[: 10 * N])
    other.ask(A[: 6 * N] + B[: 4 * N])
    assert third.ask(A[: 6 * N] + C[: 4 * N]) == (6 * N, 0)


def test_no_state_is_left_by_a_request_that_may_not_store(pool):
    story = Story(pool)
    story.ask(A[: 10 * N])
    arrivals = story.engine.hybrid._arrivals
    arrivals._options = dataclasses.replace(arrivals._options, save=False)
    story.ask(A[: 6 * N] + B[: 4 * N])
    assert story.ask(A[: 6 * N] + C[: 4 * N]) == (0, 0)


@pytest.mark.parametrize("batch", [2 * N, 3 * N, 200])
def test_checkpoints_serve_the_first_branch(pool, batch):
    story = Story(pool, checkpoint=3 * N, batch=batch)
    story.ask(A[: 11 * N])
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (6 * N, 0)


def test_checkpoints_after_a_hit_off_their_grid(pool):
    story = Story(pool, checkpoint=3 * N)
    story.ask(A[: 4 * N + 1])
    assert story.ask(A[: 11 * N]) == (4 * N, 0)
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (6 * N, 0)


@pytest.mark.parametrize("groups", ["sa", "ssa", "asw", "aw", "as"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_first_branch_hits_where_a_chunk_ended(pool, groups, overlap, runner):
    shape = {"groups": groups, "window": 2 * N + 1, "overlap": overlap, "runner": runner}
    story = Story(pool, chunk_ends=True, batch=3 * N + 2, **shape)
    story.ask(A[: 11 * N])
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (6 * N, 0)


def test_ends_of_chunks_are_stored_where_the_pages_are_already(pool):
    story = Story(pool, chunk_ends=True, batch=3 * N)
    story.ask(A[: 10 * N])
    for boundary in (3, 6, 9):
        story.lose(0, boundary - 1, STATE)
    assert story.ask(A[: 10 * N]) == (0, 0)
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (6 * N, 0)


def test_ends_of_chunks_cost_no_step(pool):
    steps = []
    for chunk_ends, prompt in ((False, A), (True, B)):
        story = Story(pool, chunk_ends=chunk_ends, batch=3 * N)
        story.ask(prompt[: 11 * N + 3])
        steps.append(story.engine.steps)
    assert steps[0] == steps[1]


def test_without_checkpoints_the_first_branch_is_computed(pool):
    story = Story(pool)
    story.ask(A[: 11 * N])
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (0, 0)


@pytest.mark.parametrize("save_decode", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [5 * N + 2, 5 * N, N // 2])
def test_the_next_turn_contains_the_answer(pool, save_decode, overlap, prompt):
    story = Story(pool, save_decode=save_decode, overlap=overlap)
    first = A[:prompt]
    story.ask(first, output=3 * N)
    turn = first + story.answer(first) + B[:5]
    stored = (prompt + 3 * N - 1) // N * N if save_decode else (prompt - 1) // N * N
    assert story.ask(turn) == (stored, 0)


@pytest.mark.parametrize("drafts", [1, 2])
def test_the_next_turn_contains_an_answer_with_drafts(pool, drafts):
    story = Story(pool, save_decode=True, drafts=drafts)
    first = A[: 5 * N + 2]
    story.ask(first, output=3 * N)
    external, _ = story.ask(first + story.answer(first) + B[:5])
    assert external >= 7 * N


def test_the_third_turn_loads_nothing(pool):
    story = Story(pool)
    story.ask(A[: 6 * N + 1])
    turn = A[: 6 * N] + B[: 5 * N]
    assert story.ask(turn) == (6 * N, 0)
    loads = story.loads
    # In the middle of a prompt, and at its last boundary.
    assert story.ask(A[: 6 * N] + C[: 5 * N], forget=False) == (0, 6 * N)
    assert story.ask(turn, forget=False) == (0, 10 * N)
    assert story.loads == loads


@pytest.mark.parametrize("groups", ["sa", "ssa", "asw"])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("forget", [True, False])
def test_a_repeated_prompt_of_whole_blocks_is_saved_once(pool, groups, blocks, forget):
    """vLLM also hands off the state behind its last token, where no hit of it can end."""
    story = Story(pool, groups=groups, window=2 * N + 1, retention=None)
    prompt = A[: blocks * N]
    story.ask(prompt)
    for _ in range(2):
        assert sum(story.ask(prompt, forget=forget)) == (blocks - 1) * N
    assert not story.engine.stores[0].rewritten_bytes
    assert story.ask([*prompt, 1]) == (blocks * N, 0)  # the state is there


def test_only_what_is_missing_is_loaded(pool):
    story = Story(pool)
    story.ask(A[: 10 * N + 1])
    story.engine.reset_prefix_cache(False)
    other = Story(pool)
    other.ask(B[: N + 1])
    worker = other.engine.ranks[0].connector.worker.counts
    other.ask(A[: 4 * N + 1])  # computed: no state at 4
    assert other.ask(A[: 10 * N + 1], forget=False) == (6 * N, 4 * N)
    assert worker.loaded_attention == 6 and worker.loaded_states == 1


@pytest.mark.parametrize("groups", ["aw", "waw", "asw"])
def test_windows_are_stored_at_boundaries_only(pool, groups):
    """Of a window group a hit needs the last pages before B, so only these are stored."""
    story = Story(pool, groups=groups, window=2 * N + 1)
    story.ask(A[: 10 * N + 3])
    windows = {window.group for window in story.engine.plan.windows}
    stored = [key for key, _ in pool.records if _group(key) in windows]
    assert len(stored) == 2 * len(windows)
    worker = story.engine.ranks[0].connector.worker.counts
    assert story.ask(A[: 10 * N + 3]) == (10 * N, 0)
    states = groups.count("s")
    assert worker.loaded_bytes == (10 + 2 * len(windows)) * N * 8 + states * 16


def test_a_window_smaller_than_a_token_needs_nothing_but_full_attention(pool):
    story = Story(pool, groups="aw", window=1)
    story.ask(A[: 10 * N + 3])
    assert story.ask(A[: 10 * N + 3]) == (10 * N, 0)


@pytest.mark.parametrize("lost", [8, 9])
def test_no_hit_without_the_whole_window(pool, lost):
    story = Story(pool, groups="aw", window=2 * N + 1)
    story.ask(A[: 4 * N + 1])
    story.ask(A[: 10 * N + 3])
    story.lose(group=1, block=lost)
    assert story.ask(A[: 10 * N + 3]) == (4 * N, 0)


def test_window_models_leave_their_windows_where_requests_branch(pool):
    story = Story(pool, groups="aw", window=2 * N + 1)
    story.ask(A[: 10 * N + 3])
    assert story.ask(A[: 6 * N] + B[: 4 * N]) == (0, 0)
    assert story.ask(A[: 6 * N] + C[: 4 * N]) == (6 * N, 0)


@pytest.mark.parametrize("batch", [2 * N, 200])
def test_checkpoints_of_window_models(pool, batch):
    story = Story(pool, groups="aw", window=2 * N + 1, checkpoint=3 * N, batch=batch)
    story.ask(A[: 11 * N])
    assert story.ask(A[: 7 * N] + B[: 3 * N]) == (6 * N, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("groups", ["aw", "asw"])
def test_the_next_turn_of_window_models(pool, groups, overlap):
    story = Story(pool, groups=groups, window=2 * N + 1, save_decode=True, overlap=overlap)
    first = A[: 5 * N + 2]
    story.ask(first, output=3 * N)
    turn = first + story.answer(first) + B[:5]
    assert story.ask(turn) == (8 * N, 0)


def test_windows_that_reach_into_what_is_cached_locally(pool):
    story = Story(pool, groups="aw", window=4 * N)
    story.ask(A[: 10 * N + 1])
    worker = story.engine.ranks[0].connector.worker.counts
    story.ask(A[: 8 * N + 1])
    before = worker.loaded_bytes
    assert story.ask(A[: 10 * N + 1], forget=False) == (2 * N, 8 * N)
    assert worker.loaded_bytes - before == 2 * 2 * N * 8


def _group(key) -> int:
    """Group index in an LMCache key's tag."""
    (tag,) = (value for name, value in key.tags if name == "hybrid")
    return int("".join(filter(str.isdigit, tag.split("-")[0])))


# What is evicted first. LMCache evicts single records; a hit needs all of a prefix.


def test_a_full_store_gives_up_tails_before_beginnings(pool):
    """The end of an old prompt goes first, and the part that others share stays."""
    story = Story(pool)
    story.ask(A[: 6 * N])
    story.ask(A[: 6 * N] + B[: 4 * N])  # leaves a state where they part
    pool.shrink(20)
    for start in range(0, 240, 40):
        assert story.ask(A[: 6 * N] + C[start : start + 3 * N])[0] == 6 * N
    assert story.ask(A[: 6 * N] + B[: 4 * N]) == (6 * N, 0)


def test_what_is_hit_locally_stays_in_the_store(pool):
    pool.shrink(24)
    story = Story(pool)
    shared = A[: 6 * N + 1]
    story.ask(shared)
    for start in range(0, 200, 40):
        story.ask(B[start : start + 3 * N], forget=False)
        assert story.ask(shared, forget=False) == (0, 6 * N)
    assert story.ask(shared) == (6 * N, 0)


def test_a_state_that_nobody_uses_ages_out(pool):
    pool.shrink(30)
    story = Story(pool)
    story.ask(A[: 6 * N + 1])
    story.ask(A[: 3 * N] + B[: 3 * N])  # leaves a state at 3
    for start in range(0, 380, 20):
        assert story.ask(A[: 3 * N] + C[start : start + 2 * N])[0] == 3 * N
    assert story.ask(A[: 6 * N + 1]) == (3 * N, 0)


def test_a_prompt_gives_up_its_end_before_its_beginning(pool):
    story = Story(pool)
    story.ask(A[: 4 * N + 1])
    story.ask(A[: 10 * N + 1])
    assert len(pool.records) == 12  # ten pages, the states at 4 and at 10
    pool.shrink(12)
    story.ask(B[: 5 * N + 1])  # takes the room of six
    assert story.ask(A[: 10 * N + 1]) == (4 * N, 0)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_beside_mtp_a_prompt_gives_up_its_end_before_its_beginning(pool, runner):
    """Its last state lies a block earlier, and is worth as much."""
    story = Story(pool, drafts=1, mtp=True, runner=runner, old_hashes=True)
    story.ask(A[: 4 * N + 1])
    story.ask(A[: 10 * N + 1])
    assert len(pool.records) == 13  # ten pages, the states at 3, at 4, to where both go, and at 9
    pool.shrink(13)
    story.ask(B[: 5 * N + 1])  # takes the room of six
    assert story.ask(A[: 10 * N + 1]) == (4 * N, 0)


@pytest.mark.parametrize("tokens, mtp", [(6 * N, False), (6 * N, True), (6 * N + 1, True)])
def test_a_page_behind_the_last_state_is_given_up_first(pool, tokens, mtp):
    """It comes in a step of its own, after the state."""
    story = Story(pool, drafts=1, mtp=mtp, old_hashes=True)
    story.ask(A[:tokens])
    assert len(pool.records) == 7  # six pages and the state at 5
    pool.shrink(7)
    story.ask(B[:N])  # takes the room of one
    assert story.ask(A[:tokens]) == (5 * N, 0)
