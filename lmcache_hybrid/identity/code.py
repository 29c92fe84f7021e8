# SPDX-License-Identifier: Apache-2.0
"""Identifies code of other packages: by distribution and version, or by its content."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partialmethod
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from pathlib import Path
from types import FunctionType

import xxhash

# Python's own files in a package. All others count: kernels may be compiled from any of them at
# run time.
_CACHE = "__pycache__"
# Modules without files of a package.
_NO_PACKAGE = ("builtins", "__main__", "__mp_main__")
# Packages whose decorators do not change the results of functions.
_DECORATORS = frozenset(
    {"huggingface_hub", "torch", "lmcache_hybrid", "vllm_patch", *sys.stdlib_module_names}
)
# Types of class attributes that hold functions.
_HOLDERS = (
    FunctionType,
    staticmethod,
    classmethod,
    property,
    cached_property,
    partialmethod,
    type(cache(len)),
)


def homes(code: type) -> set[str]:
    """Find the modules that a class is written in, without those of its bases.

    A class derived at run time, as vLLM does with ``type()``, says ``abc``: it counts as written
    where its base and its own functions are. A plugin may have replaced a function of the class,
    so other packages' functions count, except decorators, and those in classes of torch, which
    transformers replaces.
    """
    top, on_the_spot = code.__module__.partition(".")[0], code.__module__ == "abc"
    own = {function.__globals__.get("__name__", "") for function in _functions(code)}
    own = {name for name in own if name.partition(".")[0] not in (top, *_DECORATORS)}
    if on_the_spot:
        return own | (homes(code.__mro__[1]) if len(code.__mro__) > 1 else set())
    return {code.__module__} | (set() if top in _DECORATORS else own)


def _functions(code: type) -> Iterator[FunctionType]:
    """Yield the functions in a class's body, and those within decorators and descriptors.

    Found by type, not by ``__module__``, which ``functools.wraps`` copies.
    """
    within = [*vars(code).values()]
    while within:
        each = within.pop()
        if isinstance(each, FunctionType):
            yield each
        if isinstance(each, _HOLDERS):
            names = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func")
            within += [getattr(each, name) for name in names if hasattr(each, name)]


@cache
def code_identity(module: str) -> str | None:
    """Identify the code of a module's package.

    Args:
        module: dotted name of a module that is, or can be, imported.

    Returns:
        Distribution and version. If none has installed the module's file (a checkout, an
        editable install), also a digest of all files of the outermost package. None if unknown:
        the module has no files, or is the program that was started.
    """
    top = module.partition(".")[0]
    if top in _NO_PACKAGE:
        return None
    names, installed = _distributions(top, module)
    if installed:
        return " ".join(names)
    try:
        content = _content(top)
    except OSError:
        return None
    return content and " ".join([*names, content])


@cache
def _packages() -> Mapping[str, list[str]]:
    """Map packages to the names of their distributions."""
    return packages_distributions()


def _distributions(top: str, module: str) -> tuple[list[str], bool]:
    """List the distributions of a package with versions, and whether one installed the module."""
    spec = _spec(module) or _spec(top)
    file = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    found, installed, editable = [], False, False
    for name in sorted(set(_packages().get(top, ()))):
        try:
            distribution = Distribution.from_name(name)
        except PackageNotFoundError:
            continue
        found.append(f"{name}=={distribution.version}")
        editable = editable or _is_editable(distribution)
        installed = installed or file is not None and _has_installed(distribution, file)
    return found, installed and not editable


def _has_installed(distribution: Distribution, file: Path) -> bool:
    """Whether the file came with the distribution, and does not only shadow it."""
    return os.path.join(os.path.realpath(file.parent), file.name) in _files_installed(
        distribution.name
    )


@cache
def _files_installed(name: str) -> frozenset[str]:
    """List the files of a distribution; none for a checkout of setuptools' ``develop``."""
    distribution = Distribution.from_name(name)
    if distribution.read_text("RECORD") is None:
        return frozenset()
    # Folders may be links (lib64), and so may the files of an installation themselves.
    root = os.path.realpath(str(distribution.locate_file("")))
    return frozenset(
        os.path.normpath(os.path.join(root, file)) for file in distribution.files or ()
    )


def _is_editable(distribution: Distribution) -> bool:
    """Whether it is an editable install, whose files change under one version; see PEP 610."""
    text = distribution.read_text("direct_url.json")
    try:
        return text is not None and "editable" in json.loads(text).get("dir_info", {})
    except (ValueError, AttributeError):
        return True


@cache
def _content(top: str) -> str | None:
    """Digest all files of a package or module. Raises OSError."""
    spec = _spec(top)
    if spec is None:
        return None
    digest, empty = xxhash.xxh3_128(), True
    # A package may have folders that only its import finds (``pkgutil.extend_path``).
    imported = getattr(sys.modules.get(top), "__path__", ())
    for name, file in _files(spec, {*(spec.submodule_search_locations or ()), *imported}):
        content, empty = file.read_bytes(), False
        digest.update(f"{name} {len(content)}\n".encode(errors="surrogateescape") + content)
    return None if empty else f"code {digest.hexdigest()}"


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: __main__, and modules created by hand
        return None


def _files(spec: ModuleSpec, folders: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield files with their names in the package, in fixed order; follows links.

    Args:
        folders: of the package; none for a module that is a single file.
    """
    if not folders:
        if spec.has_location and spec.origin is not None:
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for folder in sorted(folders):
        seen = {os.path.realpath(folder)}
        for path, inner, names in os.walk(folder, followlinks=True):
            real = {name: os.path.realpath(os.path.join(path, name)) for name in sorted(inner)}
            inner[:] = [name for name in real if name != _CACHE and real[name] not in seen]
            seen.update(real[name] for name in inner)
            for name in sorted(names):
                file = Path(path, name)
                if file.is_file():
                    yield file.relative_to(folder).as_posix(), file
