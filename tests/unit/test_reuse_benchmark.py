# SPDX-License-Identifier: Apache-2.0
"""The reuse benchmark counts right: its traces, its references, its replay."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.figures import page_of, replace
from benchmarks.reuse import replay, report, traces
from benchmarks.reuse.engine import ReplayEngine, Setup
from benchmarks.reuse.reference import (
    Foresight,
    LruReference,
    MarconiReference,
    Oracle,
    chain_of,
)
from benchmarks.reuse.traces import Span, tokens
from lmcache_hybrid.config.own_options import CHUNK_ENDS

N = 16
A, B, C, D, E = (Span(name, length) for name, length in zip("ABCDE", (20, 30, 30, 30, 30)))


@pytest.mark.parametrize("make", traces.TRACES.values(), ids=traces.TRACES)
def test_a_trace_is_the_same_for_a_seed(make) -> None:
    assert make(seed=3) == make(seed=3) != make(seed=4)
    lengths = [request.prompt_length for request in make().requests]
    assert len(lengths) >= 200
    short = make is traces.short_chats
    assert (200 if short else 2_000) <= min(lengths)
    assert max(lengths) <= (1_500 if short else 32_768)


def test_the_page_of_figures_lies_above_their_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert page_of(Path("docs/generated/reuse.json")) == tmp_path / "docs/reuse.md"


def test_tokens_follow_from_the_name() -> None:
    assert tokens([A]) == tokens([Span("A", 20)]) != tokens([Span("Z", 20)])
    assert tokens([A, B], known={"A": [1, 2]}) == [1, 2, *tokens([B])]
    assert all(32 <= token < 127 for token in tokens([A, B, C], (32, 127)))


def test_increments_share_four_images_and_nothing_behind_them() -> None:
    first, *others = traces.increment(sessions=1).requests
    assert len(first.spans) == 6 and len({request.spans[5] for request in others}) == 4
    for request in others:
        assert request.spans[:5] + request.spans[6:] == first.spans


def test_a_growing_prompt_shares_up_to_the_insertion_only() -> None:
    trace = traces.growing(sessions=1)
    for before, after in zip(trace.requests, trace.requests[1:]):
        place = next(i for i, (x, y) in enumerate(zip(before.spans, after.spans)) if x != y)
        assert after.spans[:place] + after.spans[place + 1 :] == before.spans
        assert len(before.spans) - place in (2, 3, 4)  # one to three images and the question


def test_the_oracle_counts_whole_blocks_below_the_last_token() -> None:
    oracle = Oracle(block_size=4)
    assert oracle.ask(list(range(10)), [50, 51, 52]) == 0  # computed: 12 tokens
    assert oracle.ask(list(range(10)), [60]) == 8
    assert oracle.ask(list(range(8)), [60]) == 4  # 8 would leave no token to compute
    assert oracle.ask([*range(10), 50, 51, 7], [60]) == 12  # a generated block
    assert oracle.ask([*range(10), 50, 51, 7, 60, 8, 8], [60]) == 12  # 60 was never read
    assert oracle.ask([0, 1, 2, 3, 9, 9, 9, 9, 9], [60]) == 4


def test_lru_drops_a_state_together_with_the_pages_nobody_else_needs() -> None:
    a, b, c = ([i] * 4 + [i + 10] * 4 + [99] for i in range(3))  # two blocks each
    store = LruReference(4, capacity=2 * (2 + 3))
    assert [store.ask(prompt, ()) for prompt in (a, b, a)] == [0, 0, 8]
    assert store.ask(c, ()) == 0  # b goes
    assert store.used == 10
    assert [store.ask(prompt, ()) for prompt in (a, c)] == [8, 8]
    assert store.ask(b, ()) == 0


def test_lru_keeps_a_state_where_prompts_branch_off() -> None:
    store = LruReference(4, capacity=100)
    prompts = [[0] * 4 + [i] * 8 + [99] for i in range(1, 4)]
    assert [store.ask(prompt, ()) for prompt in prompts] == [0, 0, 4]
    assert store.used == 1 + 3 * 2 + 3 * 4


def test_marconi_drops_what_saves_few_flops_per_byte() -> None:
    long, short = [1] * 400 + [99], [2] * 4 + [99]
    store = MarconiReference(4, capacity=100 + 3 + 2 * (1 + 3))
    # The long one is the oldest; of the short ones the older goes.
    asked = [long, short, [3] * 4 + [99], [4] * 4 + [99]]
    assert [store.ask(prompt, ()) for prompt in asked] == [0] * 4
    assert store.ask(long, ()) == 400


def test_foresight_keeps_what_comes_back_and_knows_nothing_of_what_is_new() -> None:
    a, b, c, d = ([i] * 4 + [i + 10] * 4 + [99] for i in range(4))  # two blocks each
    order = [a, b, a, b, c, d, a, b, d, c]
    store = Foresight(4, 3 * (2 + 3), order)
    hits = [store.ask(prompt, ()) for prompt in order]
    # c and d look alike when they come: the older one of them goes.
    assert hits == [0, 0, 8, 8, 0, 0, 8, 8, 8, 0]
    assert store.used <= 15


def test_a_chain_names_everything_before_a_block() -> None:
    first, second = chain_of([1, 2, 3, 4, 5], 2)
    assert chain_of([1, 2, 3, 4], 2) == (first, second)
    assert chain_of([9, 9, 3, 4], 2)[1] != second


PROMPTS = ([A, B], [A, B], [A, C], [A, D], [A, B, E])


@pytest.mark.parametrize(
    "setup, hits",
    [
        # 50 tokens: pages to 48 and a state there. The third prompt finds a page and no
        # state, so it leaves one at 16 for the fourth.
        (Setup(N, 64, 100), [0, 48, 0, 16, 48]),
        # Each step of one block leaves a state, so the first branch hits as well.
        (Setup(N, 64, 100, batch=N), [0, 48, 16, 16, 48]),
        (Setup(N, 64, 100, batch=N, checkpoint=0), [0, 48, 0, 16, 48]),
        (Setup(N, 64, 100, checkpoint=N), [0, 48, 16, 16, 48]),
        (Setup(N, 64, None), [0, 48, 0, 16, 48]),
    ],
    ids=["default", "one block a step", "last boundary", "a state every block", "vLLM alone"],
)
def test_five_replayed_requests_hit_as_counted_by_hand(setup: Setup, hits: list[int]) -> None:
    with ReplayEngine(setup) as engine:
        outcomes = []
        for prompt in PROMPTS:
            if setup.store is not None:
                engine.forget()
            outcomes.append(engine.run(tokens(prompt), tokens([Span("answer", 3)])))
        assert [outcome.local + outcome.external for outcome in outcomes] == hits
        assert all(outcome.local == 0 for outcome in outcomes) == (setup.store is not None)
        assert engine.held_pages == engine.saved_pages


@pytest.mark.parametrize(
    "name, chunk_ends, interval",
    [("default", True, 0), ("beside", True, 0), ("last", False, 0), ("T4", False, 4 * N)],
)
def test_an_arm_sets_what_its_title_says(name: str, chunk_ends: bool, interval: int) -> None:
    trace = traces.repeat(scale=N / 784, prompts=1, times=2)
    jobs = [job for job in replay.jobs([trace], N) if job.store == "unlimited"]
    (job,) = [job for job in jobs if job.name == name]
    with ReplayEngine(replay.setup_of(job)) as engine:
        chosen = engine.options
        assert (chosen.chunk_ends, chosen.checkpoint_tokens) == (chunk_ends, interval)


def test_a_restart_empties_vllms_own_cache_and_not_the_store() -> None:
    trace = traces.repeat(scale=N / 784, prompts=1, times=4)
    runs = {}
    for job in replay.jobs([trace], N):
        if job.store == replay.RESTARTED:
            job = dataclasses.replace(job, cached=trace.longest)  # room for all of it
            runs[job.name] = replay.run(job)
    first = runs["vllm"]["hit_tokens"] / 2  # the second and the fourth request
    assert runs["default"]["hit_tokens"] == 3 * first > 0
    assert runs["default"]["local_tokens"] == 2 * first, "the store is asked where vLLM has it"


@pytest.mark.parametrize("store", [100, None], ids=["LMCache", "vLLM alone"])
def test_a_unit_hits_inside_a_block(store: int | None) -> None:
    prompts = [A, B, Span("F", 5)], [Span("G", 10)]  # 55 and 10 tokens
    for unit, hits in ((0, [48, 0]), (4, [52, 8])):
        with ReplayEngine(Setup(N, 64, store, unit=unit)) as engine:
            for prompt, hit in zip(prompts, hits):
                engine.run(tokens(prompt), tokens([D]))
                if store is not None:
                    engine.forget()
                outcome = engine.run(tokens(prompt), tokens([D]))
                assert outcome.local + outcome.external == hit
                assert (outcome.external > 0) == (store is not None and hit > 0)
            assert engine.held_pages == engine.saved_pages


def test_generated_blocks_are_found_in_the_next_turn() -> None:
    answer = Span("answer", 40)
    # 50 + 40 tokens, of which 89 are computed: to the boundary at 80 where they are stored.
    for save_decode, hit in ((False, 48), (True, 80)):
        with ReplayEngine(Setup(N, 64, 100, save_decode=save_decode)) as engine:
            engine.run(tokens([A, B]), tokens([answer]))
            engine.forget()
            outcome = engine.run(tokens([A, B, answer, C]), tokens([D]))
            assert outcome.external == hit


def test_each_choice_of_checkpoints_has_a_row() -> None:
    cost = {"time_ratio": 1.0, "steps": 5, "states": 1, "bytes": 8_700_000}
    rows = [{"interval": interval, **cost} for interval in (CHUNK_ENDS, 0, 4)]
    (*_, chunk, none, four) = report.checkpoints({"rows": rows}).splitlines()
    assert [row.split(" | ")[0] for row in (chunk, none, four)] == [
        "| chunk ends",
        "| none",
        "| 4 N",
    ]


def test_prompts_that_come_once_do_not_push_out_what_is_asked_for():
    """As in docs/reuse.md, with blocks of 64 tokens and a tenth of the trace's sizes."""
    trace, size = traces.one_offs(0, 64 / replay.BLOCK_SIZE, count=20, questions=120), 64
    assert sum(each.label == "once" for each in trace.requests) == 0.7 * len(trace.requests)
    third = replay._pages_of(trace.contents, size) // 3
    shares = {}
    for arm in replay.ARMS:
        if arm.name in ("default", "policy-lru"):
            shares[arm.name] = replay.run(replay.Job(trace, "a third", third, size, arm))["share"]
    assert shares["default"] > 1.3 * shares["policy-lru"]


def test_the_tables_go_between_the_markers(tmp_path: Path) -> None:
    figures = {
        "batch_tokens": 8192,
        "page_bytes": 10**9,
        "traces": {
            "chat": {
                "requests": 2,
                "prompt_tokens": 100,
                "shortest": 40,
                "longest": 60,
                "oracle_tokens": 50,
                "finest_tokens": 80,
            }
        },
        "runs": [
            {
                "trace": "chat",
                "store": "unlimited",
                "arm": "default",
                "title": "LMCache",
                "share": 0.5,
                "finest_share": 0.3125,
                "by_label": {"later turns": {"share": 0.25, "oracle": 40}},
                "bytes_per_prompt_token": 15_200.0,
                "extra_steps_per_request": 0.5,
                "saved_pages": 3,
                "held_pages": 2,
            }
        ],
    }
    page = tmp_path / "reuse.md"
    page.write_text("Before\n<!-- reuse:begin -->\nold\n<!-- reuse:end -->\nAfter\n")
    for _ in range(2):
        replace(page, "reuse", report.tables(figures))
    text = page.read_text()
    assert text.startswith("Before\n") and text.endswith("\nAfter\n") and "old" not in text
    for cell in (
        "| LMCache | 50.0 % |",
        "| LMCache | 3; 2 |",
        "| LMCache | 31.2 % |",
        "| LMCache | 15; 0.50 |",
        "| LMCache | 25.0 % |",
    ):
        assert text.count(cell) == 1
    with pytest.raises(ValueError, match="lacks"):
        page.write_text("no markers")
        replace(page, "reuse", "table")
