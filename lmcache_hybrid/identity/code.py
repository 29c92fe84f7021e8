# SPDX-License-Identifier: Apache-2.0
"""Names code that other packages bring: by distribution and version, or by its content."""

import importlib.util
import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from pathlib import Path
from types import FunctionType

import xxhash

# Files that decide what a package does; kernels are compiled.
_CODE = (".py", ".so", ".pyd")
# Given out by Python itself, or made up on the spot.
_NO_PACKAGE = ("builtins", "__main__", "__mp_main__")


def homes(code: type) -> set[str]:
    """Modules that a class is written in.

    One that was derived on the spot, as vLLM does with ``type()``, says ``abc``: it is written
    where its base and its own functions are.
    """
    if code.__module__ != "abc":
        return {code.__module__}
    kinds = (FunctionType, staticmethod, classmethod)
    own = {each.__module__ for each in vars(code).values() if isinstance(each, kinds)}
    return own | (homes(code.__mro__[1]) if len(code.__mro__) > 1 else set())


@cache
def code_identity(module: str) -> str | None:
    """Name the code that a module is part of.

    Args:
        module: dotted name of a module that is, or can be, imported.

    Returns:
        Distribution and version. Where there is none, or the distribution's files are those of
        a checkout (an editable install), also a digest of all code of the outermost package.
        None where nobody can tell: the module has no files, or is the program that was started.
    """
    top = module.partition(".")[0]
    if top in _NO_PACKAGE:
        return None
    names, editable = _distributions(top)
    if names and not editable:
        return " ".join(names)
    try:
        content = _content(top)
    except OSError:
        return None
    return content and " ".join([*names, content])


def _distributions(top: str) -> tuple[list[str], bool]:
    """Names and versions of those that hold a package, and whether one is of a checkout."""
    found, editable = [], False
    for name in sorted(set(packages_distributions().get(top, ()))):
        try:
            distribution = Distribution.from_name(name)
        except PackageNotFoundError:
            continue
        found.append(f"{name}=={distribution.version}")
        editable = editable or _is_editable(distribution)
    return found, editable


def _is_editable(distribution: Distribution) -> bool:
    """Whether files were left where they are edited, under one version; see PEP 610."""
    text = distribution.read_text("direct_url.json")
    try:
        return text is not None and "editable" in json.loads(text).get("dir_info", {})
    except (ValueError, AttributeError):
        return True


def _content(top: str) -> str | None:
    """Digest of all code of a package or module. Raises OSError."""
    spec = _spec(top)
    if spec is None:
        return None
    digest, empty = xxhash.xxh3_128(), True
    for name, file in _files(spec):
        content, empty = file.read_bytes(), False
        digest.update(f"{name} {len(content)}\n".encode(errors="surrogateescape") + content)
    return None if empty else f"code {digest.hexdigest()}"


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: __main__, and modules made by hand
        return None


def _files(spec: ModuleSpec) -> Iterator[tuple[str, Path]]:
    """Files of code with their names in the package, in one order."""
    folders = sorted(spec.submodule_search_locations or ())
    if not folders:
        if spec.has_location and spec.origin is not None:
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for folder in folders:
        for path, inner, names in os.walk(folder):
            inner.sort()
            for name in sorted(name for name in names if name.endswith(_CODE)):
                file = Path(path, name)
                yield file.relative_to(folder).as_posix(), file
