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

    from vllm_patch import versions

    problem = versions.unsupported()
    if problem is not None:
        _refuse(problem)
        return
    # Not before: on another version these imports may fail.
    from vllm_patch import compat, config_hooks, connector

    connector.install()
    config_hooks.install()
    compat.install()


def _refuse(problem: str) -> None:
    logger = logging.getLogger("vllm")
    logger.warning("lmcache-hybrid is not active: %s", problem)
    try:
        from vllm_patch import config_hooks

        config_hooks.refuse_hybrid_models(problem)
    except (ImportError, AttributeError) as error:
        # As without this package: vLLM's own class serves no hybrid model.
        logger.debug("lmcache-hybrid has no place to refuse in: %r", error)
