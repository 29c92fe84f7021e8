# SPDX-License-Identifier: Apache-2.0
"""Lends connections to the servers behind one Redis URL, and finds the server of a key.

redis-py makes the connections: login, TLS, Unix sockets, the sentinels' primary, the nodes of a
cluster.
"""

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import redis
from redis.exceptions import AskError, ReadOnlyError, RedisClusterException

from lmcache_hybrid.config.redis_credentials import read_again
from lmcache_hybrid.core.threads import started
from lmcache_hybrid.storage.remote import clients

# Max idle connections; each thread that reads or writes needs one.
KEPT = 8
# What a connection raises that the server has closed; TLS has errors of its own for that.
CLOSED = (redis.ConnectionError, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
# After these errors a retry on a new connection, maybe to another server, may succeed.
TRY_AGAIN = (*CLOSED, AskError, ReadOnlyError)
# What a server that does not answer raises: its replica may have taken over.
SILENT = (TimeoutError, redis.TimeoutError)
# Min seconds between two searches for the replacement of a node that does not answer.
SEARCH_SECONDS = 5.0


class Server:
    """Connections to one server. Any thread may call it; owns them until closed."""

    def __init__(
        self, make: Callable[[], Any], silent: Callable[[], object] = lambda: None
    ) -> None:
        """
        Args:
            make: makes a redis-py connection, which connects later.
            silent: called after each error of :data:`SILENT`; may not block.
        """
        self._make, self._silent = make, silent
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
            self._check_open()
            connection = self._idle.pop() if self._idle else self._make()
            self._busy.add(connection)
        try:
            connection.connect()
            with self._lock:  # close() could not shut down what was not connected yet
                self._check_open()
            yield connection._sock
        except BaseException as error:
            with self._lock:
                self._busy.discard(connection)
            connection.disconnect()
            if isinstance(error, TRY_AGAIN):
                self._forget()
            elif isinstance(error, SILENT):
                self._silent()
            raise
        with self._lock:
            self._busy.discard(connection)
            keep = not self._closed and len(self._idle) < KEPT
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()

    def _check_open(self) -> None:
        """Raise ConnectionError after :meth:`close`. Call with the lock held."""
        if self._closed:
            raise redis.ConnectionError("this engine is shutting down")

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
            with contextlib.suppress(OSError, TypeError):  # closed, or not connected yet
                # Not the TLS socket's own: a write after that would go out in the clear.
                socket.socket.shutdown(connection._sock, socket.SHUT_RDWR)
        self._forget()


def _connection(pool: redis.ConnectionPool) -> Any:
    """Make a connection outside of its pool, which refuses to make more than 100."""
    return pool.connection_class(**read_again(pool.connection_kwargs))


class OneServer:
    """One server, or the primary behind sentinels. See :class:`Servers`."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._server = Server(lambda: _connection(pool))

    def reach(self) -> None:
        pass

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
        """
        self._make_client, self._seconds = make_client, seconds
        self._asker = started(1, "hybrid-redis-nodes")
        self._lock = threading.Lock()  # guards those below
        self._asking: Future[redis.RedisCluster] | None = None
        self._client: redis.RedisCluster | None = None
        self._searched = -math.inf  # time.monotonic of the last search by :meth:`_search`
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
            asking = self._ask()
        try:
            return asking.result(self._seconds)
        except TimeoutError:
            raise TimeoutError("no node of the cluster answered in time") from None
        except CancelledError:
            raise redis.ConnectionError("this engine is shutting down") from None

    def _search(self) -> None:
        """Ask the nodes, because one does not answer; nobody waits.

        A node that is lost without a word raises no error of TRY_AGAIN, and the others, asked for
        keys of their own only, do not say who took its place.
        """
        with self._lock:
            now = time.monotonic()
            if not self._closed and now - self._searched >= SEARCH_SECONDS:
                self._searched = now
                self._ask()

    def _ask(self) -> Future[redis.RedisCluster]:
        """Begin to ask the nodes, or join in. Call with the lock held."""
        self._check_open()
        if self._asking is None or self._asking.done():
            self._asking = self._asker.submit(self._ask_nodes)
        return self._asking

    def _check_open(self) -> None:
        if self._closed:
            raise redis.ConnectionError("this engine is shutting down")

    def _ask_nodes(self) -> redis.RedisCluster:
        """Ask the nodes. Runs on the thread: redis-py waits for each node that is silent.

        If none of the known nodes answers, those that the URL names are looked up again: their
        names may lead elsewhere by now.
        """
        client = self._client
        try:
            if client is not None:
                with contextlib.suppress(RedisClusterException):
                    client.nodes_manager.initialize()
                    return self._kept(client)
            self._check_open()
            return self._kept(self._make_client())
        except RedisClusterException as error:  # is no RedisError
            raise redis.ConnectionError(str(error)) from error

    def _kept(self, client: redis.RedisCluster) -> redis.RedisCluster:
        """Take this client from now on, unless the end has come while the nodes were asked."""
        with self._lock:
            closed, old = self._closed, self._client
            if not closed:
                self._client = client
        if closed:
            client.close()
            raise redis.ConnectionError("this engine is shutting down")
        if old is not None and old is not client:
            old.close()
        return client

    def reach(self) -> None:
        self._cluster()

    def of(self, name: str) -> Server:
        try:
            node = self._cluster().get_node_from_key(name)
        except RedisClusterException as error:
            raise redis.ConnectionError(str(error)) from error
        if node is None:
            raise redis.ConnectionError("no node of the cluster has this slot")
        return self._server(node.host, node.port)

    def _server(self, host: str, port: int) -> Server:
        with self._lock:
            self._check_open()
            found = self._servers.get((host, port))
            if found is None:

                def make() -> Any:
                    client = self._client
                    node = client.get_node(host, port) if client else None
                    if client is None or node is None:
                        raise redis.ConnectionError(f"{host}:{port} has left the cluster")
                    return _connection(client.get_redis_connection(node).connection_pool)

                found = self._servers[host, port] = Server(make, self._search)
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


# Finds the server of a key. ``reach`` connects, and ``of``, which returns the server, asks nobody
# then. ``after`` returns the one to retry after an error of TRY_AGAIN; like ``refresh`` it asks a
# cluster again. All may block, and raise as commands do.
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
