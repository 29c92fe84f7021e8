# SPDX-License-Identifier: Apache-2.0
"""The newest releases on PyPI, from its public JSON."""

import json
import urllib.request
from typing import Any

from packaging.version import InvalidVersion, Version

NEWEST = "newest"


def ask_pypi(project: str) -> dict[str, Any]:
    """What PyPI says of a project."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{project}/json", timeout=60) as answer:
        return json.load(answer)


def newest(said: dict[str, Any]) -> list[str]:
    """The newest release, and the newest pre-release if it is newer; oldest first.

    Releases without files, those whose files are all yanked, and development snapshots do
    not count.
    """
    found = []
    for text, files in said["releases"].items():
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if not version.is_devrelease and any(not file["yanked"] for file in files):
            found.append(version)
    final = max((v for v in found if not v.is_prerelease), default=None)
    last = max(found, default=None)
    return [str(v) for v in dict.fromkeys((final, last)) if v is not None]


def named(versions: list[str], project: str) -> list[str]:
    """``versions``, with "newest" replaced by what that is today."""
    found: list[str] = []
    for version in versions:
        found += newest(ask_pypi(project)) if version == NEWEST else [version]
    return list(dict.fromkeys(found))
