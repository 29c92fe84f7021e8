# SPDX-License-Identifier: Apache-2.0
"""TLS in front of real servers: the Valkey of the tests is built without it."""

import socket
import ssl
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

TLS_HANDSHAKE = b"\x16"


def make_certificate(folder: Path) -> Path:
    """A new certificate for this machine, signed by itself; its key lies beside it."""
    certificate = folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate


class Front:
    """Passes what arrives on ``port`` on to ``target``, decrypted where it comes as TLS.

    Args:
        port: on the loopback address; free.
        target: port of the server on the same address.
        certificate: of :func:`make_certificate`.
        strict: end connections that come without TLS.
        asks: end connections of clients without a certificate, which is the same one.

    Attributes:
        plain: who came without TLS, by their ports.
    """

    def __init__(
        self,
        port: int,
        target: int,
        certificate: Path,
        *,
        strict: bool = False,
        asks: bool = False,
    ) -> None:
        self.plain: list[int] = []
        self.port, self._target, self._strict = port, target, strict
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        if asks:
            self._context.load_verify_locations(certificate)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listening = socket.create_server(("127.0.0.1", port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take nobody more; who is connected stays so until one of the two ends it."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, (_, port) = self._listening.accept()
                threading.Thread(target=self._serve, args=(client, port), daemon=True).start()

    def _serve(self, client: socket.socket, port: int) -> None:
        with suppress(OSError):
            if client.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE:
                client = self._context.wrap_socket(client, server_side=True)
            else:
                self.plain.append(port)
                if self._strict:
                    client.close()
                    return
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=pass_on, args=(server, client), daemon=True).start()
            pass_on(client, server)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until one of the two ends it; closes both."""
    with closing(source), closing(target), suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
