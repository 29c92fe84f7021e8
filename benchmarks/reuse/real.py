# SPDX-License-Identifier: Apache-2.0
"""A short part of each trace on a real engine: every request must reuse what the replay says.

    python -m benchmarks.reuse.real

Needs the checkout: the engine is that of ``tests/e2e``. The model is tiny and
generates its own answers, so they take the place of the trace's in later prompts.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

# Before vLLM and LMCache are imported: the table is all there is to see.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.reuse import traces  # noqa: E402
from benchmarks.reuse.engine import ReplayEngine, Setup  # noqa: E402
from lmcache_hybrid.config.own_options import CHECKPOINT_KEY  # noqa: E402
from lmcache_hybrid.tools.tiny_models import make_model  # noqa: E402
from tests.e2e.engine import Engine  # noqa: E402

FAMILY, BLOCK_SIZE, STATE_GROUPS = "lfm2", 128, 2
SCALE = BLOCK_SIZE / 784
VOCABULARY = (32, 127)  # printable, as the model's own answers
BATCH = 2_048
STORE = 100_000  # pages, more than all requests have
# (lmcache.hybrid_checkpoint_tokens, None where it is not set; generated tokens too)
SETTINGS = ((None, False), (0, False), (4 * BLOCK_SIZE, True))


def parts() -> list[traces.Trace]:
    """10 to 15 requests of each kind, in sizes for a block of 128 tokens."""
    return [
        traces.repeat(scale=SCALE, prompts=4, times=3),
        traces.chat(scale=SCALE, conversations=2, turns=6),
        traces.agent(scale=SCALE, tasks=1, steps=12),
        traces.increment(scale=SCALE, sessions=2),
        traces.growing(scale=SCALE, sessions=2),
        traces.documents(scale=SCALE, count=4, questions=12),
    ]


Hits = list[tuple[str, int, int]]


def replayed(
    made: Sequence[traces.Trace],
    known: dict[str, list[int]],
    ask: Callable[[list[int], list[int]], tuple[int, int]],
) -> Hits:
    """(trace, local hit, external hit) of each request.

    Args:
        known: answers of the real engine.
    """
    hits = []
    for trace in made:
        for request in trace.requests:
            prompt = traces.tokens(request.spans, VOCABULARY, known)
            answer = traces.tokens([request.output], VOCABULARY, known)
            hits.append((trace.name, *ask(prompt, answer)))
    return hits


def on_engine(
    model: Path, checkpoint: int | None, save_decode: bool, made: Sequence[traces.Trace]
) -> tuple[Hits, dict[str, list[int]]]:
    """The same on a real engine, and what it answered by name of the answer's span."""
    hits, known = [], {}
    lmcache = {"local_cpu": True, "save_decode_cache": save_decode}
    chosen = {} if checkpoint is None else {CHECKPOINT_KEY: checkpoint}
    extra = {"kv_connector_extra_config": chosen}
    with Engine(model, lmcache, extra, max_num_batched_tokens=BATCH) as engine:
        assert engine.info["block_size"] == BLOCK_SIZE, engine.info
        for trace in made:
            for request in trace.requests:
                engine.forget()
                prompt = traces.tokens(request.spans, VOCABULARY, known)
                answer = engine.ask(prompt, request.output.length)
                known[request.output.name] = answer.tokens
                hits.append((trace.name, answer.cached - answer.external, answer.external))
    return hits, known


def main() -> None:
    """Compare; ends with status 1 where a request differs."""
    console, different = Console(), 0
    table = Table("Setting", "Trace", "Requests", "Hit tokens, engine", "Replay", "Different")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(FAMILY, Path(folder, FAMILY))
        made = parts()
        for checkpoint, save_decode in SETTINGS:
            named = "defaults" if checkpoint is None else f"T = {checkpoint or 'none'}"
            real, known = on_engine(model, checkpoint, save_decode, made)
            logging.disable(logging.WARNING)
            pool = max(trace.longest for trace in made) // BLOCK_SIZE + 32
            setup = Setup(BLOCK_SIZE, pool, STORE, BATCH, checkpoint, save_decode, STATE_GROUPS)
            with ReplayEngine(setup) as engine:

                def ask(prompt: list[int], answer: list[int]) -> tuple[int, int]:
                    engine.forget()
                    outcome = engine.run(prompt, answer)
                    return outcome.local, outcome.external

                simulated = replayed(made, known, ask)
            for trace in made:
                pairs = [(r, s) for r, s in zip(real, simulated) if r[0] == trace.name]
                wrong = sum(r != s for r, s in pairs)
                different += wrong
                table.add_row(
                    f"{named}, generated {'too' if save_decode else 'not'}",
                    trace.name,
                    str(len(pairs)),
                    str(sum(r[1] + r[2] for r, _ in pairs)),
                    str(sum(s[1] + s[2] for _, s in pairs)),
                    str(wrong),
                )
    console.print(table)
    if different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
