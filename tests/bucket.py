# SPDX-License-Identifier: Apache-2.0
"""A bucket on a real S3 server (moto's) on this machine, and a back door to its objects.

A bucket's own name is in front of the server's (``bucket.s3.region.amazonaws.com``), which no name
of this machine's has; so this server adds the bucket to each path. Run alone it serves a bucket in
a process of its own: ``python tests/bucket.py PORT``.
"""

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from urllib.parse import quote, unquote

BUCKET = "records"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
# Settings of LMCache for this server; its default of 64 threads is for large machines.
EXTRA = {"s3_region": "us-east-1", "disable_tls": True, "s3_num_io_threads": 2}
# Objects whose names begin so are refused to everybody; refused to a HEAD, as without s3:GetObject;
# refused to a HEAD where they are missing, as without s3:ListBucket.
DENIED, UNREAD, UNLISTED = "denied", "unread", "unlisted"
START_SECONDS = 60.0


class Bucket:
    """The server's process; owns it until closed.

    Attributes:
        url, extra: as LMCache's ``remote_url`` and ``extra_config``.
        port: of the server.
    """

    def __init__(self) -> None:
        from tests.ports import (
            free_port,  # not for the server's process, which runs this file alone
        )

        self.port = free_port()
        self.url, self.extra = f"s3://127.0.0.1:{self.port}", EXTRA
        self.start()

    def start(self) -> None:
        """Start the server with an empty bucket."""
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # No credentials are asked for, and none of this machine's are used.
            env={**os.environ, **CREDENTIALS, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 30)},
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self._must("PUT", "")
            except OSError:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    raise TimeoutError("the S3 server did not start") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: connections end, and the objects are gone."""
        self._server.kill()
        self._server.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered."""
        self._server.send_signal(signal.SIGSTOP)
        os.waitpid(self._server.pid, os.WUNTRACED)  # until it has stopped

    def resume(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    close = kill

    def names(self) -> list[str]:
        text = self._must("GET", "?list-type=2&encoding-type=url").decode()
        return [unquote(name) for name in re.findall("<Key>([^<]*)</Key>", text)]

    def read(self, name: str) -> bytes:
        return self._must("GET", name)

    def write(self, name: str, data: bytes) -> None:
        self._must("PUT", name, data)

    def remove(self, name: str) -> None:
        self._must("DELETE", name)

    def empty(self) -> None:
        for name in self.names():
            self.remove(name)

    def drop(self) -> None:
        """Delete the bucket itself."""
        self.empty()
        self._must("DELETE", "")

    def make(self) -> None:
        self._must("PUT", "")

    def _must(self, method: str, name: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        # As a client that signs: moto takes any signature, and nobody without one.
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4"}
        path = name if name.startswith("?") else quote(name)
        connection.request(method, "/" + path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status not in (200, 204):
            raise RuntimeError(f"{method} {name}: {answer.status} {data!r}")
        return data


def serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app = DomainDispatcherApplication(create_backend_app)

    def with_bucket(environ, start_response):
        for name in ("PATH_INFO", "RAW_URI", "REQUEST_URI"):
            environ[name] = f"/{BUCKET}{environ[name]}"
        name = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        head = environ["REQUEST_METHOD"] == "HEAD"

        def hide_absence(status, headers, *rest):
            status = "403 Forbidden" if status.startswith("404") else status
            return start_response(status, headers, *rest)

        if name.startswith(DENIED) or (head and name.startswith(UNREAD)):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return []
        return app(environ, hide_absence if head and name.startswith(UNLISTED) else start_response)

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as those of other servers

        def log_request(self, *args) -> None:
            pass

    make_server(
        "127.0.0.1", port, with_bucket, threaded=True, request_handler=Handler
    ).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
