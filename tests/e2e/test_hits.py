# SPDX-License-Identifier: Apache-2.0
"""Which boundary is hit: interior ones, shared stores, half local, many at once."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_hybrid.storage.record_format import record_bytes
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.blocks import block_size, described
from tests.e2e.engine import Answer, Engine
from tests.e2e.golden import assert_close
from tests.e2e.prompts import cases, shortened
from tests.marks import slow

pytestmark = pytest.mark.engine

# States at every chunk end, one chunk per block: what a granular prefill leaves.
DENSE = {"prefix_cache_retention_interval": None}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("granite4", model_dir / "granite4")


@pytest.mark.parametrize("family", ["granite4", *slow("qwen3_next")])
def test_prefixes_cut_one_token_past_each_interior_boundary(model_dir, family) -> None:
    """By default there is no state to resume from; with dense retention each is a hit.

    Compared with what vLLM answers where nothing can be loaded: behind a salt.
    """
    model = make_model(family, model_dir / family)
    size = block_size(model)
    long, prefixes = shortened(size)
    prefixes.reverse()  # the longest first, so that none leaves a boundary for the next
    deepest = len(prefixes[0]) - 1
    with Engine(model, {"local_cpu": True}) as engine:
        engine.ask(list(long))
        own = [engine.ask(list(prefixes[0]))]  # vLLM's own hit is the longest one's reference
        assert (own[0].cached, own[0].external) == (deepest, 0)
        own += ask_apart(engine, prefixes[1:], salted=True)
        assert not any(answer.cached for answer in own[1:])
        answers = ask_apart(engine, prefixes)
        assert [answer.external for answer in answers] == [deepest] + [0] * (len(prefixes) - 1)
        assert [answer.output for answer in answers] == [answer.output for answer in own]
    with Engine(model, {"local_cpu": True}, **DENSE, max_num_batched_tokens=size) as engine:
        own = ask_apart(engine, prefixes, salted=True)
        assert not any(answer.cached for answer in own)
        engine.ask(list(long))
        engine.forget()
        answers = ask_apart(engine, prefixes)
        assert [answer.external for answer in answers] == [len(each) - 1 for each in prefixes]
        assert [answer.output for answer in answers] == [answer.output for answer in own]
        # No hit ends behind the last token, but the state there is not saved again.
        (whole,) = ask_apart(engine, [long[: 2 * size]])
        assert whole.external == size


def ask_apart(engine: Engine, prompts: list[tuple[int, ...]], salted: bool = False) -> list[Answer]:
    """Answers to prompts of which none finds the former's in vLLM's own cache.

    Args:
        salted: nor in the store; each has a salt of its own.
    """
    answers = []
    for prompt in prompts:
        engine.forget()
        ids, salt = list(prompt), f"{len(prompt)} tokens"
        answers.append(engine.ask({"prompt_token_ids": ids, "cache_salt": salt} if salted else ids))
    return answers


def test_two_engines_share_one_redis(model: Path, redis_url: str) -> None:
    """Also where one knows it by another name."""
    config = {"local_cpu": False, "remote_url": redis_url}
    resp = config | {"remote_url": redis_url.replace("redis://", "resp://")}
    with Engine(model, config) as first, Engine(model, resp) as second:
        size = first.info["block_size"]
        for case in cases(size, seed=5)[:4]:
            stored = first.ask(list(case.stored))
            first.settle()
            answer = second.ask(list(case.asked))
            assert stored.cached == 0 < answer.external
            assert answer.output == stored.output
    # Seen from outside, while no engine runs.
    assert told("verify", redis_url)["counts"].keys() == {"good"}
    (row,) = told("inspect", redis_url)["rows"]
    assert (row["model"], row["rank"]) == (model.name, "0/1")
    assert row["states"] == 3 * row["resumable"] > 0 < row["prompts"]
    # Of the sizes that `doctor` tells of this model.
    found = described(model)
    attention = record_bytes(found.attention_bytes)
    state = record_bytes(found.state_bytes // len(found.states))
    pages = row["records"] - row["states"]
    assert row["bytes"] == pages * attention + row["states"] * state


def told(command: str, store: str) -> dict:
    """What ``lmcache-hybrid`` says of a store on which nothing is wrong."""
    result = CliRunner().invoke(app, [command, store, "--json"])
    assert result.exit_code == 0, result.output
    (only,) = json.loads(result.stdout)
    return only


def test_prefix_half_in_vllm_and_half_in_the_store(model: Path) -> None:
    """vLLM's cache holds [0, N), the store brings [N, 3N) and the state; then all is local."""
    with Engine(model, {"local_cpu": True}) as engine:
        size = engine.info["block_size"]
        ids = list(cases(size, seed=6)[0].asked) * 4
        long, short = ids[: 3 * size + 20], ids[: size + 20]
        cold = engine.ask(long)
        engine.forget()
        engine.ask(short)
        before = engine.counts()["worker"]
        mixed = engine.ask(long)
        after = engine.counts()["worker"]
        assert mixed.cached == 3 * size and mixed.external == 2 * size
        assert after["loaded_attention"] - before["loaded_attention"] == 2
        assert mixed.output == cold.output
        third = engine.ask(long)
        assert third.cached == 3 * size and third.external == 0
        assert third.output == cold.output
        assert engine.counts()["worker"] == after | {"saved_bytes": after["saved_bytes"]}


def test_a_batch_that_hits_extends_and_misses_answers_as_behind_vllms_own_hits(
    model: Path,
) -> None:
    """Side by side, and nothing is left over.

    Not compared with one prompt at a time: in a batch chunks are cut elsewhere, and without
    AVX512-BF16 vLLM alone then differs by up to 0.6.
    """
    with Engine(model) as plain:
        chosen = cases(plain.info["block_size"], seed=7)[::2]
        for case in chosen:
            plain.ask(list(case.asked))
        own = plain.ask_many([list(case.asked) for case in chosen])
    with Engine(model, {"local_cpu": True}) as engine:
        size = engine.info["block_size"]
        for case in chosen:
            engine.forget()
            engine.ask(list(case.asked))
        engine.forget()
        answers = engine.ask_many([list(case.asked) for case in chosen])
        assert answers[0].external > size * len(chosen)
        for case, one, many in zip(chosen, own, answers):
            assert one.cached == many.cached
            assert_close(one, many, case.name)
        live = engine.counts()["live"]
        assert live["tracked"] == live["claims"] == live["pinned"] == live["held"] == 0


@pytest.mark.slow
def test_clearing_the_store_through_vllm(model: Path) -> None:
    with Engine(model, {"local_cpu": True}) as engine:
        ids = list(cases(engine.info["block_size"], seed=8)[0].asked)
        cold = engine.ask(ids)
        engine.forget()
        assert engine.ask(ids).external > 0
        assert engine.call("forget_all")
        again = engine.ask(ids)
        assert again.external == 0 and again.output == cold.output
