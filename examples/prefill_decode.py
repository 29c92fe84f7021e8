# SPDX-License-Identifier: Apache-2.0
"""One engine prefills, another decodes; a Redis between them carries the prompt.

    .venv/bin/python examples/prefill_decode.py
    .venv/bin/python examples/prefill_decode.py --redis-url redis://HOST:6379

The producer (``kv_role: kv_producer``) is asked for one token, which makes it compute and
store the prompt. The consumer (``kv_consumer``) loads all whole blocks, computes the rest
and generates; it never stores. A router does the same with two ``vllm serve``: send each
request to the producer with ``max_tokens=1`` first, then to the consumer as it is.
"""

import os
from typing import Annotated

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
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
) -> None:
    """Prefill on one engine, decode on another, and compare with vLLM without LMCache."""
    os.environ["LMCACHE_CONFIG_FILE"] = str(HERE / "lmcache-redis.yaml")
    model, prompt = model_or_tiny(model), long_prompt(characters)
    unseen = long_prompt(characters, "weather")
    with Engine(model, None) as plain:
        block_size = plain.block_size()
        plain.ask("Warm up.")  # the first request of an engine is slower
        expected = plain.ask(prompt, max_tokens)
        expected.show("vLLM without LMCache")

    with redis_server(redis_url) as url:
        shared = {"kv_connector_extra_config": {"lmcache.remote_url": url}}
        producing = CONNECTOR | shared | {"kv_role": "kv_producer"}
        consuming = CONNECTOR | shared | {"kv_role": "kv_consumer"}
        with Engine(model, producing) as producer, Engine(model, consuming) as consumer:
            for engine in (producer, consumer):
                engine.ask("Warm up.")
            before = num_keys(url)
            producer.ask(prompt, 1).show("producer, 1 token")
            stored = num_keys(url)
            answer = consumer.ask(prompt, max_tokens)
            answer.show(f"consumer, {max_tokens} tokens")
            consumer.ask(unseen).show("consumer, unseen prompt")
            after = num_keys(url)

    # The last token is always computed, so the deepest boundary lies before it.
    deepest = (answer.prompt_tokens - 1) // block_size * block_size
    typer.echo(f"blocks of {block_size} tokens, deepest boundary: {deepest}")
    typer.echo(f"keys in Redis: {before}, after the producer {stored}, after the consumer {after}")
    typer.echo(f"same tokens: {answer.tokens == expected.tokens}")
    problems = []
    if answer.hit != deepest or deepest == 0:
        problems.append(f"the consumer loaded {answer.hit} tokens instead of {deepest}")
    if answer.tokens != expected.tokens:
        problems.append(f"other tokens: {answer.tokens} instead of {expected.tokens}")
    if after != stored:
        problems.append(f"the consumer stored {after - stored} records")
    finish(problems)


if __name__ == "__main__":  # the engines' processes import this file
    typer.run(main)
