# SPDX-License-Identifier: Apache-2.0
"""Imports LMCache's in-process part from the home where the installed release keeps it.

Until 0.5.6 that is ``lmcache``, since 0.5.7 ``lmcache.inprocess``. This package imports the
:data:`NAMES` from here::

    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine

vLLM looks for LMCache's adapter in the old home only: :func:`install` redirects imports of a
module that has moved. Imports nothing of LMCache by itself.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

OLD, NEW = "lmcache", "lmcache.inprocess"

# Names that this package imports, with their modules, relative to either home.
NAMES = {
    "LMCacheEngine": "v1.cache_engine",
    "LMCacheEngineBuilder": "v1.cache_engine",
    "LMCacheManager": "v1.manager",
    "SocketParams": "v1.rpc.zmq_transport",
    "VllmServiceFactory": "integration.vllm.vllm_service_factory",
    "ZmqReqRepClientTransport": "v1.rpc.zmq_transport",
    "ZmqRouterServerTransport": "v1.rpc.zmq_transport",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return take(NAMES[name], name)


def take(module: str, name: str) -> Any:
    """Import ``name`` of LMCache's in-process part.

    Args:
        module: relative to the homes, such as ``v1.cache_engine``. If both homes have one of
            this name, the new home's counts.

    Raises:
        ImportError: neither home has it.
    """
    for home in (NEW, OLD):
        found = _module(f"{home}.{module}")
        if found is not None and hasattr(found, name):
            return getattr(found, name)
    raise ImportError(
        f"LMCache {_release()} has no {name} in {OLD}.{module} or {NEW}.{module}", name=name
    )


def moved(module: str) -> str | None:
    """Return the name of ``module`` in the new home; None if it is not of the old one."""
    if not module.startswith(f"{OLD}.") or f"{module}.".startswith(f"{NEW}."):
        return None
    return NEW + module.removeprefix(OLD)


def install() -> bool:
    """Let imports of modules that moved find them, for vLLM and other users of the old names.

    Does nothing where LMCache is not installed or has the old home only. Idempotent; imports
    neither LMCache nor vLLM.

    Returns:
        Whether imports are mapped in this process.
    """
    if any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        return True
    try:
        spec = importlib.util.find_spec(OLD)
    except (ImportError, ValueError):  # somebody's stub in sys.modules
        spec = None
    folders = spec.submodule_search_locations if spec else None
    if not any(Path(folder, "inprocess", "__init__.py").is_file() for folder in folders or ()):
        return False
    # In front: else Python would execute each module of a moved package a second time.
    sys.meta_path.insert(0, _MovedFinder())
    return True


class _MovedFinder(MetaPathFinder):
    """Maps a module that is missing in the old home to the one in the new home.

    Both names are one module object, executed once. A module that the old home has is never
    mapped, even if the new home has another one of its name.
    """

    _told = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = moved(fullname)
        if new is None or (not self._in_moved_package(fullname) and self._exists(fullname, path)):
            return None
        try:
            found = importlib.util.find_spec(new)
        except ModuleNotFoundError:  # the package around it
            return None
        if found is None:
            return None
        self._tell(fullname, new)
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _OneModule(new), origin=found.origin, is_package=is_package)

    def _in_moved_package(self, fullname: str) -> bool:
        package = sys.modules.get(fullname.rpartition(".")[0])
        return package is not None and package.__name__ != fullname.rpartition(".")[0]

    def _exists(self, fullname: str, path: Sequence[str] | None) -> bool:
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        return any(finder.find_spec(fullname, path) is not None for finder in others)

    def _tell(self, old: str, new: str) -> None:
        if self._told:
            return
        self._told = True
        logging.getLogger("vllm.lmcache_hybrid.upstream.lmcache_home").info(
            "LMCache %s has moved %s to %s: imports by the old name, and by those of all other "
            "modules that moved to %s, get the module from there.",
            _release(),
            old,
            new,
            NEW,
        )


class _OneModule(Loader):
    """Gives a second name to a module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It ran under its own name; restore the spec that importlib has just replaced.
        vars(module)["__spec__"] = self._spec


def _module(name: str) -> ModuleType | None:
    """Import a module; None if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that it imports may be missing instead.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _release() -> str:
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return "(unknown release)"
