# SPDX-License-Identifier: Apache-2.0
"""The commands that compare answers say "equal" only if there are answers."""

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests import ROOT
from tests.ports import free_port

BLOCK = re.compile(r"^```\n(jq -n --rawfile prompt.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = [each for each in ("bash", "curl", "jq") if shutil.which(each) is None]
pytestmark = pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {NEEDED}")


class Server(BaseHTTPRequestHandler):
    """Gives the log-probability -1, but for prompts that have no ``cache_salt``."""

    stored = -1.0

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer key":
            return self.answer(401, {"error": "Unauthorized"})
        value = -1.0 if "cache_salt" in asked else self.stored
        logprobs = {"tokens": ["a"], "token_logprobs": [value]}
        return self.answer(200, {"choices": [{"logprobs": logprobs}]})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.parametrize(
    "key, stored, said",
    [
        ("key", -1.0, "equal"),
        ("key", -2.0, "different, or no answer"),
        ("wrong", -1.0, "different, or no answer"),
        (None, -1.0, "different, or no answer"),  # nobody listens
    ],
)
def test_only_answers_are_equal(tmp_path, monkeypatch, key, stored, said) -> None:
    (commands,) = BLOCK.findall((ROOT / "docs/troubleshooting.md").read_text())
    (tmp_path / "prompt.txt").write_text("a prompt")
    monkeypatch.setattr(Server, "stored", stored)
    port = free_port()
    with HTTPServer(("127.0.0.1", port), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{port if key else free_port()}"
        done = subprocess.run(
            ["bash", "-c", commands.replace("localhost:8000", where)],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "VLLM_API_KEY": key or ""},
            capture_output=True,
            text=True,
        )
        server.shutdown()
    assert done.stdout.splitlines()[-1] == said, done.stderr
