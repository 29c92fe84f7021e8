# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner with asynchronous scheduling: what a GPU takes by default.

Triton kernels run in Triton's interpreter, so prompts are few and short. What is
compared with what is the same as in test_families.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import records, v2
from tests.e2e.blocks import block_size
from tests.e2e.engine import Answer, Engine
from tests.e2e.golden import FAMILIES, assert_close
from tests.e2e.prompts import Case, v2_cases
from tests.marks import slow

pytestmark = pytest.mark.engine

# Each decode step costs what a prefill does.
TOKENS = 3
# Else a prompt leaves a deeper boundary than the one to be hit.
NO_SAVE = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


def start(model: Path, lmcache: dict | None = None, **options) -> Engine:
    return Engine(model, lmcache, runner="v2", **options)


def check_runner(engine: Engine) -> None:
    """It is V2, and schedules ahead of the forward as on a GPU."""
    assert engine.info["runner"] == RUNNERS["v2"]
    assert engine.info["scheduler"] == "AsyncScheduler"
    assert engine.info["batches_ahead"] == 2


def ask(engine: Engine, ids: tuple[int, ...], **sampling) -> Answer:
    return engine.ask(list(ids), TOKENS, **sampling)


def hit_of(case: Case, size: int) -> int:
    """Tokens of ``case`` in whole blocks of ``size``, without the last token."""
    return (len(case.stored) - 1) // size * size


@dataclass(frozen=True)
class Own:
    """What vLLM answers on this runner from its own prefix cache, by name of case."""

    block_size: int
    cases: list[Case]
    answers: dict[str, Answer]


def ask_own(engine: Engine, cases: list[Case]) -> Own:
    """Store each prompt, and ask what follows it while vLLM has it in its own cache."""
    own = Own(engine.info["block_size"], cases, {})
    for case in cases:
        cold = ask(engine, case.stored)
        answer = ask(engine, case.asked, **NO_SAVE)
        assert cold.cached == answer.external == 0
        assert answer.cached == hit_of(case, own.block_size)
        if case.asked == case.stored:
            assert answer.output == cold.output, case.name
        own.answers[case.name] = answer
    engine.settle()
    assert engine.counts()["worker"]["skipped_saves"] == 0
    return own


@pytest.fixture(scope="module")
def qwen(model_dir: Path) -> Path:
    return make_model("qwen3_next", model_dir / "qwen3_next")


def check_hits(engine: Engine, own: Own, cases: list[Case]) -> None:
    """Each case hits as deep as in vLLM's own cache, and its answer is the same."""
    before = engine.counts()
    for case in cases:
        engine.forget()
        answer, expected = ask(engine, case.asked), own.answers[case.name]
        assert answer.external == answer.cached == expected.cached, case.name
        assert answer.output == expected.output, case.name
    after = engine.counts()
    hits = [case for case in cases if hit_of(case, own.block_size)]
    assert after["worker"]["loaded_states"] - before["worker"]["loaded_states"] == len(hits) > 0
    assert after["worker"]["failed_loads"] == after["scheduler"]["failed_loads"] == 0
    check_nothing_held(engine)


def check_nothing_held(engine: Engine) -> None:
    """Nothing outlives the requests but vLLM's null block."""
    live = engine.counts()["live"]
    assert live.pop("used_blocks") == 1
    assert not any(live.values()), live


def repeated(own: Own) -> list[Case]:
    """Without those that left a deeper boundary when they were asked."""
    return [case for case in own.cases if case.asked == case.stored]


# LFM2 is quick everywhere; Qwen3-Next answers the tests below.
@pytest.mark.parametrize("family", ["lfm2", *slow(*sorted({*FAMILIES} - {"lfm2"}))])
def test_ram_and_fs_after_a_restart(family: str, model_dir: Path, tmp_path: Path) -> None:
    model = make_model(family, model_dir / family)
    config = {"local_cpu": True, "remote_url": f"fs://localhost:0{tmp_path}"}
    with start(model, config) as engine:
        check_runner(engine)
        own = ask_own(engine, v2_cases(engine.info["block_size"]))
        check_hits(engine, own, own.cases)
        assert engine.reads().keys() == {"LocalCPUBackend"}
        engine.settle()
    with start(model, config) as engine:
        check_runner(engine)
        check_hits(engine, own, repeated(own))
        assert "RemoteBackend" in engine.reads()


# Kernel blocks


@pytest.mark.parametrize("size", [64, *slow(32)])
def test_blocks_that_attention_takes_in_parts(size: int, qwen: Path) -> None:
    """FlashInfer and others take blocks smaller than N; vLLM's own hit is the reference."""
    with start(qwen, {"local_cpu": True}, prepare=partial(v2.split_blocks, size)) as engine:
        check_runner(engine)
        assert size in engine.info["kernel_blocks"]
        own = ask_own(engine, v2_cases(engine.info["block_size"])[1:4:2])
        check_hits(engine, own, own.cases)


# V1 and V2


@pytest.mark.slow
def test_v1_and_v2_find_each_others_records(qwen: Path, tmp_path: Path) -> None:
    """The kernels that make states are the layers', not the runner's."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}
    stored: tuple[int, ...] | None = None
    for turn, runner in enumerate(("v1", "v2", "v1")):
        with Engine(qwen, config, runner=runner, **v2.OPTIONS) as engine:
            assert engine.info["runner"] == RUNNERS[runner]
            if stored is not None:
                hit = ask(engine, stored)
                assert hit.external == hit.cached == 2 * engine.info["block_size"]
                # vLLM does not let "cold" wait: it is stored again if its lookup takes over 50 ms.
                engine.rewrites = True
                cold = engine.ask(list(stored), TOKENS, skip_reading_prefix_cache=True)
                assert cold.cached == 0 and cold.output == hit.output
            (stored,) = new_prompts(engine, f"turn {turn}", engine.info["block_size"] + 57)
            assert ask(engine, stored).cached == 0
            engine.settle()


# Several requests, faults


@pytest.fixture(scope="module")
def shared(qwen: Path) -> Iterator[Engine]:
    """One engine for the tests that leave nothing behind but records of their own prompts."""
    with start(qwen, {"local_cpu": True}) as engine:
        check_runner(engine)
        yield engine


def new_prompts(engine: Engine, name: str, *extra: int) -> list[tuple[int, ...]]:
    """Prompts of N + each of ``extra`` tokens that no other test asks."""
    rng = random.Random(name)
    size = engine.info["block_size"]
    return [tuple(rng.randrange(32, 127) for _ in range(size + more)) for more in extra]


def store(engine: Engine, *prompts: tuple[int, ...]) -> list[Answer]:
    """Compute each by itself; afterwards only the store has it."""
    answers = []
    for ids in prompts:
        engine.forget()
        answers.append(ask(engine, ids))
        assert answers[-1].cached == 0
    engine.settle()
    engine.forget()
    return answers


def test_hits_and_a_miss_side_by_side_answer_as_one_by_one(shared: Engine) -> None:
    """Three hit and one misses, side by side."""
    size = shared.info["block_size"]
    prompts = new_prompts(shared, "four", 1, 60, size + 30, 20)
    alone = store(shared, *prompts[:3])
    before = shared.counts()
    together = shared.ask_many([list(ids) for ids in prompts], TOKENS)
    after = shared.counts()
    assert together[0].external == 4 * size
    assert [answer.cached for answer in together] == [size, size, 2 * size, 0]
    assert after["worker"]["loaded_states"] - before["worker"]["loaded_states"] == 3
    alone.append(ask(shared, prompts[3]))
    for one, other, ids in zip(alone, together, prompts, strict=True):
        assert_close(one, other, str(len(ids)))
    check_nothing_held(shared)


def test_abort_during_a_load(shared: Engine) -> None:
    prompts = new_prompts(shared, "abort", 9, 10)
    answers = store(shared, *prompts)
    loading, held = shared.call(
        "fault", name="abort_in_load", prompts=[list(ids) for ids in prompts]
    )
    assert loading == 2
    assert held > 1, "blocks were freed under a load"
    check_nothing_held(shared)
    for ids, expected in zip(prompts, answers, strict=True):
        shared.forget()
        answer = ask(shared, ids)
        assert answer.external == shared.info["block_size"]
        assert answer.output == expected.output


@pytest.mark.parametrize("label", ["%s0-", "%a3-"])
def test_damaged_record(shared: Engine, label: str) -> None:
    """Warned of once, computed instead, and stored anew."""
    shelf = records.RamShelf(shared)
    (ids,) = new_prompts(shared, label, 30)
    names = shelf.names()
    (expected,) = store(shared, ids)
    (record,) = (name for name in shelf.names() - names if label in name)
    shelf.write(record, records.flipped(shelf.read(record)))
    before, log = shared.counts(), len(shared.log)
    answer = ask(shared, ids)
    assert answer.cached == 0 and answer.output == expected.output
    after = shared.counts()
    for side in ("worker", "scheduler"):
        assert after[side]["failed_loads"] - before[side]["failed_loads"] == 1
    assert after["worker"]["loaded_states"] == before["worker"]["loaded_states"]
    warnings = re.findall(r"Reqid: (\S+), loading .* computed instead: checksum", shared.log[log:])
    assert warnings == re.findall(r"Reqid: (\S+), Total tokens", shared.log[log:])
    assert len(warnings) == 1
    check_nothing_held(shared)
    shared.settle()
    shared.forget()
    again = ask(shared, ids)
    assert again.external == shared.info["block_size"] and again.output == expected.output


@pytest.mark.slow
def test_preemption(qwen: Path) -> None:
    """Two requests outgrow the pool; one loses its blocks and resumes from the store.

    Of eleven blocks beside the null block each holds two of attention and the running
    state of three groups; past 2N each takes one more of all four. V2 is told of a
    resumed request as of a new one.
    """
    options = {"num_gpu_blocks_override": 12, "max_model_len": 3 * block_size(qwen)}
    with start(qwen, {"local_cpu": True}, **options) as engine:
        check_runner(engine)
        size = engine.info["block_size"]
        assert options["max_model_len"] == 3 * size
        prompts = new_prompts(engine, "preempted", size - 2, size - 2)
        alone = []
        for ids in prompts:
            engine.forget()
            alone.append(engine.ask(list(ids), 6))
        engine.settle()
        engine.forget()
        before = engine.counts()
        together = engine.ask_many([list(ids) for ids in prompts], 6)
        assert engine.metrics()["num_preemptions"] > 0
        after = engine.counts()
        # Both hit, and again after they were preempted.
        loaded = after["worker"]["loaded_states"] - before["worker"]["loaded_states"]
        assert loaded == after["scheduler"]["hits"] - before["scheduler"]["hits"] > 2
        assert after["worker"]["failed_loads"] == after["scheduler"]["failed_loads"] == 0
        for one, other in zip(alone, together, strict=True):
            assert len(other.tokens) == 6
            assert_close(one, other, "preempted")
        check_nothing_held(engine)
