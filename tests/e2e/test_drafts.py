# SPDX-License-Identifier: Apache-2.0
"""Drafts behind a restored prefix: as many are accepted as behind vLLM's own hit.

The target model decides every token, so a drafter whose pages were not restored leaves all answers
as they are and only guesses otherwise. So the test compares what was drafted and accepted, too.

On the V2 runner, whose kernels Triton interprets. vLLM's CPU kernels round otherwise with drafts
than without; so an answer with drafts is compared with answers with drafts only.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.e2e import drafting, v2
from tests.e2e.engine import Answer, Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 24
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
# Else what is asked leaves a deeper boundary for the next time.
NO_SAVE = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}


@dataclass(frozen=True)
class Drafted:
    """An answer, and its draft tokens by vLLM's own counters: (made, accepted)."""

    answer: Answer
    drafts: tuple[float, float]


def ask(engine: Engine, prompt: list[int], **sampling) -> Drafted:
    before = engine.metrics()
    answer = engine.ask(prompt, TOKENS, **sampling)
    after = engine.metrics()
    made, accepted = (after[name] - before.get(name, 0) for name in COUNTERS)
    return Drafted(answer, (made, accepted))


def ask_restored(engine: Engine, prompts: list[list[int]]) -> list[Drafted]:
    """From the store, with vLLM's own cache empty."""
    found = []
    for prompt in prompts:
        # vLLM frees a request's blocks once the step that was scheduled behind its end is through.
        engine.ask([40, 41], 1)
        engine.forget()
        found.append(ask(engine, prompt, **NO_SAVE))
    return found


@dataclass(frozen=True)
class Drafter:
    """One way to draft.

    Attributes:
        config: of ``speculative_config``, for a target model.
        blocks: that a prompt of two blocks and a tail hits.
        layers: how the names of its layers begin; "" where it has none.
        modules: of the model's MTP head.
    """

    config: Callable[[Path], dict]
    blocks: int
    layers: str
    modules: int = 1

    @property
    def ahead(self) -> int:
        """Tokens behind a block that its hash covers, where it covers any."""
        return self.modules


def toy(method: str) -> Callable[[Path], dict]:
    return lambda model: {
        "method": method,
        "model": str(drafting.make_drafter(model, method)),
        "num_speculative_tokens": 2,
    }


# With MTP and EAGLE vLLM 0.32 gives up the last block of its hits, and keeps the state before it.
DEPTH = 2 if hasattr(VllmConfig, "num_hash_lookahead_tokens") else 1
DRAFTERS = {
    "mtp": Drafter(lambda model: drafting.MTP, DEPTH, "mtp."),
    "modules": Drafter(lambda model: drafting.MTP, DEPTH, "mtp.", modules=2),
    "eagle": Drafter(toy("eagle"), DEPTH, "model.layers.4."),
    "draft_model": Drafter(toy("draft_model"), 2, "draft_model."),
    "ngram": Drafter(lambda model: drafting.NGRAM, 2, ""),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_behind_a_restored_prefix_are_those_behind_vllms_own_hit(
    name: str, model_dir: Path
) -> None:
    drafter = DRAFTERS[name]
    model = drafting.make_drafting_model(model_dir, drafter.modules)
    options = {**drafting.OPTIONS, "speculative_config": drafter.config(model)}
    with Engine(
        model, {"local_cpu": True}, runner="v2", prepare=v2.allow_drafts, **options
    ) as engine:
        assert engine.info["runner"] == "vllm.v1.worker.gpu.model_runner"
        size, rng = engine.info["block_size"], random.Random(5)
        prompts = [[rng.randrange(32, 127) for _ in range(2 * size + 30)] for _ in range(4)]
        hit, own = drafter.blocks * size, []
        for prompt in prompts:
            assert ask(engine, prompt).answer.cached == 0
            own.append(ask(engine, prompt, **NO_SAVE))
            assert (own[-1].answer.cached, own[-1].answer.external) == (hit, 0)
            made, accepted = own[-1].drafts
            assert 0 < accepted < made
        engine.settle()
        restored = ask_restored(engine, prompts)
        assert all(each.answer.external == each.answer.cached == hit for each in restored)
        assert [r.answer.output for r in restored] == [o.answer.output for o in own]
        assert [each.drafts for each in restored] == [each.drafts for each in own]
        counts = engine.counts()
        assert counts["worker"]["loaded_states"] == len(prompts)
        assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 0
        if drafter.layers:
            check_lost_pages_show(engine, drafter, prompts, own)
        check_lost_states_show(engine, prompts, own)


@pytest.mark.parametrize("name", ["mtp", "modules", "eagle"])
def test_a_prompt_with_another_token_behind_a_boundary_is_answered_as_if_nothing_were_stored(
    name: str, model_dir: Path
) -> None:
    """What the drafter keeps of the boundary's last token is that of the other prompt."""
    drafter = DRAFTERS[name]
    model = drafting.make_drafting_model(model_dir, drafter.modules)
    options = {**drafting.OPTIONS, "speculative_config": drafter.config(model)}
    with Engine(
        model, {"local_cpu": True}, runner="v2", prepare=v2.allow_drafts, **options
    ) as engine:
        size, rng = engine.info["block_size"], random.Random(7)
        first = [rng.randrange(32, 127) for _ in range(2 * size + 30)]
        # The last token that the hash of the second block covers, if it covers any.
        last = 2 * size + drafter.ahead - 1
        other = [*first[:last], 32 + (first[last] - 31) % 95, *first[last + 1 :]]
        (alone,) = ask_restored(engine, [other])
        assert alone.answer.cached == 0
        engine.ask([40, 41], 1)
        engine.forget()
        assert ask(engine, first).answer.cached == 0
        engine.settle()
        (found,) = ask_restored(engine, [other])
        if DEPTH == 2:
            assert (found.answer.external, found.answer.output) == (0, alone.answer.output)
            assert found.drafts == alone.drafts
        else:
            assert found.answer.external == size
            assert found.answer.tokens == alone.answer.tokens
        (same,) = ask_restored(engine, [[*first[: last + 1], *[40] * 20]])
        assert same.answer.external == DEPTH * size


@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_a_branch_hits_where_a_chunk_ended(method: str, model_dir: Path) -> None:
    """vLLM hands that state to nobody by default; its own cache keeps it with dense retention."""
    model = drafting.make_drafting_model(model_dir)
    options = {**drafting.OPTIONS, "speculative_config": DRAFTERS[method].config(model)}
    dense = {**options, "prefix_cache_retention_interval": None}
    with Engine(model, None, runner="v2", prepare=v2.allow_drafts, **dense) as engine:
        size, rng = engine.info["block_size"], random.Random(9)
        end = v2.OPTIONS["max_num_batched_tokens"] // size * size
        first = [rng.randrange(32, 127) for _ in range(end + 3 * size + 30)]
        # A block more than the chunk is shared, because vLLM 0.32 gives one up.
        branch = [*first[: end + size + 5], *(rng.randrange(32, 127) for _ in range(30))]
        ask(engine, first)
        own = ask(engine, branch)
        assert own.answer.cached == end
    with Engine(
        model, {"local_cpu": True}, runner="v2", prepare=v2.allow_drafts, **options
    ) as engine:
        ask(engine, first)
        engine.settle()
        (found,) = ask_restored(engine, [branch])
        assert found.answer.external == found.answer.cached == end
        assert (found.answer.output, found.drafts) == (own.answer.output, own.drafts)
        check_lost_states_show(engine, [branch], [own])


def check_lost_pages_show(engine: Engine, drafter: Drafter, prompts: list, own: list) -> None:
    """Without the drafter's pages drafts differ and no answer does."""
    assert engine.call("fault", name="lose_drafter", layers=drafter.layers)
    lost = ask_restored(engine, prompts)
    assert all(each.answer.external for each in lost)
    assert [each.drafts for each in lost] != [each.drafts for each in own]
    assert [each.answer.tokens for each in lost] == [each.answer.tokens for each in own]


def check_lost_states_show(engine: Engine, prompts: list, own: list) -> None:
    """Without states answers differ."""
    engine.call("fault", name="lose_states")
    lost = ask_restored(engine, prompts)
    assert all(each.answer.external for each in lost)
    assert all(a.answer.output != b.answer.output for a, b in zip(lost, own, strict=True))
