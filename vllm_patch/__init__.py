# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: makes ``LMCacheConnectorV1`` serve hybrid models.

vLLM calls :func:`register` in the API server, in EngineCore and in every
worker (entry point ``vllm.general_plugins``), perhaps more than once.
"""

import logging

_registered = False


def register() -> None:
    """Install the patched connector, the defaults and the upstream repairs.

    Idempotent. Mutates vLLM's classes in this process only. Never raises: a
    plugin error would take down engines that do not use LMCache at all, so an
    unsupported version turns into a refusal when a hybrid model asks for the
    connector (see :mod:`vllm_patch.config_hooks`).
    """
    global _registered
    if _registered:
        return
    _registered = True

    from vllm_patch import compat, config_hooks, connector, versions

    problem = versions.unsupported()
    if problem is not None:
        logging.getLogger("vllm").warning("lmcache-hybrid is not active: %s", problem)
        config_hooks.refuse_hybrid_models(problem)
        return
    connector.install()
    config_hooks.install()
    compat.install()
