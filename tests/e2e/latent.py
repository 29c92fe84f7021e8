# SPDX-License-Identifier: Apache-2.0
"""Ranks of a model with latent attention (MLA) on vLLM's CPU backend; only they import this."""

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e import standins

# A rank is a process of its own, and knows only what it imports.
standins.install(("torchvision", "latent_attention", "delta_attention"))


class LatentWorker(CPUWorker):
    """vLLM's CPU worker with the stand-ins that Kimi-Linear needs."""
