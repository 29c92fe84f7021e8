# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy before Redis that stops, cuts and refuses connections."""

import contextlib
import socket
import threading


class Proxy:
    """A TCP proxy on a port of its own that can stop, cut and refuse connections.

    Args:
        port: of the server behind it, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._left: int | None = None
        self._sent: int | None = None
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    def pause(self) -> None:
        """Deliver nothing more; connections stay open."""
        self._flowing.clear()

    def pause_after(self, size: int) -> None:
        """Deliver ``size`` more bytes to the server, and then nothing."""
        with self._lock:
            self._sent = size

    @property
    def paused(self) -> bool:
        return not self._flowing.is_set()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut_after(self, size: int) -> None:
        """Refuse and cut everything once the server has sent ``size`` more bytes."""
        with self._lock:
            self._left = size

    def refuse(self) -> None:
        """No new connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Wakes the thread in accept(), which close() alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def accept(self) -> None:
        """Take new connections, on the same port as before."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def restore(self) -> None:
        """Work as an ordinary proxy again."""
        with self._lock:
            self._left = self._sent = None
        self.resume()
        self.accept()

    def close(self) -> None:
        self.refuse()
        self.cut()
        self.resume()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self._pump, args=(source, sink, source is server), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._flowing.wait()
                if answers:
                    sink.sendall(self._allowed(data))
                else:
                    rest = self._send_until_pause(sink, data)
                    self._flowing.wait()
                    sink.sendall(rest)
        with self._lock:
            self._sockets -= {source, sink}
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _send_until_pause(self, sink: socket.socket, data: bytes) -> bytes:
        """Send what may pass before the pause; returns the rest."""
        with self._lock:
            if self._sent is None:
                passing = len(data)
            else:
                passing = min(len(data), self._sent)
                self._sent -= passing
                if not self._sent:
                    self._sent = None
                    self._flowing.clear()
        sink.sendall(data[:passing])
        return data[passing:]

    def _allowed(self, data: bytes) -> bytes:
        with self._lock:
            if self._left is None:
                return data
            data, self._left = data[: self._left], max(0, self._left - len(data))
            over = not self._left
        if over:
            self.refuse()
            self.cut()
        return data
