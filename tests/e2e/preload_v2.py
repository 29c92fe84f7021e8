# SPDX-License-Identifier: Apache-2.0
"""Imported by the server that V2 engines are forked from, before anything else."""

from tests.e2e import v2

v2.use_interpreter()

import vllm.entrypoints.llm  # noqa: E402, F401
import vllm.model_executor.layers.mamba.mamba_mixer2  # noqa: E402, F401
import vllm.model_executor.model_loader  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
import vllm.v1.worker.gpu.model_runner  # noqa: E402, F401

v2.run_fewer_programs()
