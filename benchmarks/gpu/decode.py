# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.gpu.decode: what hits save on a GPU, and what they cost who decodes.

One engine, alone on its GPU, with weights of no meaning: sizes and times are a real model's,
answers are not. Run it again with ``--alone`` for the engine without a connector.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import header, write

HITS = "vllm:external_prefix_cache_hits"
# Tokens of each prompt beyond its length, which no hit covers.
TAIL = 100
STREAM_TOKENS, EVERY, OTHERS = 300, 40, 6
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-3b": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_hidden_layers": 40,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_multiplier": 0.015625,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
        },
    ),
    "qwen3.5-27b": (
        "Qwen3_5Text",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")],
    model: Annotated[
        str, typer.Option(help=f"A size ({', '.join(SIZES)}), or a folder with a model.")
    ] = "granite-3b",
    flags: Annotated[str, typer.Option(help="Further arguments of the engine, as JSON.")] = "{}",
    lengths: Annotated[str, typer.Option(help="Tokens of prompts.")] = "4096,16384,32768",
    rounds: Annotated[int, typer.Option(help="Measurements of each arm, in turns.")] = 5,
    alone: Annotated[bool, typer.Option("--alone", help="No connector.")] = False,
) -> None:
    """Time first tokens of cold prompts and hits, then decoding while other prompts arrive."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        arguments: dict[str, Any] = {"model": model, "max_num_seqs": 16, "seed": 0}
        if model in SIZES:
            arguments |= {"model": _folder_of(model, folder), "load_format": "dummy"}
        arguments |= {"disable_log_stats": False, "enable_prefix_caching": True}
        if not alone:
            transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
            arguments["kv_transfer_config"] = transfer
        engine = Timed({**arguments, **json.loads(flags)})
        figures = {
            **header("benchmarks.gpu.decode"),
            **engine.facts,
            "first_token_ms": engine.first_tokens(list(map(int, lengths.split(","))), rounds),
        }
        write(out, figures)  # what follows takes longer
        figures["between_tokens_ms"] = engine.between_tokens(rounds)
        write(out, figures)
        engine.stop()
    sys.stdout.flush()
    os._exit(0)  # LMCache's event loop thread would keep the interpreter alive


def _folder_of(size: str, folder: str) -> str:
    """Write the configuration and a tokenizer, no weights."""
    import transformers

    from lmcache_hybrid.tools.tiny_models import make_tokenizer

    name, config = SIZES[size]
    special = {"bos_token_id": None, "pad_token_id": 256, "eos_token_id": 256}
    architecture = f"{name.removesuffix('Text')}ForCausalLM"
    getattr(transformers, f"{name}Config")(
        **config,
        **special,
        vocab_size=320,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        architectures=[architecture],
        dtype="bfloat16",
    ).save_pretrained(folder)
    make_tokenizer(131_072).save_pretrained(folder)
    return folder


def prompt_of(tokens: int, seed: object) -> list[int]:
    dice = random.Random(str(seed))
    return [dice.randrange(32, 127) for _ in range(tokens)]


class Timed:
    """One engine in a process of its own, asked by this thread.

    Attributes:
        facts: of the engine, for the JSON file.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        started = time.monotonic()
        context = UsageContext.OPENAI_API_SERVER  # a server's defaults
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), context)
        self._stored = "kv_transfer_config" in arguments
        self._asked = 0
        config = self._engine.vllm_config
        self.facts = {
            "seconds_to_start": round(time.monotonic() - started, 1),
            "connector": self._stored,
            "block_size": config.cache_config.block_size,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "graphs": str(config.compilation_config.cudagraph_mode),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def _add(self, ids: list[int], tokens: int, save: bool) -> str:
        from vllm import SamplingParams

        skip = {"kv_transfer_params": {"lmcache.skip_save": True}}
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if save or not self._stored else skip,
        )
        self._asked += 1
        self._engine.add_request(str(self._asked), {"prompt_token_ids": ids}, params)
        return str(self._asked)

    def _first(self, ids: list[int], save: bool = False) -> tuple[float, int]:
        """(ms to the first token, cached tokens)."""
        started = time.perf_counter()
        self._add(ids, 1, save)
        took, cached = 0.0, 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                took, cached = time.perf_counter() - started, output.num_cached_tokens or 0
        return took * 1000, cached

    def _forget(self) -> None:
        while not self._engine.reset_prefix_cache():
            time.sleep(0.05)

    def _loaded(self) -> int:
        return sum(each.value for each in self._engine.get_metrics() if each.name == HITS)

    def first_tokens(self, lengths: list[int], rounds: int) -> dict[str, Any]:
        """Per length and arm, ms; hits of the store end where vLLM's own do."""
        for length in lengths:  # kernels are chosen and compiled
            self._first(prompt_of(length + TAIL, f"warm {length}"))
        result: dict[str, Any] = {}
        for length in lengths:
            times: dict[str, list[float]] = {}
            for round_ in range(rounds):
                ids = prompt_of(length + TAIL, f"{length} {round_}")
                self._forget()
                new = prompt_of(length + TAIL, f"new {length} {round_}")
                times.setdefault("cold", []).append(self._first(new)[0])
                times.setdefault("cold, saved", []).append(self._first(ids, save=True)[0])
                time.sleep(1)  # until the save has ended
                took, own = self._first(ids)
                times.setdefault("own hit", []).append(took)
                if self._stored:
                    self._forget()
                    before = self._loaded()
                    took, cached = self._first(ids)
                    assert cached == own == self._loaded() - before, (cached, own)
                    times.setdefault("hit in RAM", []).append(took)
            result[str(length)] = {"hit_tokens": own, **times}
            _show(f"{length} tokens", times)
        return result

    def between_tokens(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """Per arm and round: mean, p99 and largest gap between a stream's tokens, in ms.

        Beside the stream OTHERS prompts arrive: none, hits of vLLM's own cache, of the store,
        or new ones.
        """
        known = [prompt_of(8192 + TAIL, f"known {number}") for number in range(OTHERS)]
        for ids in known:
            self._first(ids, save=True)
        time.sleep(2)
        arms = ["none", "own hits", *(["hits in RAM"] if self._stored else []), "new prompts"]
        result: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for round_ in range(rounds + 1):
            for arm in random.Random(round_).sample(arms, len(arms)):
                gaps = self._stream(arm, known, round_)
                if round_:
                    p99 = sorted(gaps)[len(gaps) * 99 // 100]
                    row = {"mean": mean(gaps), "p99": p99, "largest": max(gaps)}
                    result[arm].append(row)
        for arm, rows in result.items():
            _show(f"beside {arm}", {key: [row[key] for row in rows] for key in rows[0]})
        return result

    def _stream(self, arm: str, known: list[list[int]], round_: int) -> list[float]:
        self._forget()
        if arm == "own hits":
            for ids in known:
                self._first(ids)
        before = self._loaded()
        stream = self._add(prompt_of(200, f"{arm} {round_}"), STREAM_TOKENS, False)
        stamps: list[float] = []
        asked = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id == stream:
                    stamps.append(time.perf_counter())
            if arm != "none" and asked < OTHERS and len(stamps) >= EVERY * (asked + 1):
                new = prompt_of(8192 + TAIL, f"{round_} {asked}")
                self._add(new if arm == "new prompts" else known[asked], 1, False)
                asked += 1
        assert (self._loaded() > before) == (arm == "hits in RAM"), arm
        times = stamps[EVERY // 2 :]
        return [(after - earlier) * 1000 for earlier, after in zip(times, times[1:])]

    def stop(self) -> None:
        self._engine.engine_core.shutdown()


def _show(title: str, times: dict[str, list[float]]) -> None:
    cells = (f"{k} {median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for k, v in times.items())
    print(f"{title}, ms: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
