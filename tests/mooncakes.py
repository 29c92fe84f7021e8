# SPDX-License-Identifier: Apache-2.0
"""Mooncake's master and a node that gives memory, from Mooncake's wheel, over TCP on loopback.

The wheel wants the system's libibverbs, for cards that this machine need not have. Where it is
missing one without any card is compiled. Run alone this is the node: ``python mooncakes.py PORT``.
"""

import atexit
import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

VERBS = "libibverbs.so.1"
# What Mooncake's wheel asks of it, by version.
FUNCTIONS = {
    "IBVERBS_1.0": "ibv_create_comp_channel ibv_destroy_comp_channel",
    "IBVERBS_1.1": "ibv_ack_async_event ibv_ack_cq_events ibv_alloc_pd ibv_close_device "
    "ibv_create_cq ibv_create_qp ibv_dealloc_pd ibv_dereg_mr ibv_destroy_cq ibv_destroy_qp "
    "ibv_event_type_str ibv_fork_init ibv_free_device_list ibv_get_async_event ibv_get_cq_event "
    "ibv_get_device_list ibv_get_device_name ibv_modify_qp ibv_open_device ibv_query_device "
    "ibv_query_gid ibv_query_port ibv_query_qp ibv_reg_mr ibv_wc_status_str",
    "IBVERBS_1.8": "ibv_reg_mr_iova2",
    "IBVERBS_1.11": "_ibv_query_gid_ex",
}
SEGMENT_BYTES = 256 << 20


def _compile_verbs(folder: Path) -> Path:
    names = [name for each in FUNCTIONS.values() for name in each.split()]
    (folder / "verbs.c").write_text("".join(f"void *{name}() {{ return 0; }}\n" for name in names))
    (folder / "verbs.map").write_text(
        "".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in each.split())} }};\n"
            for version, each in FUNCTIONS.items()
        )
    )
    arguments = ["-shared", "-fPIC", f"-Wl,-soname,{VERBS}", "-Wl,--version-script=verbs.map"]
    subprocess.run(["cc", *arguments, "-o", VERBS, "verbs.c"], cwd=folder, check=True)
    return folder / VERBS


@functools.cache
def verbs() -> str | None:
    """Folder of a compiled libibverbs; None where the system has one."""
    try:
        ctypes.CDLL(VERBS)
        return None
    except OSError:
        folder = tempfile.mkdtemp(prefix="verbs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return str(_compile_verbs(Path(folder)).parent)


def load_verbs(folder: str | None) -> None:
    """Load the compiled one, if any, into this process, before Mooncake's client."""
    if folder is not None:
        ctypes.CDLL(f"{folder}/{VERBS}", ctypes.RTLD_GLOBAL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Mooncake:
    """The servers' processes; owns them until closed.

    Attributes:
        extra: LMCache's ``extra_config`` for them.
    """

    url = "mooncakestore://127.0.0.1:1"  # LMCache takes host and port from extra_config

    def __init__(self) -> None:
        self._environment = {**os.environ}
        if folder := verbs():
            load_verbs(folder)
            self._environment["LD_LIBRARY_PATH"] = folder
        self.port = _free_port()
        self.extra = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{self.port}",
            "protocol": "tcp",
            "global_segment_size": "0",  # no memory of the engine's own
            "local_buffer_size": "0",
        }
        self.start()

    def start(self) -> None:
        folder = importlib.util.find_spec("mooncake").submodule_search_locations[0]
        self._master = self._run(
            *(f"{folder}/mooncake_master", "-rpc_port", str(self.port)),
            # A node that was paused is not given up.
            *("-metrics_port", str(_free_port()), "-client_ttl", "60"),
        )
        self._wait_for(self.port)
        ready = _free_port()
        self._node = self._run(sys.executable, __file__, str(self.port), str(ready))
        self._wait_for(ready)

        self._client = None

    @property
    def client(self) -> "MooncakeDistributedStore":
        """A client in this process, made when first asked for."""
        from mooncake.store import MooncakeDistributedStore

        if self._client is None:
            self._client = MooncakeDistributedStore()
            code = self._client.setup(
                *("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{self.port}")
            )
            assert code == 0, code
        return self._client

    def read(self, name: str) -> bytes:
        return self.client.get(name)

    def write(self, name: str, data: bytes) -> None:
        self.remove(name)
        assert self.client.put(name, data) == 0

    def remove(self, name: str) -> None:
        self.client.remove(name, True)

    def empty(self) -> None:
        self.client.remove_all(True)

    def _run(self, *command: str) -> subprocess.Popen:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=self._environment, **quiet)

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError("Mooncake did not start") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL both: the values are gone."""
        for server in (self._node, self._master):
            server.send_signal(signal.SIGCONT)
            server.kill()
            server.wait()

    def pause(self) -> None:
        """SIGSTOP the node: the master answers, and no value comes."""
        self._node.send_signal(signal.SIGSTOP)
        os.waitpid(self._node.pid, os.WUNTRACED)  # until it has stopped

    def resume(self) -> None:
        self._node.send_signal(signal.SIGCONT)

    close = kill


def serve(port: int, ready: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    node = MooncakeDistributedStore()
    code = node.setup(
        *("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 0, "tcp", "", f"127.0.0.1:{port}")
    )
    assert code == 0, code
    with socket.create_server(("127.0.0.1", ready)):
        signal.pause()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
