# SPDX-License-Identifier: Apache-2.0
"""Lends connections to the servers behind one Redis URL, and finds the server of a key.

redis-py makes the connections: login, TLS, Unix sockets, the sentinels' primary, the nodes of a
cluster.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import redis
from redis.exceptions import AskError, ReadOnlyError, RedisClusterException

from lmcache_hybrid.core.threads import started
from lmcache_hybrid.storage.remote import clients

# Max idle connections; each thread that reads or writes needs one.
KEPT = 8
# What a connection raises that the server has closed; TLS has errors of its own for that.
CLOSED = (redis.ConnectionError, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
# After these errors a retry on a new connection, maybe to another server, may succeed.
TRY_AGAIN = (*CLOSED, AskError, ReadOnlyError)


class Server:
    """Connections to one server. Any thread may call it; owns them until closed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """
        Args:
            make: makes a redis-py connection, which connects later.
        """
        self._make = make
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._closed = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Lend the socket of a connection.

        It is closed when an error leaves the block: it may be in the middle of a value. After
        :data:`TRY_AGAIN` idle ones are also closed, as the server may have closed them.

        Raises:
            redis.RedisError, OSError: the server cannot be reached, or refuses us.
        """
        with self._lock:
            if self._closed:
                raise redis.ConnectionError("this engine is shutting down")
            connection = self._idle.pop() if self._idle else self._make()
            self._busy.add(connection)
        try:
            connection.connect()
            yield connection._sock
        except BaseException as error:
            with self._lock:
                self._busy.discard(connection)
            connection.disconnect()
            if isinstance(error, TRY_AGAIN):
                self._forget()
            raise
        with self._lock:
            self._busy.discard(connection)
            keep = not self._closed and len(self._idle) < KEPT
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()

    def _forget(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close idle connections, and shut down busy ones. Idempotent."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for connection in busy:
            with contextlib.suppress(OSError, AttributeError):  # closed, or not connected yet
                connection._sock.shutdown(socket.SHUT_RDWR)
        self._forget()


def _connection(pool: redis.ConnectionPool) -> Any:
    """Make a connection outside of its pool, which refuses to make more than 100."""
    return pool.connection_class(**pool.connection_kwargs)


class OneServer:
    """One server, or the primary behind sentinels. See :class:`Servers`."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._server = Server(lambda: _connection(pool))

    def of(self, name: str) -> Server:
        return self._server

    def after(self, error: Exception, name: str) -> Server:
        return self._server  # its next connection is a new one

    def refresh(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        self._server.close()


class ClusterServers:
    """The nodes of a cluster, discovered at the first key. See :class:`Servers`."""

    def __init__(self, make_client: Callable[[], redis.RedisCluster], seconds: float) -> None:
        """Start a thread.

        Args:
            make_client: asks one node after the other, until one answers.
            seconds: max time to wait for an answer, even if nodes are silent.

        Raises:
            RuntimeError: no thread could be started.
        """
        self._make_client, self._seconds = make_client, seconds
        self._asker = started(1, "hybrid-redis-nodes")
        self._lock = threading.Lock()  # guards those below
        self._asking: Future[redis.RedisCluster] | None = None
        self._client: redis.RedisCluster | None = None
        self._closed = False
        self._servers: dict[tuple[str, int], Server] = {}

    def _cluster(self) -> redis.RedisCluster:
        with self._lock:
            if self._client is not None and not self._closed:
                return self._client
        return self._wait_for_nodes()

    def _wait_for_nodes(self) -> redis.RedisCluster:
        """Ask the nodes for the slots of each; several callers share one answer.

        Raises:
            redis.ConnectionError: no node answers.
            TimeoutError: none did so in time. The search goes on, and the next caller joins it.
        """
        with self._lock:
            if self._closed:
                raise redis.ConnectionError("this engine is shutting down")
            if self._asking is None or self._asking.done():
                self._asking = self._asker.submit(self._ask_nodes)
            asking = self._asking
        try:
            return asking.result(self._seconds)
        except TimeoutError:
            raise TimeoutError("no node of the cluster answered in time") from None
        except CancelledError:
            raise redis.ConnectionError("this engine is shutting down") from None

    def _ask_nodes(self) -> redis.RedisCluster:
        """Ask the nodes. Runs on the thread: redis-py waits for each node that is silent."""
        client = self._client
        try:
            if client is None:
                client = self._make_client()
            else:
                client.nodes_manager.initialize()
        except RedisClusterException as error:  # is no RedisError
            raise redis.ConnectionError(str(error)) from error
        with self._lock:
            if not self._closed:
                self._client = client
                return client
        client.close()  # while the nodes were asked
        raise redis.ConnectionError("this engine is shutting down")

    def of(self, name: str) -> Server:
        try:
            node = self._cluster().get_node_from_key(name)
        except RedisClusterException as error:
            raise redis.ConnectionError(str(error)) from error
        if node is None:
            raise redis.ConnectionError("no node of the cluster has this slot")
        return self._server(node.host, node.port)

    def _server(self, host: str, port: int) -> Server:
        client = self._cluster()
        with self._lock:
            found = self._servers.get((host, port))
            if found is None:

                def make() -> Any:
                    node = client.get_node(host, port)
                    if node is None:
                        raise redis.ConnectionError(f"{host}:{port} has left the cluster")
                    return _connection(client.get_redis_connection(node).connection_pool)

                found = self._servers[host, port] = Server(make)
            return found

    def after(self, error: Any, name: str) -> Server:
        self.refresh(error)
        if type(error) is AskError:
            return self._server(error.host, error.port)
        return self.of(name)

    def refresh(self, error: Exception) -> None:
        if type(error) is AskError:
            return  # the nodes have not changed yet
        self._wait_for_nodes()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            servers, client = list(self._servers.values()), self._client
        for server in servers:
            server.close()
        if client is not None:
            client.close()
        self._asker.shutdown(wait=False, cancel_futures=True)


# Finds the server of a key. ``of`` returns it. ``after`` returns the one to retry after an error of
# TRY_AGAIN; like ``refresh`` it asks a cluster again. All may block, and raise as commands do.
Servers = OneServer | ClusterServers


def servers_at(url: str, options: dict[str, Any]) -> Servers:
    """Make the servers of a URL; connects to none.

    Args:
        options: of connections, as redis-py names them, with ``socket_timeout``.

    Raises:
        ConfigError: a file that the environment names cannot be read.
        ValueError: the URL cannot be read.
    """
    if url.lower().startswith(clients.CLUSTER):
        clients.hosts_of(url)
        seconds = options["socket_timeout"]
        return ClusterServers(lambda: clients.make_client(url, options), seconds)
    return OneServer(clients.make_client(url, options).connection_pool)
