# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of tests side by side."""

import random
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests import ports


@pytest.fixture(autouse=True)
def claims(monkeypatch):
    """Claims of the test's own, which end with it."""
    claims: list[socket.socket] = []
    monkeypatch.setattr(ports, "_claims", claims)
    yield
    for claim in claims:
        claim.close()


def four_in_a_row() -> int:
    """The first of four ports on which nobody listens, and which no test is given."""
    for first in random.SystemRandom().sample(range(2000, ports.LOWEST - 4), 1000):
        if all(ports._is_free(first + each) for each in range(4)):
            return first
    raise OSError("no four free ports in a row")


def test_no_port_is_given_twice_or_while_somebody_listens(monkeypatch, tmp_path):
    first, few = four_in_a_row(), tmp_path / "range"
    few.write_text(f"{first + 4} 60999")
    monkeypatch.setattr(ports, "EPHEMERAL", few)
    monkeypatch.setattr(ports, "LOWEST", first)
    command = f"""
from pathlib import Path
from tests import ports
ports.EPHEMERAL, ports.LOWEST = Path({str(few)!r}), {first}
print(*ports.free_ports(2))
ports.free_ports(1)
"""
    with ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", first + 1)))
        mine = ports.free_ports(1)
        other = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=60
        )
    given = [*mine, *map(int, other.stdout.split())]
    assert sorted(given) == [first, first + 2, first + 3]
    assert "fewer than 1 free ports" in other.stderr


def test_a_kernel_that_gives_all_ports_away_leaves_some(monkeypatch, tmp_path):
    (everything := tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(ports, "EPHEMERAL", everything)
    assert len(set(ports.free_ports(3))) == 3
