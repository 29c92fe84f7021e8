# SPDX-License-Identifier: Apache-2.0
"""An agent that keeps its tools, drops its scratch, and prefetches its next turn.

    .venv/bin/python examples/agent.py
    .venv/bin/python examples/agent.py --redis-url redis://HOST:6379

It runs ``vllm serve`` with LMCache in RAM and in Redis, and stops it at the end. Without
``--redis-url`` it starts a Valkey server of its own. See docs/steering.md.
"""

from typing import Any

import common
import typer
from common import Characters, Model, RedisUrl
from engines import num_keys, redis_server
from openai import OpenAI
from serve_openai import hit_tokens, server

DROP, PREFETCH = {"lmcache.drop": True}, {"lmcache.prefetch": True}


class Agent:
    """Sends prompts to one server, and says what of them came from LMCache."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url, OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(self, prompt: str, max_tokens: int = 16, **steering: Any) -> Any:
        """One completion; ``steering`` goes into its ``kv_transfer_params``."""
        return self._client.completions.create(
            model="model",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"kv_transfer_params": steering} if steering else {},
        )

    def steer(self, prompt: str, **steering: Any) -> dict[str, Any]:
        """Send a request only for what it does to the store; returns its answer."""
        answer = self.ask(prompt, 1, **steering).model_extra["kv_transfer_params"]
        (said,) = answer.values()
        typer.echo(f"{next(iter(steering))}: {said}")
        return said

    def tokens(self, prompt: str) -> int:
        return self.ask(prompt, 1).usage.prompt_tokens

    def hit(self, prompt: str) -> int:
        """Tokens that LMCache brings for a prompt, which is not stored."""
        before = hit_tokens(self._url)
        self.ask(prompt, 1, **{"lmcache.skip_save": True})
        return hit_tokens(self._url) - before


def main(model: Model = None, redis_url: RedisUrl = None, characters: Characters = 3000) -> None:
    """Think aloud, forget it, and come back in another engine."""
    tools = common.long_prompt(characters, "tools")
    scratch = tools + common.long_prompt(characters, "scratch")
    turn = tools + common.long_prompt(characters, "question")
    folder, model, problems = common.own_folder(), common.model_or_tiny(model), []
    config = folder / "agent.yaml"
    with redis_server(redis_url) as redis:
        config.write_text(f"remote_url: {redis}\nlocal_cpu: true\nmax_local_cpu_size: 1\n")
        with server(model, config, folder / "agent.log") as url:
            agent = Agent(url)
            kept = agent.tokens(tools)
            # An hour, and all turns that begin with the tools. This one is stored, too.
            said = agent.steer(turn, **{"lmcache.keep": 3600, "lmcache.keep_to": kept})
            if not said.get("kept"):
                problems.append(f"the tools are not kept: {said}")
            agent.ask(turn)
            answer = agent.ask(turn).choices[0].text
            before = num_keys(redis)
            agent.ask(scratch)
            typer.echo(f"keys: {before}, with the scratch {num_keys(redis)}")
            # The tools' prompt is the beginning of the scratch, and stays.
            said = agent.steer(scratch, **DROP, **{"lmcache.drop_from": kept})
            if num_keys(redis) != before or "error" in said or not said["removed"]:
                problems.append(f"{num_keys(redis)} keys instead of {before}: {said}")
        # Another engine, as after a restart: its RAM is empty.
        with server(model, config, folder / "agent.log") as url:
            agent = Agent(url)
            hit = agent.hit(scratch)
            typer.echo(f"the scratch hits {hit} tokens, of {kept} that it shares with the tools")
            if not 0 < hit <= kept:
                problems.append(f"{hit} tokens of the scratch hit, of which {kept} may stay")
            said = agent.steer(turn, **PREFETCH)  # while a tool runs
            if not said.get("loaded", {}).get("RemoteBackend"):
                problems.append(f"nothing was prefetched: {said}")
            text = agent.ask(turn).choices[0].text
            if text != answer:
                problems.append(f"other text: {answer!r} and {text!r}")
    common.finish(problems)


if __name__ == "__main__":  # the engines' processes import this file
    typer.run(main)
