# SPDX-License-Identifier: Apache-2.0
"""Ports that nobody else takes between being chosen and being listened on."""

import random
import socket
from pathlib import Path

# Linux gives a port of this range to whoever connects, or binds to port 0.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10000

# One for each port that this process was given; they go with the process.
_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens.

    They lie below the range that the kernel gives away, if that leaves room, and tests side by
    side are given different ones: an engine listens half a minute after its port was chosen.
    """
    (first_given, _) = map(int, EPHEMERAL.read_text().split())
    end = first_given if first_given > LOWEST else 1 << 16
    found: list[int] = []
    for port in random.SystemRandom().sample(range(LOWEST, end), end - LOWEST):
        if _is_free(port) and _claim(port):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} free ports from {LOWEST} to {end - 1}")


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return _binds(probe, ("", port))


def _claim(port: int) -> bool:
    """Say to the other processes of this machine that the port is ours."""
    claim = socket.socket(socket.AF_UNIX)
    # The zero byte: a name that is no file, and is free again when its last socket closes.
    if _binds(claim, f"\0lmcache-hybrid/tests/port/{port}"):
        _claims.append(claim)
        return True
    claim.close()
    return False


def _binds(one: socket.socket, address: tuple[str, int] | str) -> bool:
    try:
        one.bind(address)
    except OSError:
        return False
    return True
