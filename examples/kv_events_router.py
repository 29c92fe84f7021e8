# SPDX-License-Identifier: Apache-2.0
"""Two engines, and a router that knows from their events which one has a prompt's prefix.

.venv/bin/python examples/kv_events_router.py
"""

import socket
from collections import defaultdict

import msgspec
import typer
import zmq
from common import CONNECTOR, Characters, Model, finish, long_prompt, model_or_tiny
from engines import Engine

SWITCHED_ON = {"enable_kv_cache_events": True}


class Index:
    """What LMCache holds for one engine, from the engine's events; see docs/events.md."""

    def __init__(self, port: int, replay_port: int) -> None:
        context = zmq.Context.instance()
        self.socket, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.socket.subscribe("")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.next, self.size = 0, 1  # number of the next batch; tokens per block
        self.blocks: dict = {}  # (hash of the block before, tokens): hash
        self.states: dict = defaultdict(set)  # by hash: groups that hold a state

    def listen(self) -> None:
        """Take all events that have come, after those that were lost."""
        while self.socket.poll(1000):
            _, number, batch = self.socket.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
                while (answer := self.replay.recv_multipart())[3]:  # the last one is empty
                    self.take(int.from_bytes(answer[2], "big"), answer[3])
            self.take(int.from_bytes(number, "big"), batch)

    def take(self, number: int, batch: bytes) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

        if 0 < number < self.next:
            return  # taken already; a new engine counts from 0
        self.next = number + 1
        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.states.clear()
            elif event.medium != "GPU" and isinstance(event, BlockStored):
                (block,), self.size = event.block_hashes, event.block_size
                self.blocks[event.parent_block_hash, tuple(event.token_ids)] = block
                if event.kv_cache_spec_kind == "mamba":
                    self.states[block].add(event.group_idx)
            elif event.medium != "GPU":
                for block in event.block_hashes:
                    self.states[block].discard(event.group_idx)

    def hit(self, tokens: list[int]) -> int:
        """Tokens of the prompt up to the deepest block that has a state."""
        self.listen()
        block, hit = None, 0
        for end in range(self.size, len(tokens), self.size):
            block = self.blocks.get((block, tuple(tokens[end - self.size : end])))
            hit = end if self.states[block] else hit
        return hit


def main(model: Model = None, characters: Characters = 5000) -> None:
    """Ask each engine for a text; then send longer prompts to the engine that has them."""
    from transformers import AutoTokenizer

    model, engines, indexes, problems = model_or_tiny(model), [], [], []
    for _ in range(2):
        with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
            ports = one.getsockname()[1], two.getsockname()[1]
        events = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
        transfer = CONNECTOR | {"kv_connector_extra_config": {"lmcache.enable_kv_events": True}}
        engines.append(Engine(model, transfer, kv_events_config=events | SWITCHED_ON))
        indexes.append(Index(*ports))
    with engines[0], engines[1]:
        texts = {subject: long_prompt(characters, subject) for subject in ("tides", "stars")}
        for engine, text in zip(engines, texts.values()):
            engine.ask(text).show("first ask")
            engine.forget()
        for subject in ("stars", "tides"):
            prompt = texts[subject] + "What follows?"
            tokens = AutoTokenizer.from_pretrained(model)(prompt)["input_ids"]
            hits = [index.hit(tokens) for index in indexes]
            answer = engines[hits.index(max(hits))].ask(prompt)
            answer.show(f"{subject}: {hits} announced")
            if answer.hit != max(hits) or not answer.hit:
                problems.append(f"{answer.hit} tokens hit where {max(hits)} were announced")
    finish(problems)


if __name__ == "__main__":  # the engines' processes import this file
    typer.run(main)
