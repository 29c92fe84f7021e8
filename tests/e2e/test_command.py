# SPDX-License-Identifier: Apache-2.0
"""The README's commands, as written there: every default of vLLM's, and a model from the Hub.

All other tests' engines leave out to compile the model, which takes a minute.
"""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.api_server import ApiServer
from tests.e2e.blocks import block_size
from tests.e2e.processes import own_core
from tests.e2e.short_models import make_short_model
from tests.hub import MODEL, Hub

pytestmark = pytest.mark.engine

README = (Path(__file__).parents[2] / "README.md").read_text()
MESSAGES = [{"role": "user", "content": "What does a cache of prefixes keep of this? " * 40}]


def commands() -> list[list[str]]:
    """Words of all commands in the README that serve a model."""
    found = re.findall(r"^(?:\w+=\S+ )*vllm serve (?:.*\\\n)*.*$", README, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", " ")) for command in found]


def start(words: list[str], folder: Path, environment: dict[str, str]) -> ApiServer:
    """The command on a model of the Hub, started in ``folder``."""
    at = words.index("vllm")
    settings = dict(word.split("=", 1) for word in words[:at])
    assert words[at + 1 : at + 3] == ["serve", "MODEL"]
    ours = {
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": own_core(),
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment = {**os.environ, **ours, **environment, **settings}
    arguments = words[at + 3 :]
    return ApiServer(MODEL, folder / "log", arguments, environment, eager=False, folder=folder)


def ask(server: ApiServer) -> list[dict]:
    """Tokens and log-probabilities of an answer in a chat."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 5})
    return answer["choices"][0]["logprobs"]["content"]


def test_the_first_command_hits_what_it_computed_before(model_dir: Path, tmp_path: Path) -> None:
    """Nothing is set but what this machine needs, so LMCache keeps its records in RAM."""
    model = make_short_model("lfm2", model_dir)
    # Opens the endpoint that empties vLLM's own cache.
    development = {"VLLM_SERVER_DEV_MODE": "1"}
    with (
        Hub(model, tmp_path / "hub") as hub,
        start(commands()[0], tmp_path, {**hub.environment, **development}) as server,
    ):
        server.wait()
        ask(server)
        own = ask(server)  # vLLM's own hit
        assert server.external_hits() == [0]
        server.forget()
        assert ask(server) == own
        (hit,) = server.external_hits()
        assert hit > 0 == hit % block_size(model)
        assert server.stop(signal.SIGTERM) == 0
    assert "enforce_eager=False" in server.log.read_text()


@pytest.mark.slow
def test_a_chat_goes_on_where_it_was_after_sigterm_and_without_the_hub(
    model_dir: Path, tmp_path: Path
) -> None:
    """First LMCache is told by its environment where its disk is, then by a file."""
    plain, with_file = commands()
    model = make_model("granite4", model_dir / "granite4")
    disk = {"local_disk": tmp_path / "disk", "max_local_disk_size": 1, "max_local_cpu_size": 1}
    with Hub(model, tmp_path / "hub") as hub:
        online = {f"LMCACHE_{name.upper()}": str(value) for name, value in disk.items()}
        with start(plain, tmp_path, {**hub.environment, **online}) as server:
            server.wait()
            ask(server)
            own = ask(server)  # vLLM's own hit
            assert server.external_hits() == [0]
            assert server.stop(signal.SIGTERM) == 0
        assert "enforce_eager=False" in server.log.read_text()
    (tmp_path / "lmcache.yaml").write_text("".join(f"{name}: {disk[name]}\n" for name in disk))
    with start(with_file, tmp_path, {**hub.environment, "HF_HUB_OFFLINE": "1"}) as server:
        server.wait()
        assert ask(server) == own
        (hit,) = server.external_hits()
        assert hit > 0 == hit % block_size(model)
        assert server.stop(signal.SIGTERM) == 0
