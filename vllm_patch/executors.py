# SPDX-License-Identifier: Apache-2.0
"""Lets ranks that Ray places know their scheduler, before vLLM starts them."""

import functools

from vllm.config import VllmConfig

from lmcache_hybrid.core.by_ray import name_scheduler, placed_by_ray
from vllm_patch.configuration import is_ours


def install() -> None:
    """Patch vLLM. Mutates the class ``Executor``."""
    from vllm.v1.executor.abstract import Executor

    original = Executor.__init__

    @functools.wraps(original)
    def __init__(self: Executor, vllm_config: VllmConfig) -> None:
        if is_ours(vllm_config) and placed_by_ray(vllm_config.parallel_config):
            name_scheduler(vllm_config)
        original(self, vllm_config)

    Executor.__init__ = __init__
