# SPDX-License-Identifier: Apache-2.0
"""The process that an engine runs in: carries out the verbs that :class:`engine.Engine` sends."""

import atexit
import contextlib
import copy
import faulthandler
import gc
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from tests.e2e.processes import compile_nothing, fork_what_is_spawned, inspect_models_here


def text_file(end: Connection, mode: str) -> TextIO:
    """One end of a pipe as a text file. Closes ``end``."""
    with end:
        return os.fdopen(os.dup(end.fileno()), mode)


class Child:
    """The engine's side of the pipe; one method per verb. One thread, the process's main one."""

    def __init__(self, arguments: dict, commands: TextIO, replies: TextIO) -> None:
        from vllm import LLM

        self.commands, self.replies = commands, replies
        self._inside = None
        if arguments.get("async_scheduling"):
            _let_cpu_schedule_ahead()
        self._llm = LLM(**arguments)
        # None where the core runs in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1).
        self._core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        connector = self._core and self._core.scheduler.connector
        self._hybrid = connector

    def stop(self) -> None:
        """Shut the core down: LMCache's event loop thread would keep the interpreter alive."""
        self._llm.llm_engine.engine_core.shutdown()

    def info(self) -> dict:
        """What the parent keeps as ``Engine.info``."""
        if self._core is None:
            return {"block_size": self._llm.llm_engine.vllm_config.cache_config.block_size}
        config = self._core.vllm_config
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        return {
            "block_size": groups[0].kv_cache_spec.block_size,
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
            "block_sizes": [group.kv_cache_spec.block_size for group in groups],
            "group_bytes": [
                group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
            ],
            "hma": not config.scheduler_config.disable_hybrid_kv_cache_manager,
            "connector": type(self._core.scheduler.connector).__module__,
            "num_blocks": self._core.scheduler.kv_cache_config.num_blocks,
            "scheduler": type(self._core.scheduler).__name__,
            # On CPU each is a subclass of the GPU's.
            "runner": type(self._runner()).__base__.__module__,
            "kernel_blocks": getattr(self._runner(), "kernel_block_sizes", None),
            "batches_ahead": self._core.batch_queue_size,
        }

    def _runner(self):
        """Model runner of the one rank; None where ranks are processes of their own."""
        driver = getattr(self._core.model_executor, "driver_worker", None)
        return driver and driver.worker.model_runner

    def ask(self, prompts: list[list[int] | dict], max_tokens: int, sampling: dict) -> list[dict]:
        """Generate. A prompt is a list of ids, or one of vLLM's dicts with these keys as well.

        ``priority``; ``lora``: (name, id, path); ``prompt_embeds``: path of a saved tensor;
        ``after``: steps to make before it is added (0); ``abort``: steps after which it is
        aborted; it gets no answer.
        """
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": p} if isinstance(p, list) else dict(p) for p in prompts]
        priority = [prompt.pop("priority", 0) for prompt in prompts]
        after = [prompt.pop("after", 0) for prompt in prompts]
        abort = [prompt.pop("abort", None) for prompt in prompts]
        lora = [_lora(prompt.pop("lora", None)) for prompt in prompts]
        for prompt in prompts:
            if "prompt_embeds" in prompt:
                prompt["prompt_embeds"] = _tensor(prompt["prompt_embeds"])

        params = SamplingParams(
            **{
                "temperature": 0,
                "max_tokens": max_tokens,
                "logprobs": 5,
                "ignore_eos": True,
                **sampling,
            }
        )
        before = self._external()
        started = time.perf_counter()
        if any(after) or abort.count(None) < len(abort):
            outputs = self._one_after_another(prompts, params, after, priority, abort)
        else:
            outputs = self._llm.generate(
                prompts,
                params,
                use_tqdm=False,
                lora_request=lora if any(lora) else None,
                priority=priority if any(priority) else None,
            )
        seconds = time.perf_counter() - started
        external = self._external() - before
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in step.items()}
                    for step in output.outputs[0].logprobs or ()
                ],
                "cached": output.num_cached_tokens or 0,
                "external": external,
                "seconds": seconds,
            }
            for output in outputs
        ]

    def _one_after_another(
        self, prompts: list, params, after: list[int], priority: list[int], abort: list[int | None]
    ) -> list:
        """Like ``generate``, but each prompt arrives, and may go, when so many steps were made."""
        engine, steps, outputs = self._llm.llm_engine, 0, {}
        names = [f"late-{index}" for index in range(len(prompts))]
        waiting = sorted(range(len(prompts)), key=after.__getitem__)
        going = {name for name, end in zip(names, abort) if end is not None}
        while waiting or engine.has_unfinished_requests():
            while waiting and after[waiting[0]] <= steps:
                index = waiting.pop(0)
                engine.add_request(names[index], prompts[index], params, priority=priority[index])
            engine.abort_request([n for n, end in zip(names, abort) if end == steps])
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            steps += 1
        return [outputs[name] for name in names if name not in going]

    def session(self, parts: list[list[int]], max_tokens: int) -> list[dict]:
        """Answer a session of streaming input as ``AsyncLLM.generate`` does with a generator.

        Each part is sent as soon as the one before has its answer.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, name = self._llm.llm_engine, "session"
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=5,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

        def send(part: list[int], name: str, **more):
            return engine.input_processor.process_inputs(
                name,
                {"prompt_token_ids": part},
                params,
                supported_tasks=engine.get_supported_tasks(),
                **more,
            )

        end = send([0], name)
        engine.input_processor.assign_request_id(end)
        answers = []
        for part in parts:
            request = send(part, end.request_id, resumable=True)
            request.external_req_id = name
            engine.output_processor.add_request(request, None, None, 0)
            # Both sides lengthen its lists; a socket would have copied them.
            engine.engine_core.add_request(copy.deepcopy(request))
            before, outputs = self._external(), []
            while sum(len(output.outputs[0].token_ids) for output in outputs) < max_tokens:
                outputs += engine.step()
            answers.append(
                {
                    "tokens": [t for output in outputs for t in output.outputs[0].token_ids],
                    "logprobs": [
                        {str(token): entry.logprob for token, entry in step.items()}
                        for output in outputs
                        for step in output.outputs[0].logprobs or ()
                    ],
                    "cached": outputs[-1].num_cached_tokens or 0,
                    "external": self._external() - before,
                    "seconds": 0.0,
                }
            )
        engine.output_processor.add_request(end, None, None, 0)
        engine.engine_core.add_request(end)
        while engine.has_unfinished_requests():
            engine.step()
        return answers

    def _external(self) -> int:
        """vLLM's own counter of tokens that the connector brought."""
        name = "vllm:external_prefix_cache_hits"
        return sum(m.value for m in self._llm.get_metrics() if m.name == name)

    def metrics(self) -> dict:
        from collections import Counter

        totals = Counter()
        for metric in self._llm.get_metrics():
            totals[metric.name.removeprefix("vllm:")] += getattr(metric, "value", 0)
        return totals

    def exported(self) -> str:
        """What ``/metrics`` would show; LMCache adds its own every ten seconds, here at once."""
        from prometheus_client import REGISTRY, generate_latest

        from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder

        for logger in LMCacheEngineBuilder._stat_loggers.values():
            logger.prometheus_logger.log_prometheus(logger.monitor.get_stats_and_clear())
        return generate_latest(REGISTRY).decode()

    def run(self, function: str, **arguments):
        """Call ``module:function`` in this process."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(**arguments)

    def forget(self) -> bool:
        return self._llm.reset_prefix_cache()

    def forget_all(self) -> bool:
        return self._llm.llm_engine.reset_prefix_cache(reset_connector=True)

    def _worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def counts(self) -> dict:
        from lmcache_hybrid.core.counts import CHECKS

        worker = self._worker()
        manager = worker.worker.store.manager
        pool = manager.local_cpu_backend
        disk = manager.storage_backends.get("LocalDiskBackend")
        files = list(disk.dict.values()) if disk else []
        allocated = pool.memory_allocator.pin_allocator.address_manager.total_allocated_size
        failed = worker.worker.counts.failed_loads.items()
        rejected = sum(n for label, n in failed if label.split(",")[0] in CHECKS)
        return {
            "scheduler": _totals(self._hybrid.scheduler.counts),
            "worker": _totals(worker.worker.counts) | {"rejected_records": rejected},
            "failed_writes": sum(worker.worker.store.failed_writes.values()),
            "pool": {
                "records": len(pool.hot_cache),
                "allocated": allocated,
                "files": len(files),
            },
            "live": {
                "tracked": len(self._hybrid.scheduler._trackers),
                "claims": len(worker.worker._lookup._claims),
                "pinned": sum(obj.is_pinned for obj in [*pool.hot_cache.values(), *files]),
                # Bytes of the pool that no stored record accounts for.
                "buffers": allocated
                - sum(obj.get_physical_size() for obj in pool.hot_cache.values()),
                # Bytes that local_disk believes to hold beyond what its index names.
                "disk_account": (disk.current_cache_size if disk else 0)
                - sum(entry.size for entry in files),
                "held": sum(obj.get_ref_count() - 1 for obj in pool.hot_cache.values()),
                "used_blocks": self._core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
                - self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            },
        }

    def rewritten(self) -> dict:
        """Bytes that were saved although a backend held them, by backend.

        Nothing after a failed load, which saves the whole prompt again.
        """
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        worker = getattr(self._worker(), "worker", None) if has_kv_transfer_group() else None
        if worker is not None:
            return {} if worker.counts.failed_loads else dict(worker.store.rewritten_bytes)
        failed, rewritten = "lmcache_hybrid_failed_loads", "lmcache_hybrid_rewritten_bytes"
        found = [m for m in self._llm.get_metrics() if getattr(m, "value", 0)]
        if any(m.name == f"vllm:{failed}" for m in found):
            return {}
        return {m.labels["source"]: m.value for m in found if m.name == f"vllm:{rewritten}"}

    def failures(self) -> dict:
        return dict(self._worker().worker.counts.failed_loads)

    def work(self) -> dict:
        """Work done for requests in the store and on the way to it, since the first call."""
        from collections import Counter

        worker = self._worker().worker
        store = worker.store
        if not hasattr(self, "_located"):
            self._located, locate = Counter(), store.locate

            def counting(keys, deadline):
                found = locate(keys, deadline)
                self._located.update(calls=1, asked=len(keys), found=len(found))
                return found

            store.locate = counting
        return {
            "lookups": self._hybrid.scheduler.counts.lookups.total(),
            "lookup_calls": self._located["calls"],
            "keys_asked": self._located["asked"],
            "keys_found": self._located["found"],
            "records_read": sum(store.reads.values()),
            "saved_attention": worker.counts.saved_attention,
            "saved_states": worker.counts.saved_states,
            "saved_bytes": worker.counts.saved_bytes,
        }

    def trim(self) -> None:
        """Give the heap's free memory back: resident memory then is what is in use."""
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)

    def reads(self) -> dict:
        return dict(self._worker().worker.store.reads)

    def hold(self) -> None:
        """Stop before the next load and run verbs until ``go``."""
        worker = self._worker().worker
        start_loads = type(worker).start_loads

        def held(metadata) -> None:
            if metadata.loads:
                del worker.start_loads
                self.reply(result="held")
                self.serve()
            start_loads(worker, metadata)

        worker.start_loads = held

    def serve(self) -> None:
        """Run verbs until ``go`` or the end of the pipe."""
        for line in self.commands:
            message = json.loads(line)
            if message["verb"] == "go":
                return
            try:
                self.reply(result=getattr(self, message.pop("verb"))(**message))
            except Exception as error:
                traceback.print_exc()
                self.reply(error=repr(error))

    def reply(self, **message) -> None:
        self.replies.write(json.dumps(message) + "\n")
        self.replies.flush()

    def fault(self, name: str, **arguments):
        """Run a method of :class:`inside.Inside` on this engine."""
        from tests.e2e.inside import Inside

        if self._inside is None:
            self._inside = Inside(self._llm, self._worker().worker)
        return getattr(self._inside, name)(**arguments)

    def writing(self) -> int:
        """Writes of LMCache's backends that have not ended."""
        from lmcache_hybrid.storage.remote.record_connector import unwrapped

        total = 0
        for backend in self._worker().worker.store.manager.storage_backends.values():
            total += len(getattr(backend, "put_tasks", ()))
            # Redis: LMCache does not list batched writes in put_tasks.
            total += getattr(unwrapped(getattr(backend, "connection", None)), "writing", 0)
        return total


def _let_cpu_schedule_ahead() -> None:
    """Keep async_scheduling, which vLLM's CPU platform turns off.

    The model runner then orders its copies to the host by CUDA streams and events. On CPU a
    copy ends at once, so streams and events do nothing.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    class Nothing:
        def __init__(self, *args, **kwargs) -> None:
            pass

        def record(self, *args) -> None:
            pass

        synchronize = wait_stream = wait_event = record

    torch.cuda.Event = torch.cuda.Stream = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = contextlib.nullcontext


def _totals(counts) -> dict[str, int]:
    """Totals over all labels, without the times."""
    values = {
        name: sum(v.values()) if isinstance(v, dict) else v for name, v in vars(counts).items()
    }
    return {name: value for name, value in values.items() if not isinstance(value, list)}


def _lora(lora: list | None):
    from vllm.lora.request import LoRARequest

    return LoRARequest(*lora) if lora else None


def _tensor(path: str):
    import torch

    return torch.load(path)


def _compute_on(cores: str) -> None:
    """Use as many threads as there are cores in ``VLLM_CPU_OMP_THREADS_BIND``.

    vLLM reads it for workers in processes of their own only. An engine in this process would
    compute with a thread for each core of the machine, and threads of two engines that wait for
    each other on the same cores take 20 times as long.
    """
    import torch

    torch.set_num_threads(len(cores.split(",")))


def main(
    arguments: dict,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
    log: Path,
    requests: Connection,
    answers: Connection,
) -> None:
    """The child: serve one engine until the pipe ends."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(log.parent)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    _compute_on(os.environ["VLLM_CPU_OMP_THREADS_BIND"])
    # vLLM collects garbage eight times at start-up, over all that it has imported.
    gc.freeze()
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
        fork_what_is_spawned(str(log))
    inspect_models_here()
    if arguments["enforce_eager"]:
        compile_nothing()
    if prepare is not None:
        prepare()
    child = Child(arguments, text_file(requests, "r"), text_file(answers, "w"))
    child.reply(result=child.info())
    child.serve()
    gc.collect = lambda generation=2: 0  # two seconds at the end: vLLM unfreezes all
    child.stop()
    atexit._run_exitfuncs()  # a forked process leaves them out
