# SPDX-License-Identifier: Apache-2.0
"""The same long prompt twice through ``vllm.LLM``: the second time it comes from LMCache.

    .venv/bin/python examples/offline.py
    .venv/bin/python examples/offline.py --config examples/lmcache-disk.yaml   # twice

Between the two vLLM's own prefix cache is emptied, as if other requests had pushed the
prompt out of it.
"""

import os

import typer
from common import (
    CONNECTOR,
    HERE,
    Characters,
    Config,
    Model,
    ask,
    finish,
    long_prompt,
    model_or_tiny,
    start,
    stop,
)


def main(
    model: Model = None,
    config: Config = HERE / "lmcache-ram.yaml",
    characters: Characters = 5000,
) -> None:
    """Ask a long prompt, empty vLLM's own prefix cache, ask again: LMCache brings the prefix."""
    os.environ["LMCACHE_CONFIG_FILE"] = str(config)
    prompt = long_prompt(characters)
    llm = start(model_or_tiny(model), CONNECTOR)
    ask(llm, "Warm up.")  # the first request of an engine is slower

    first = ask(llm, prompt)
    if not llm.reset_prefix_cache():
        finish(["vLLM did not reset its prefix cache"])
    second = ask(llm, prompt)
    stop(llm)

    first.show("first time")
    second.show("after reset_prefix_cache()")
    if first.hit:
        typer.echo("The first answer is a hit too: an earlier run left the prompt in the store.")
    typer.echo(f"same tokens: {first.tokens == second.tokens}")
    problems = []
    if second.hit == 0:
        problems.append("LMCache brought nothing: is the prompt longer than one block?")
    if first.tokens != second.tokens:
        problems.append(f"other tokens: {first.tokens} and {second.tokens}")
    finish(problems)


if __name__ == "__main__":  # vLLM starts its engine in a new process, which imports this file
    typer.run(main)
