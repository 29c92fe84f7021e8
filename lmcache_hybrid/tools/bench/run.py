# SPDX-License-Identifier: Apache-2.0
"""Sends the rounds to servers with and without LMCache."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_hybrid.tools.bench.server import HOST, Server, ServerError
from lmcache_hybrid.tools.bench.workload import Round, rounds
from lmcache_hybrid.tools.subprocesses import kill_group, send, start_module

CLIENT = "lmcache_hybrid.tools.bench.client"
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
TRANSFER_FLAG = "--kv-transfer-config"
ALONE, WITH = "vLLM alone", "with LMCache"


@dataclass(frozen=True)
class Load:
    """The size of the workload.

    Attributes:
        documents: in a round.
        tokens: of a prompt; 0 for half of ``max_model_len``, at most 8,192.
        output_tokens: of an answer.
        concurrency: max requests in flight.
        seed: of the prompts, the same for both servers. A store may hold those of earlier runs.
    """

    documents: int
    tokens: int
    output_tokens: int
    concurrency: int
    seed: int


@dataclass(frozen=True)
class Measured:
    """One round of one server.

    Attributes:
        arm: :data:`ALONE` or :data:`WITH`.
        round: its title.
        first_token_ms: median, in milliseconds.
        requests_per_second: of the round.
        own, loaded: shares of the prompts' tokens that came from vLLM's own cache and from LMCache.
        failed: tokens whose load failed, which were computed.
    """

    arm: str
    round: str
    first_token_ms: float
    requests_per_second: float
    own: float
    loaded: float
    failed: int


def as_vllm_reads(name: str) -> str:
    """Return a flag's name as vLLM's parser takes it."""
    return name.replace("_", "-") if name.startswith("--") else name


def arms(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of each server: those given, without and with our connector."""
    alone, transfer = [], json.dumps(CONNECTOR)
    given = iter(flags)
    for flag in given:
        name, joined, value = flag.partition("=")
        if as_vllm_reads(name) == TRANSFER_FLAG:
            transfer = value if joined else next(given, transfer)
        else:
            alone.append(flag)
    return {ALONE: alone, WITH: [*alone, TRANSFER_FLAG, transfer]}


def no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the hosts without a proxy, with the servers' host added."""
    names = ("no_proxy", "NO_PROXY")
    given = next(filter(None, map(environment.get, names)), "")
    # "*" counts for all hosts only where it stands alone.
    hosts = given if given in ("", "*") else f"{given},{HOST}"
    return dict.fromkeys(names, hosts or HOST)


class Client:
    """vLLM's own client, in a process of its own. Owned by one thread until ``close``."""

    def __init__(self, model: str, flags: Sequence[str], log: Path) -> None:
        """Start it; it needs the model's tokenizer."""
        # The client does not need the server's tokenizer flags: prompts are IDs.
        trusts = [flag for flag in flags if flag == "--trust-remote-code"]
        self._model = {"model": model, "tokenizer": trusts}
        with log.open("ab") as out:
            environment = {**os.environ, **no_proxy(os.environ)}
            self._process, self._answers = start_module(CLIENT, out, environment)

    def ask(
        self, url: str, served: str, prompts: Sequence[list[int]], load: Load
    ) -> dict[str, Any]:
        """Run it once.

        Raises:
            ServerError: the client ended, or a request failed.
        """
        size = {"output_tokens": load.output_tokens, "concurrency": load.concurrency}
        task = {"url": url, "served": served, "prompts": prompts, **self._model, **size}
        send(self._process, task)
        line = self._answers.readline()
        if not line:
            raise ServerError(f"vllm bench serve ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if answer["completed"] != len(prompts):
            raise ServerError(f"{len(prompts) - answer['completed']} requests failed")
        return answer

    def close(self) -> None:
        """End the client."""
        kill_group(self._process)
        self._answers.close()


def measure(
    model: str,
    flags: Sequence[str],
    load: Load,
    environment: Mapping[str, str],
    log: Path,
    say: Callable[[str], None],
) -> Iterator[Measured]:
    """Ask all rounds of both servers, one server after the other.

    Args:
        flags: of ``vllm serve``.
        environment: of the server with LMCache, beside this process's.
        log: gets the output of servers and client.
        say: shows progress.

    Raises:
        ServerError: a server or the client failed.
    """
    with contextlib.closing(Client(model, flags, log)) as client:
        for arm, arguments in arms(flags).items():
            say(f"{arm}: starting vllm serve {model}")
            own = environment if arm == WITH else {}
            with Server(model, arguments, log, own) as server:
                name, longest = server.longest()
                asked = rounds(load.documents, prompt_tokens(load, longest), load.seed)
                for each in asked:
                    if not each.restart:
                        say(f"{arm}: {each.title}")
                        found = _measured(arm, each, server, name, client, load)
                        if each.measured:
                            yield found
            if arm == WITH:  # vLLM alone would compute them as new documents
                say(f"{arm}: starting it again")
                with Server(model, arguments, log, own) as server:
                    for each in asked:
                        if each.restart:
                            yield _measured(arm, each, server, name, client, load)


def prompt_tokens(load: Load, longest: int) -> int:
    """Return the tokens of a prompt on a server with this ``max_model_len``.

    Raises:
        ServerError: such a prompt and its answer do not fit.
    """
    tokens = load.tokens or min(8192, longest // 2)
    if tokens + load.output_tokens > longest:
        raise ServerError(
            f"A prompt of {tokens} tokens (--tokens) and an answer of {load.output_tokens} "
            f"(--output-tokens) do not fit max_model_len {longest}"
        )
    return tokens


def _measured(
    arm: str, each: Round, server: Server, model: str, client: Client, load: Load
) -> Measured:
    if each.forget:
        server.forget()
    before = server.counts()
    answer = client.ask(server.url, model, each.prompts, load)
    after = server.counts()
    grown = {name: after[name] - before[name] for name in after}
    return Measured(
        arm,
        each.title,
        first_token_ms=round(answer["median_ttft_ms"], 1),
        requests_per_second=round(answer["request_throughput"], 3),
        own=round(grown["own"] / grown["prompt"], 4),
        loaded=round(grown["loaded"] / grown["prompt"], 4),
        failed=int(grown["failed"]),
    )
