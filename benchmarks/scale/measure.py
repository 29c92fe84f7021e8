# SPDX-License-Identifier: Apache-2.0
"""What a real Valkey sees of one engine: operations, bytes and CPU time of each event."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import mean

from redis.crc import key_slot

from benchmarks.performance.path import Rank, prefix_of, rank
from benchmarks.performance.shapes import Shape
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata
from lmcache_hybrid.protocol.prefix import Prefix

SLOTS = 16384


class Watch:
    """Differences of a server's own counters, less what asking for them adds."""

    def __init__(self, client) -> None:
        self._client = client
        self._idle = self._difference(lambda: None)

    def of(self, action: Callable[[], None]) -> dict:
        """commands by name, round trips, bytes in and out, CPU seconds of the server."""
        seen, idle = self._difference(action), self._idle
        commands = {k: v for k, v in seen.pop("commands").items() if v and k != "info"}
        return {"commands": commands} | {k: max(0, v - idle[k]) for k, v in seen.items()}

    def _difference(self, action: Callable[[], None]) -> dict:
        before = self._counters()
        action()
        after = self._counters()
        commands = {
            name: calls - before["commands"].get(name, 0)
            for name, calls in after.pop("commands").items()
        }
        return {"commands": commands} | {name: after[name] - before[name] for name in after}

    def _counters(self) -> dict:
        stats, cpu = self._client.info("stats"), self._client.info("cpu")
        commands = self._client.info("commandstats")
        return {
            "commands": {k.removeprefix("cmdstat_"): v["calls"] for k, v in commands.items()},
            "round_trips": stats["total_reads_processed"],
            "bytes_in": stats["total_net_input_bytes"],
            "bytes_out": stats["total_net_output_bytes"],
            "cpu_seconds": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        }


def ask(one: Rank, name: str, prefix: Prefix, floor: int = 0) -> int:
    """A lookup and its end; returns the boundary in blocks."""
    blocks = len(prefix.hashes)
    answer = one.lookup.answer(LookupRequest(name, prefix, blocks, floor))
    one.lookup.release(name)
    return answer.boundary


def hit(one: Rank, name: str, prefix: Prefix, floor: int) -> None:
    """A lookup and a load of everything past ``floor`` blocks."""
    blocks = len(prefix.hashes)
    assert one.lookup.answer(LookupRequest(name, prefix, blocks, floor)).boundary == blocks
    load = one.shape.load(name, prefix, one.first_target)
    attention = tuple(ids[floor:] for ids in load.attention_blocks)
    load = dataclasses.replace(load, start=floor, attention_blocks=attention)
    one.worker.start_loads(ConnectorMetadata((load,), (), (), True))
    while not (results := one.worker.results(set(), waits=True)).finished_recving:
        pass
    assert not results.failed_recving


def events(shape: Shape, blocks: int, local: int) -> dict:
    """Counters of each event of one rank, and what a stored prompt takes.

    Args:
        blocks: of the prompt.
        local: of them, how many vLLM has in its own cache in some of the events.
    """
    prefixes = [prefix_of(blocks, seed) for seed in range(3)]
    with rank("redis", shape, blocks, local_cpu=False) as one:
        client = one.server.client()
        for seed in (0, 1):  # connections are made, the pool's memory is touched
            save(one, prefixes[seed])
        hit(one, "warm", prefixes[0], 0)
        watch = Watch(client)
        client.execute_command("FLUSHALL", "SYNC")
        empty = client.info("memory")["used_memory"]

        found = {"lookup of a new prompt": watch.of(lambda: ask(one, "new", prefixes[2]))}
        found["save"] = watch.of(lambda: save(one, prefixes[0]))
        stored = {
            "payload": shape.bytes_at(blocks),
            "used_memory": client.info("memory")["used_memory"] - empty,
            "keys": client.dbsize(),
        }
        found["lookup of a stored prompt"] = watch.of(lambda: ask(one, "stored", prefixes[0]))
        longer = prefix_of(blocks + 1, 0)
        assert longer.hashes[:blocks] == prefixes[0].hashes
        found["lookup of one a block longer"] = watch.of(lambda: ask(one, "longer", longer))
        found["hit"] = watch.of(lambda: hit(one, "hit", prefixes[0], 0))
        found[f"hit, {local} blocks in vLLM's cache"] = watch.of(
            lambda: hit(one, "local", prefixes[0], local)
        )
        connections = client.info("clients")["connected_clients"] - 1
    return {"events": found, "stored": stored, "connections": connections}


def save(one: Rank, prefix: Prefix) -> None:
    """Store all of ``prefix``, until its buffers are back. Asks the server for nothing."""
    pool = one.store.manager.local_cpu_backend.memory_allocator.pin_allocator.address_manager
    before = pool.total_allocated_size
    one.save("save", prefix)
    while pool.total_allocated_size > before:
        time.sleep(0.001)
    assert not one.store.failed_writes and not one.worker.counts.skipped_saves


def kept_in_ram(shape: Shape, blocks: int) -> dict:
    """Counters of a first and a second hit of an engine with ``local_cpu: true``."""
    prefix = prefix_of(blocks)
    with rank("redis", shape, blocks, local_cpu=True) as one:
        client, ram = one.server.client(), one.store.manager.local_cpu_backend
        one.save("save", prefix)
        while client.dbsize() < blocks + shape.states or ram.hot_cache:
            time.sleep(0.01)
            ram.clear()  # as after a restart; what is being written stays
        watch = Watch(client)
        return {
            f"{which} hit, local_cpu": watch.of(lambda which=which: hit(one, which, prefix, 0))
            for which in ("first", "second")
        }


def spread(shape: Shape, blocks: int, clusters: Sequence[int], prompts: int) -> dict[int, dict]:
    """How equal primaries share the records of many prompts, by their number.

    Returns:
        ``largest``: records on the fullest node over the mean; ``whole``: share of the
        prompts that have nothing on a given node, so that its loss costs them nothing.
    """
    records = {nodes: [0] * nodes for nodes in clusters}
    whole: dict[int, list[float]] = {nodes: [] for nodes in clusters}
    with rank("redis", dataclasses.replace(shape, layers=1), 1) as one:
        for seed in range(prompts):
            keys = load_keys(prefix_of(blocks, seed), 0, blocks, shape.plan)
            names = [one.store.engine_key(key).to_string() for key in keys]
            slots = [key_slot((name + "kv_bytes").encode()) for name in names]
            for nodes in clusters:
                for slot in slots:
                    records[nodes][slot * nodes // SLOTS] += 1
                used = len({slot * nodes // SLOTS for slot in slots})
                whole[nodes].append(1 - used / nodes)
    return {
        nodes: {"largest": max(found) / mean(found), "whole": mean(whole[nodes])}
        for nodes, found in records.items()
    }
