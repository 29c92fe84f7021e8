# SPDX-License-Identifier: Apache-2.0
"""Groups whose blocks have different sizes, on real engines: hits end where blocks of all end."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_hybrid.storage.record_format import read_header
from tests.e2e import uneven
from tests.e2e.engine import Answer, Engine
from tests.e2e.records import FolderShelf

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 4
# Else what is asked leaves anew what was removed.
NO_SAVE = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}


@dataclass(frozen=True)
class Own:
    """What vLLM answers without a connector.

    Attributes:
        size: N, the least common multiple of the groups' blocks.
        sizes: tokens in a block, by group.
        prompts: of N + 20 tokens, 2 N + 20, and that one extended to 3 N + 20.
        cold: answers with nothing cached, by prompt.
        warm: answers from vLLM's own cache: of the last one behind 2 N tokens.
        deepest: of the last one behind 3 N tokens.
    """

    model: Path
    size: int
    sizes: list[int]
    prompts: list[list[int]]
    cold: list[Answer]
    warm: list[Answer]
    deepest: Answer


@pytest.fixture(scope="module")
def own(model_dir: Path) -> Own:
    model, rng = uneven.make_uneven_model(model_dir), random.Random(3)
    with Engine(model, **uneven.OPTIONS) as engine:
        sizes, kinds = engine.info["block_sizes"], engine.info["groups"]
        size = math.lcm(*sizes)
        attention = {n for n, kind in zip(sizes, kinds) if kind == "FullAttentionSpec"}
        assert attention == {size, size // 2} == set(sizes)
        long = [rng.randrange(32, 127) for _ in range(3 * size + 20)]
        other = [rng.randrange(32, 127) for _ in range(size + 20)]
        prompts, cold, warm = [other, long[: 2 * size + 20], long], [], []
        for ids in prompts:
            engine.forget()
            cold.append(engine.ask(ids, TOKENS))
        for ids in prompts[:2]:
            engine.forget()
            engine.ask(ids, TOKENS)
            warm.append(engine.ask(ids, TOKENS))
        warm.append(engine.ask(long, TOKENS))
        deepest = engine.ask(long, TOKENS)
    own = Own(model, size, sizes, prompts, cold, warm, deepest)
    assert [answer.cached for answer in (*warm, deepest)] == [size, 2 * size, 2 * size, 3 * size]
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    return own


def check(engine: Engine, prompt: list[int], expected: Answer, **sampling) -> None:
    """From the store it is the hit of ``expected``, and the same answer to the last bit."""
    engine.forget()
    answer = engine.ask(prompt, TOKENS, **sampling)
    assert answer.external == answer.cached == expected.cached
    assert answer.output == expected.output


def label_of(name: str) -> str:
    """A record's group, as in its name."""
    return name.rpartition("%")[2].split("-")[0]


@contextmanager
def lost(shelf: FolderShelf, label: str, boundary: int) -> Iterator[None]:
    """Without a group's only record at ``boundary`` tokens."""
    names = [name for name in shelf.names() if label_of(name) == label]
    (name,) = (name for name in names if read_header(shelf.read(name)).boundary == boundary)
    record = (shelf.folder / name).rename(shelf.folder / f"{label}.lost")
    yield
    record.rename(shelf.folder / name)


def test_hits_on_the_common_boundary_from_ram_and_after_a_restart(own: Own, tmp_path) -> None:
    shelf, remote = FolderShelf(tmp_path), {"remote_url": f"fs://localhost:0{tmp_path}"}
    with Engine(own.model, {"local_cpu": True, **remote}, **uneven.OPTIONS) as engine:
        for ids, cold in zip(own.prompts[:2], own.cold):
            assert engine.ask(ids, TOKENS).output == cold.output
        engine.settle()
        for ids, warm in zip(own.prompts, own.warm):
            check(engine, ids, warm)
        engine.settle()
        check(engine, own.prompts[2], own.deepest)
        assert engine.reads().keys() == {"LocalCPUBackend"}
        engine.settle()
    states = [f"s{i}" for i, kind in enumerate(engine.info["groups"]) if kind == "MambaSpec"]
    pages = [f"a{i}" for i in range(len(own.sizes)) if f"s{i}" not in states]
    # Of each attention group a record for each N tokens, of each state one for each prompt.
    assert Counter(map(label_of, shelf.names())) == dict.fromkeys(pages, 4) | dict.fromkeys(
        states, 3
    )
    with Engine(own.model, {"local_cpu": False, **remote}, **uneven.OPTIONS) as engine:
        check(engine, own.prompts[0], own.warm[0], **NO_SAVE)
        check(engine, own.prompts[2], own.deepest, **NO_SAVE)
        assert engine.reads().keys() == {"RemoteBackend"}
        check_lost_records(engine, own, shelf, pages + states)


def check_lost_records(engine: Engine, own: Own, shelf: FolderShelf, groups: list[str]) -> None:
    """Without one of any group's at 3 N the hit is at 2 N; without one there, it is a miss."""
    long = own.prompts[2]
    for label in groups:
        with lost(shelf, label, 3 * own.size):
            check(engine, long, own.warm[2], **NO_SAVE)
    check(engine, long, own.deepest, **NO_SAVE)
    with lost(shelf, groups[0], 3 * own.size), lost(shelf, groups[-1], 2 * own.size):
        check(engine, long, own.cold[2], **NO_SAVE)
    counts = engine.counts()
    assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 0
    assert not any(counts["live"][name] for name in ("tracked", "claims", "pinned", "held"))
