# SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost a prefill, on a real engine.

    python -m benchmarks.reuse.checkpoints --out docs/generated/checkpoints.json

One engine, one prompt, cold each time; T changes from ask to ask, in rounds, so
that every T meets the same noise. Time is that of the first token.
"""

import dataclasses
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.figures import header, page_of, replace, write
from benchmarks.reuse import report
from lmcache_hybrid.config.own_options import CHUNK_ENDS
from lmcache_hybrid.tools.tiny_models import make_model

BLOCKS = 20
CHOICES: tuple[int | str, ...] = (CHUNK_ENDS, 0, 8, 4, 2, 1)  # T in blocks
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
    "LMCACHE_TRACK_USAGE": "false",
}


class Engine:
    """vLLM in this process, with its connector's scheduler and worker side at hand."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self._llm = LLM(
            str(model),
            max_model_len=8192,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler.connector.scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._worker = get_kv_transfer_group().worker
        self.block_size = self._core.scheduler.connector.plan.block_size
        self._steps, step = 0, self._scheduler.build_connector_meta

        def counted(output):
            self._steps += bool(output.num_scheduled_tokens)
            return step(output)

        self._scheduler.build_connector_meta = counted

    def prefill(self, ids: list[int], choice: int | str) -> dict:
        """Seconds, steps, states and bytes of one cold prompt with one of CHOICES."""
        from vllm import SamplingParams

        self._core.scheduler.reset_prefix_cache(reset_connector=True)
        chunk_ends = choice == CHUNK_ENDS
        arrivals = self._scheduler._arrivals
        arrivals._options = dataclasses.replace(
            arrivals._options,
            checkpoint_tokens=0 if chunk_ends else int(choice) * self.block_size,
            chunk_ends=chunk_ends,
        )
        before, counts = self._steps, dataclasses.replace(self._worker.counts)
        started = time.perf_counter()
        (output,) = self._llm.generate(
            [{"prompt_token_ids": ids}],
            SamplingParams(max_tokens=1, temperature=0),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - started
        assert not output.num_cached_tokens
        return {
            "seconds": seconds,
            "steps": self._steps - before,
            "states": self._worker.counts.saved_states - counts.saved_states,
            "bytes": self._worker.counts.saved_bytes - counts.saved_bytes,
        }

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def main(
    out: Annotated[Path, typer.Option(help="JSON file; its table goes into ../reuse.md.")],
    rounds: Annotated[int, typer.Option(help="Asks per T; the median counts.")] = 7,
    family: Annotated[
        str, typer.Option(help="One of lmcache_hybrid.tools.tiny_models.")
    ] = "qwen3_next",
) -> None:
    """Measure prefills with a state at each chunk's end, with none and every so many tokens."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0,1")
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(make_model(family, Path(folder, family)))
        size, rng = engine.block_size, random.Random(0)
        ids = [rng.randrange(32, 127) for _ in range(BLOCKS * size + 1)]
        engine.prefill(ids, 0)
        asks: dict[int | str, list[dict]] = {choice: [] for choice in CHOICES}
        for _ in track(range(rounds), "rounds"):
            for choice in rng.sample(CHOICES, len(CHOICES)):
                asks[choice].append(engine.prefill(ids, choice))
        engine.close()
    states = {choice: asks[choice][-1]["states"] for choice in CHOICES}
    assert states[0] == 1 and states[1] == BLOCKS, f"T makes no difference: {states}"
    base = statistics.median(ask["seconds"] for ask in asks[0])
    figures = {
        **header("benchmarks.reuse.checkpoints"),
        "family": family,
        "block_size": size,
        "prompt_tokens": len(ids),
        "rounds": rounds,
        "rows": [
            {
                "interval": choice,
                "time_ratio": statistics.median(ask["seconds"] for ask in of) / base,
                "spread": [min(ask["seconds"] for ask in of), max(ask["seconds"] for ask in of)],
                **{name: of[-1][name] for name in ("steps", "states", "bytes")},
            }
            for choice, of in asks.items()
        ],
        "base_seconds": base,
    }
    write(out, figures)
    page = page_of(out.with_stem("reuse"))
    if page.exists():
        replace(page, "checkpoints", report.checkpoints(figures))


if __name__ == "__main__":
    typer.run(main)
