# SPDX-License-Identifier: Apache-2.0
"""Reads how much memory the container of this process may use."""

import math
from pathlib import Path, PurePath

# The control groups of this process, and where their files are.
_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit() -> float:
    """Return the bytes that Kubernetes, Docker or systemd allow; inf where there is no limit.

    Above it the kernel kills the process, without a word in its log.
    """
    try:
        lines = _GROUPS.read_text(errors="replace").splitlines()
    except OSError:
        return math.inf
    found = [math.inf]
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if not controllers:  # version 2
            top, name = _MOUNTED, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = _MOUNTED / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see only its own group, as the top; each limits those below.
        group = PurePath(path.lstrip("/"))
        for each in (group, *group.parents, PurePath()):
            try:
                text = (top / each / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # else "max"
                found.append(float(text))
    return min(found)
