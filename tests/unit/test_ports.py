# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of tests side by side."""

import socket
import subprocess
import sys

from tests import ports

# Fewer than tests side by side ask for, and none of theirs.
FIRST, LAST = 9990, 9993


def test_no_port_is_given_twice_or_while_somebody_listens(monkeypatch, tmp_path):
    few = tmp_path / "range"
    few.write_text(f"{LAST + 1} 60999")
    monkeypatch.setattr(ports, "EPHEMERAL", few)
    monkeypatch.setattr(ports, "LOWEST", FIRST)
    with socket.create_server(("127.0.0.1", FIRST + 1)):
        mine = ports.free_ports(1)
        command = f"""
from pathlib import Path
from tests import ports
ports.EPHEMERAL, ports.LOWEST = Path({str(few)!r}), {FIRST}
print(*ports.free_ports(2))
ports.free_ports(1)
"""
        other = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=60
        )
    given = [*mine, *map(int, other.stdout.split())]
    assert sorted(given) == [FIRST, FIRST + 2, FIRST + 3]
    assert "fewer than 1 free ports" in other.stderr
