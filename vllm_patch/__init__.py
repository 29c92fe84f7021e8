# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: makes ``LMCacheConnectorV1`` serve hybrid models.

vLLM calls :func:`register` in the API server, in EngineCore and in every
worker (entry point ``vllm.general_plugins``), perhaps more than once.
"""

import logging

_registered = False


def register() -> None:
    """Install the patched connector, the defaults and the upstream repairs.

    What LMCache has moved is found again for every model, whatever comes of the rest.

    Idempotent. Mutates vLLM's classes in this process only. Never raises: a plugin error
    would take down engines that do not use LMCache at all. So an unsupported version, or a
    patch that cannot be applied, turns into a refusal of every hybrid model that asks for
    the connector (see :mod:`vllm_patch.config_hooks`), and no later call tries again.
    """
    global _registered
    if _registered:
        return
    _registered = True
    _find_lmcache()
    problem = _install()
    if problem is not None:
        _refuse(problem)


def _install() -> str | None:
    """Patch vLLM.

    Returns:
        Why hybrid models cannot be served, in one sentence, or None when they can. What was
        patched before an error stays; without the connector, the last one, none of it acts on
        engines of others.
    """
    try:
        from lmcache_hybrid.upstream import signatures, versions

        # Half of the patches would be worse than none.
        problem = versions.unsupported() or versions.changed(signatures.AT_START)
        if problem is not None:
            return problem
        # Not before: on another version these imports may fail.
        from vllm_patch import compat, config_hooks, connector, loaders, lora_hooks, media

        config_hooks.install()
        media.install()
        lora_hooks.install()
        compat.install()
        loaders.install()
        connector.install()
    except Exception as error:
        logging.getLogger("vllm").debug("lmcache-hybrid could not patch vLLM", exc_info=True)
        return (
            f"patching this installation of vLLM failed with {type(error).__name__}: "
            f"{' '.join(str(error).split())}; install vLLM and lmcache-hybrid anew, "
            "in versions that fit each other."
        )
    return None


def _find_lmcache() -> None:
    """Let vLLM find LMCache's own adapter where LMCache has moved it: dense models need it."""
    try:
        from lmcache_hybrid.upstream import lmcache_home

        lmcache_home.install()
    except Exception:
        logging.getLogger("vllm").debug("LMCache's home could not be found", exc_info=True)


def _refuse(problem: str) -> None:
    logger = logging.getLogger("vllm")
    logger.warning("lmcache-hybrid is not active: %s", problem)
    try:
        from vllm_patch import config_hooks

        config_hooks.refuse_hybrid_models(problem)
    except Exception as error:
        # As without this package: vLLM's own class serves no hybrid model.
        logger.warning(
            "lmcache-hybrid could not hook vLLM's configuration either (%r): vLLM itself refuses "
            "hybrid models with LMCacheConnectorV1.",
            error,
        )
