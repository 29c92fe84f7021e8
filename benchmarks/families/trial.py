# SPDX-License-Identifier: Apache-2.0
"""One tiny model on one model runner: vLLM alone, then with this connector.

Needs the checkout: the engine is that of ``tests/e2e``.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import standins
from tests.e2e.engine import Answer, Engine, EngineDied
from tests.e2e.prompts import Case, v2_cases

TOKENS = 4
EXCEPTION = r"^(?:\S.*\] +)?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)$"
V1_OPTIONS: dict[str, Any] = {"max_num_seqs": 4}


@dataclass
class Result:
    """What came of one family on one runner.

    Attributes:
        starts: vLLM alone starts and answers.
        why: why not, in the words of the exception; or why ours does not.
        groups: KV cache groups, in vLLM's order.
        served: with the connector every case hit as deep as in vLLM's own cache.
        equal: and every answer's tokens and log-probabilities are those after that hit.
        wrong_shows: without the states, loaded attention alone changes the answers.
        standins: what was put in place of a part that vLLM lacks on CPU.
    """

    family: str
    runner: str
    starts: bool = False
    why: str = ""
    block_size: int = 0
    groups: list[str] = field(default_factory=list)
    served: bool = False
    equal: bool = False
    wrong_shows: bool = False
    hit_tokens: int = 0
    asked_tokens: int = 0
    standins: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def reason(error: BaseException) -> str:
    """The last exception of an engine's log in one line, without prefixes and addresses."""
    lines = re.findall(
        r"^(?:\S.*\] +)?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)$", str(error), re.M
    )
    # The core's error stands above that of the client that waits for it.
    lines = [line for line in lines if "Engine core initialization failed" not in line]
    text = (lines or str(error).strip().splitlines() or [type(error).__name__])[-1]
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+", "", text)).strip()[:240]


class TimeLimit:
    """Kills an engine that takes longer; ``with TimeLimit(engine, seconds)``."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._timer = Timer(seconds, engine.process.kill)
        self.seconds = seconds

    def __enter__(self) -> "TimeLimit":
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    @property
    def over(self) -> bool:
        return not self._timer.is_alive() and self._timer.finished.is_set()


def attempt(
    family: str, runner: str, folder: Path, needed: tuple[str, ...], seconds: float
) -> Result:
    """Start the family's model twice, ask both engines the same prompts, and compare."""
    result = Result(family, runner, standins=list(needed))
    model = make_model(family, folder / family)
    options = V1_OPTIONS if runner == "v1" else {}

    def engine(lmcache: dict | None) -> Engine:
        prepare = partial(standins.install, ("torchvision", *needed))
        return Engine(model, lmcache, runner=runner, prepare=prepare, **options)

    cases: list[Case] = []
    own: dict[str, Answer] = {}
    result.why = _guarded(engine(None), seconds, lambda e: _ask_vllm(e, result, cases, own))
    if result.starts:
        config = {"local_cpu": True}
        result.why = _guarded(engine(config), seconds, lambda e: _ask_ours(e, result, cases, own))
    return result


def _guarded(engine: Engine, seconds: float, use: Callable[[Engine], None]) -> str:
    """Why it failed; "" if it did not."""
    limit = TimeLimit(engine, seconds)
    try:
        with limit, engine:
            use(engine)
    except (EngineDied, RuntimeError) as error:
        return f"not done in {seconds:.0f} s" if limit.over else reason(error)
    return ""


def _ask_vllm(engine: Engine, result: Result, cases: list[Case], own: dict[str, Answer]) -> None:
    """What vLLM answers from its own prefix cache, into ``own``."""
    result.block_size, result.groups = engine.info["block_size"], engine.info["groups"]
    cases += v2_cases(result.block_size)
    for case in cases:
        engine.ask(list(case.stored), TOKENS)
        own[case.name] = engine.ask(list(case.asked), TOKENS)
    result.starts = True


def _ask_ours(engine: Engine, result: Result, cases: list[Case], own: dict[str, Answer]) -> None:
    """The same from the store, with vLLM's own cache emptied; then without the states."""
    for case in cases:
        engine.forget()
        engine.ask(list(case.stored), TOKENS)
    engine.settle()
    result.served = result.equal = True
    for case in cases:
        engine.forget()
        answer = engine.ask(list(case.asked), TOKENS)
        result.served &= answer.external == answer.cached == own[case.name].cached
        result.equal &= answer.output == own[case.name].output
        result.hit_tokens += answer.external
        result.asked_tokens += len(case.asked)
    result.served &= result.hit_tokens > 0
    engine.call("fault", name="lose_states")
    # A prompt that repeats: what was asked after an extension left a deeper boundary.
    for case in (case for case in cases if case.asked == case.stored and own[case.name].cached):
        engine.forget()
        answer = engine.ask(list(case.asked), TOKENS)
        assert answer.external, "nothing was loaded"
        result.wrong_shows |= answer.output != own[case.name].output
