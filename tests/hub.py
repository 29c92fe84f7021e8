# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Hub on this machine, with one model: ``vllm serve org/name`` downloads from it."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

MODEL = "lmcache-hybrid/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves a folder as the model ``MODEL`` at commit ``COMMIT``, from a thread of its own.

    Attributes:
        environment: of processes that shall use it, and a cache of their own.
    """

    def __init__(self, model: Path, cache: Path) -> None:
        files = {file.name: file for file in sorted(model.iterdir()) if file.is_file()}
        handler = type("OneModel", (_Handler,), {"files": files})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """The calls of ``huggingface_hub`` that a download needs."""

    protocol_version = "HTTP/1.1"
    files: dict[str, Path]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _git(file)}
                for name, file in self.files.items()
            ]
            self._json(entries)
        elif path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            self._info()
        elif path == f"/api/models/{MODEL}/revision/{COMMIT}":
            self._info()
        else:
            self._file(path)

    do_HEAD = do_GET

    def _info(self) -> None:
        siblings = [{"rfilename": name} for name in self.files]
        self._json({"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings})

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, path: str) -> None:
        place, _, name = path.rpartition("/")
        wanted = {f"/{MODEL}/resolve/{revision}" for revision in ("main", COMMIT)}
        file = self.files.get(name) if place in wanted else None
        if file is None:
            code = "EntryNotFound" if place in wanted else "RepoNotFound"
            self._send(b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, 404)
            return
        self._send(file.read_bytes(), {"ETag": f'"{_git(file)}"', "X-Repo-Commit": COMMIT})

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Print nothing."""


def _git(file: Path) -> str:
    """Git's hash of a file's content, by which the Hub calls small ones."""
    content = file.read_bytes()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
