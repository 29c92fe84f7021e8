# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: makes ``LMCacheConnectorV1`` serve hybrid models.

vLLM calls :func:`register` in the API server, in EngineCore and in every worker (entry point
``vllm.general_plugins``), maybe more than once. Function by function:
``lmcache_hybrid/upstream/signatures.py``. ``loaders`` installs what only a worker needs.

| Module | What it replaces in vLLM |
|---|---|
| ``configuration`` | defaults, and refusals at start-up, in ``VllmConfig`` |
| ``unsound`` | nothing; it refuses settings with which hits would be wrong |
| ``connector`` | the class ``LMCacheConnectorV1`` |
| ``scheduler_repairs`` | bugs of the scheduler, one repair each |
| ``cpu`` | bugs of the CPU platform, one repair each |
| ``partial_hits`` | bugs of vLLM's own hits inside a block, one repair each |
| ``kimi_k3`` | what Kimi-K3's layers write beside a drafter (a repair) |
| ``loaders`` | model and adapter loaders, so that they note what they have loaded |
| ``events`` | the reset of vLLM's own cache, of which the connector is told (a repair, too) |
| ``sessions`` | sessions of streaming input, whose next parts start over (repairs, too) |
| ``executors`` | the start of ranks by Ray, which are told who their scheduler is |
| ``sleep`` | the workers' sleep mode, of which the connector is told |
| ``look_ahead`` | what block hashes cover beside a drafter (a repair, too) |
| ``media_marks`` | renderers in the API server, which mark how media are named |
"""

import logging

_registered = False


def register() -> None:
    """Install the patched connector, the defaults and the upstream repairs.

    Idempotent. Mutates vLLM's classes in this process only. Never raises: a plugin error
    would take down engines that do not use LMCache at all. An unsupported version, or a patch
    that fails, turns into a refusal of every hybrid model that asks for the connector, and no
    later call tries again. Imports of modules that LMCache has moved always work, because dense
    models need them.
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
        Why hybrid models cannot be served, in one sentence, or None when they can. Patches
        before an error stay; on engines without this connector they act only where a bug shows.
    """
    try:
        from lmcache_hybrid.upstream import signatures, versions

        # Check first: half of the patches would be worse than none.
        problem = versions.unsupported() or versions.changed(signatures.AT_START)
        if problem is not None:
            return problem
        # Not before: on another version these imports may fail.
        from vllm_patch import (
            configuration,
            connector,
            cpu,
            events,
            executors,
            loaders,
            look_ahead,
            media_marks,
            partial_hits,
            scheduler_repairs,
            sessions,
        )

        configuration.install()
        media_marks.install()
        scheduler_repairs.install()
        look_ahead.install()
        cpu.install()
        partial_hits.install()
        sessions.install()
        events.install()
        executors.install()
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
        from vllm_patch import configuration

        configuration.refuse_hybrid_models(problem)
    except Exception as error:
        # vLLM's own class serves no hybrid model, as without this package.
        logger.warning(
            "lmcache-hybrid could not hook vLLM's configuration either (%r): vLLM itself refuses "
            "hybrid models with LMCacheConnectorV1.",
            error,
        )
