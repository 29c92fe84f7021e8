# SPDX-License-Identifier: Apache-2.0
"""What the demo prints."""

import io
import subprocess
import sys
from importlib import import_module

from rich.console import Console

from lmcache_hybrid.tools.accept.compare import Answer

# The package's own `demo` is the command.
demo = import_module("lmcache_hybrid.tools.cli.demo")


def answer(cached: int, seconds: float) -> Answer:
    made = object.__new__(Answer)
    for name, value in {"cached": cached, "first_token_seconds": seconds, "tokens": [1]}.items():
        object.__setattr__(made, name, value)
    return made


def test_times_have_their_unit(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=said, width=120))
    assert demo.report(["x" * 9], [answer(0, 0.5)], [answer(8, 0.1)])
    assert "cold, ms" in said.getvalue() and "restored, ms" in said.getvalue()


def test_making_a_model_shows_no_bars(tmp_path):
    """Those of transformers would stand between the demo's own lines."""
    command = [sys.executable, "-m", "lmcache_hybrid.tools.tiny_models", "lfm2"]
    done = subprocess.run([*command, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "shards" not in done.stdout + done.stderr
