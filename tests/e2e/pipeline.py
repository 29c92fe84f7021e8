# SPDX-License-Identifier: Apache-2.0
"""A pipeline of stages on vLLM's CPU backend, see :class:`StageWorker`."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """vLLM's CPU worker with the buffer for what the stage before sends.

    vLLM allocates it in a warm-up run, which its CPU backend leaves out with ``enforce_eager``:
    the second stage then ends at its first step, with or without a connector. Seen in vLLM 0.32.0;
    0.33.0 has the same code.
    """

    def compile_or_warm_up_model(self) -> Any:
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
        return super().compile_or_warm_up_model()
