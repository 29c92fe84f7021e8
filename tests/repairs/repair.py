# SPDX-License-Identifier: Apache-2.0
"""Tells when a repair of vLLM or LMCache can be deleted.

Each repair has a test that runs upstream's own code without it and returns whether the bug
shows. On a release without the bug the test fails and says what to delete.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

from lmcache_hybrid.upstream import versions
from tests.compat.names import HOOKS

# A function or a method of ours that repairs something.
Repair = Callable[..., Any]
Test = Callable[..., bool]

# Names of repairs, "vllm_patch.scheduler_repairs.reserve_windows", that a test was written for.
TESTED: set[str] = set()


def shows_bug_of(
    *repairs: Repair, fixed_in: str | None = None, since: str | None = None
) -> Callable[[Test], Callable]:
    """Make a test of a function that returns whether upstream alone still has a bug.

    Args:
        repairs: ours, for this bug.
        fixed_in: upstream's first release without the bug, where there is one. Until it is
            the oldest that we support, the bug must show before it and must not from it on.
        since: upstream's first release with the bug, where an older one is supported.
    """
    TESTED.update(name_of(repair) for repair in repairs)

    def decorate(test: Test) -> Callable:
        @functools.wraps(test)
        def judged(*args: Any, **kwargs: Any) -> None:
            upstream = upstream_of(repairs[0])
            label, here = upstream.label, versions.installed(*upstream.distributions)
            assert here is not None
            if since is not None and before(here, since):
                pytest.skip(f"{label} {here} does not have the bug yet")
            broken = test(*args, **kwargs)
            assert isinstance(broken, bool), "return whether the bug shows"
            problem = verdict(broken, here, oldest(label), fixed_in)
            if problem:
                pytest.fail(problem.format(label=label, repair=" and ".join(map(where, repairs))))

        return judged

    return decorate


def verdict(broken: bool, here: str, oldest: str, fixed_in: str | None) -> str | None:
    """What has to be done, with places for ``label`` and ``repair``; None for nothing.

    Args:
        broken: whether the bug shows.
        here: upstream's version that runs.
        oldest: its oldest release that we support.
        fixed_in: see :func:`shows_bug_of`.
    """
    if fixed_in is not None and not before(oldest, fixed_in):
        return (
            f"delete me: {{label}} {oldest}, the oldest supported release, "
            "no longer needs {repair}"
        )
    expected = fixed_in is None or before(here, fixed_in)
    if broken == expected:
        return None
    if broken:
        return f"{{label}} {here} needs {{repair}} again, although fixed_in is {fixed_in}"
    if before(oldest, here):
        return (
            f"delete me: {{label}} {here} no longer needs {{repair}}; {oldest} is still "
            f'supported, so give this test fixed_in="{Version(here).base_version}" until it is not'
        )
    return f"delete me: {{label}} {here} no longer needs {{repair}}"


def before(version: str, release: str) -> bool:
    """Whether a version comes before a release; its release candidates do not."""
    return Version(Version(version).base_version) < Version(release)


def oldest(label: str) -> str:
    """Oldest supported release of "vLLM" or "LMCache"."""
    index = [package.label for package in versions.PACKAGES].index(label)
    return min((pair.releases[index] for pair in versions.PAIRS), key=Version)


def upstream_of(repair: Repair) -> versions.Package:
    """What is repaired."""
    label = "vLLM" if repair.__module__.startswith("vllm_patch.") else "LMCache"
    return next(package for package in versions.PACKAGES if package.label == label)


def name_of(repair: Repair) -> str:
    return f"{repair.__module__}.{repair.__qualname__}"


def where(repair: Repair) -> str:
    return f"{repair.__qualname__} ({repair.__module__.replace('.', '/')}.py)"


def without(patch: pytest.MonkeyPatch, repair: Repair) -> None:
    """Put back what a repair of ``vllm_patch`` has replaced in vLLM's classes."""
    file = f"{repair.__module__.replace('.', '/')}.py"
    replaced = []
    for hook in HOOKS:
        owner_name, _, name = hook.name.rpartition(".")
        if hook.replaced_in != file or not owner_name:
            continue
        owner = getattr(importlib.import_module(hook.module), owner_name)
        found = vars(owner).get(name)
        function, outer = getattr(found, "__func__", found), None
        while not _is_of(repair, function) and hasattr(function, "__wrapped__"):
            function, outer = function.__wrapped__, function
        if not _is_of(repair, function):
            continue
        original = function.__wrapped__
        assert not _is_in(repair, original), f"{where(repair)} was applied twice in this process"
        if outer is not None:  # another repair of the same method
            (cell,) = (cell for cell in outer.__closure__ if cell.cell_contents is function)
            patch.setattr(cell, "cell_contents", original)
        elif found is function:
            patch.setattr(owner, name, original)
        else:
            patch.setattr(owner, name, type(found)(original))
        replaced.append(hook.name)
    assert replaced, f"{where(repair)} has replaced nothing here"


def _is_in(repair: Repair, function: Any) -> bool:
    """Whether ``function`` was replaced by a repair, perhaps below others."""
    while hasattr(function, "__wrapped__"):
        if _is_of(repair, function):
            return True
        function = function.__wrapped__
    return False


def _is_of(repair: Repair, function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return bool(code) and code.co_qualname.startswith(f"{repair.__name__}.<locals>.")
