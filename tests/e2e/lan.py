# SPDX-License-Identifier: Apache-2.0
"""Hosts of a network of their own on this machine: network namespaces, joined by a bridge.

Each has an address, a name, shared memory and clocks of its own, so that nothing but the network
connects what runs on two of them. The test's own process is on the bridge.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

_HOLD = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && echo $$ && exec sleep infinity"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """One host, while its :class:`Lan` exists.

    Attributes:
        address: of its only network device, :attr:`device`.
    """

    device = "lan0"

    def __init__(self, stack: ExitStack, bridge: str, address: str, clock: int) -> None:
        """
        Args:
            bridge: which it is connected to.
            clock: seconds that its clock is ahead of this machine's.
        """
        self.address, number = address, address.rpartition(".")[2]
        self._cable, name = f"{bridge}c{number}", f"{bridge}n{number}"
        with suppress(subprocess.CalledProcessError):  # of a session that was killed
            _ip("netns", "del", name)
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", self._cable, "type", "veth", "peer", self.device, "netns", name)
        _ip("link", "set", self._cable, "master", bridge, "up")
        for each in (f"addr add {address}/24 dev {self.device}", f"link set {self.device} up"):
            _ip("-n", name, *each.split())
        _ip("-n", name, "link", "set", "lo", "up")
        apart = ["unshare", "-m", "-u", "-T", "--monotonic", str(clock), "--fork", "--kill-child"]
        holder = subprocess.Popen(
            ["ip", "netns", "exec", name, *apart, "sh", "-c", _HOLD.format(name=name)],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        stack.callback(holder.stdout.close)
        self._inside = ["nsenter", "-F", "-t", holder.stdout.readline().strip(), "-n", "-m", "-u"]
        self._inside += ["-T", "--"]

    def plug(self, connected: bool) -> None:
        """Connect its cable, or pull it out."""
        _ip("link", "set", self._cable, "up" if connected else "down")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen:
        """Start a process there, in a group of its own."""
        known = {"VLLM_HOST_IP": self.address, "GLOO_SOCKET_IFNAME": self.device}
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self._inside, *command],
                env={**environment, **known},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


class Lan:
    """``with lan(clocks) as each``: hosts at ``.1``, ``.2`` and so on, and the test at ``.254``."""

    def __init__(self, stack: ExitStack, clocks: Sequence[int]) -> None:
        number = os.getpid() % 250
        bridge, net = f"lh{number}", f"10.77.{number}"
        with suppress(subprocess.CalledProcessError):  # of a session that was killed
            _ip("link", "del", bridge)
        self.here = f"{net}.254"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{self.here}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        self.hosts = [
            Host(stack, bridge, f"{net}.{at}", clock) for at, clock in enumerate(clocks, 1)
        ]


@contextmanager
def lan(*clocks: int) -> Iterator[Lan]:
    """Make a network of hosts whose clocks are so many seconds ahead of this machine's.

    Skips the test where this process may not make namespaces.
    """
    tools = [each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None]
    if not sys.platform.startswith("linux") or tools:
        pytest.skip(f"namespaces need Linux and these programs: {' '.join(tools)}")
    with ExitStack() as stack:
        try:
            made = Lan(stack, clocks)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            pytest.skip(f"this process may not make network namespaces: {said}")
        yield made


def end(process: subprocess.Popen, seconds: float = 60.0) -> None:
    """End a process and its children; what does not end is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
