# SPDX-License-Identifier: Apache-2.0
"""A Redis cluster under running engines: its slots move, it loses nodes and gets them back."""

import random
import re
import time
from pathlib import Path

import pytest
from redis.crc import key_slot

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.broken_store import CUTS, N
from tests.e2e.engine import Engine
from tests.servers import SLOTS, Cluster, Node, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = {
    "local_cpu": False,
    "max_local_cpu_size": 0.05,
    # Short, as the defaults only make the test longer.
    "blocking_timeout_secs": 2,
    "lookup_timeout_ms": 1000,
    # After ten failed reads in 30 s LMCache leaves a remote store alone for 5 minutes.
    "extra_config": {"get_blocking_failed_threshold": 1_000_000},
}


def test_a_node_is_killed_between_a_lookup_and_its_load(model_dir: Path, tmp_path: Path) -> None:
    rng = random.Random("cluster")
    prompts = [[rng.randrange(32, 127) for _ in range(3 * N + 40)] for _ in range(3)]
    model = make_model("lfm2", model_dir / "lfm2")
    cluster = Cluster(tmp_path)
    try:
        with Engine(model, {**CONFIG, "remote_url": cluster.url}, **CUTS) as engine:
            expected = [engine.ask(prompt).output for prompt in prompts[:1]]
            engine.settle()
            # A node that the load of the first prompt needs.
            node = next(n for n in cluster.nodes if n.client.keys("*kv_bytes"))
            expected += [engine.ask(prompt).output for prompt in prompts[1:]]
            engine.settle()
            before = engine.counts()

            def check(hit: bool) -> None:
                for prompt, output in zip(prompts, expected, strict=True):
                    engine.forget()
                    answer = engine.ask(prompt)
                    assert answer.output == output
                    assert answer.external == (3 * N if hit else 0)
                engine.settle()

            check(hit=True)
            engine.forget()
            answer = engine.ask_held(prompts[0], node.kill)
            assert answer.output == expected[0]
            warned = re.findall(r"loading .* failed and they are computed instead", engine.log)
            assert len(warned) == 1
            cluster.wait_until("fail")
            check(hit=False)
            assert engine.counts()["failed_writes"] > before["failed_writes"]

            node.start()
            cluster.wait_until("ok")
            # What the node had is lost, and stored again when it is computed.
            deadline = time.monotonic() + 30
            for prompt in prompts:
                while engine.ask(prompt).external < 3 * N:
                    assert time.monotonic() < deadline, "it is not stored again"
                    engine.settle()
                    engine.forget()
                engine.forget()
            check(hit=True)
            assert engine.counts()["live"] == before["live"]
    finally:
        cluster.close()


class Pair:
    """Two engines on one cluster, and the prompts that they have stored.

    Attributes:
        known: each prompt and its answer with nothing cached.
    """

    def __init__(self, one: Engine, other: Engine) -> None:
        self.engines = one, other
        self.known: list[tuple[list[int], tuple]] = []
        self._rng = random.Random("two engines on a cluster")
        for engine in self.engines:
            engine.rewrites = True  # what they stored before a primary was lost

    def store(self, engine: Engine) -> None:
        """Compute and store a new prompt."""
        prompt = [self._rng.randrange(32, 127) for _ in range(3 * N + 40)]
        self.known.append((prompt, engine.ask(prompt).output))
        engine.settle()

    def check(self, hit: bool) -> None:
        """Both answer all prompts the same, all of them from the cluster or none."""
        for engine in self.engines:
            for prompt, output in self.known:
                engine.forget()
                answer = engine.ask(prompt)
                assert answer.output == output
                assert answer.external == (3 * N if hit else 0)
            engine.settle()
            engine.forget()

    def counts(self, name: str) -> list:
        return [engine.counts()[name] for engine in self.engines]

    def said(self, words: str) -> list[int]:
        """How often the log of each has words."""
        return [len(re.findall(words, engine.log)) for engine in self.engines]


FAILED_LOAD, FAILED_LOOKUP = "loading .* failed and they are computed", "fail and count as misses"


def test_two_engines_while_slots_move_and_a_primary_is_replaced(
    model_dir: Path, tmp_path: Path
) -> None:
    """Each hits what the other stored, before, during and after; every answer is the same."""
    model = make_model("lfm2", model_dir / "lfm2")
    cluster = Cluster(tmp_path)
    settings = {**CONFIG, "remote_url": cluster.url}
    try:
        with Engine(model, settings, **CUTS) as one, Engine(model, settings, **CUTS) as other:
            pair = Pair(one, other)
            pair.store(one)
            # A record of the first prompt, whose slot moves.
            name = next(key for node in cluster.nodes for key in node.client.keys("*kv_bytes"))
            for engine in (other, one, other):
                pair.store(engine)
            pair.check(hit=True)
            live = pair.counts("live")
            source = cluster.node_of(name)
            target = next(node for node in cluster.nodes if node is not source)

            move_slots(cluster, pair, name, source, target)
            assert pair.counts("failed_writes") == [0, 0]
            assert pair.said(FAILED_LOAD) == pair.said(FAILED_LOOKUP) == [0, 0]

            replica = cluster.add_replica(tmp_path, target)
            lose_primary(cluster, pair, target, replica)
            failed = pair.counts("failed_writes")
            return_primary(pair, target, replica)
            assert pair.counts("failed_writes") == failed
            assert pair.said(FAILED_LOAD) == [1, 0]
            assert pair.counts("live") == live
    finally:
        cluster.close()


def move_slots(cluster: Cluster, pair: Pair, name: bytes, source: Node, target: Node) -> None:
    """Half of the slots of a primary go to another one, between a lookup and its load in the end.

    Args:
        name: of a record of the first prompt, in one of these slots.
    """
    at, half = cluster.nodes.index(source), SLOTS // 6
    first = key_slot(name) // half * half
    slots = range(max(first, SLOTS * at // 3), min(first + half, SLOTS * (at + 1) // 3))
    cluster.begin_to_move(slots, source, target)
    pair.check(hit=True)
    for engine in pair.engines:
        pair.store(engine)
    pair.check(hit=True)
    assert cluster.move_values(slots, source, target, most=1) == 1
    pair.check(hit=True)

    def end() -> None:
        cluster.move_values(slots, source, target)
        cluster.end_move(slots, target)
        assert target.client.exists(name)

    prompt, output = pair.known[0]
    answer = pair.engines[1].ask_held(prompt, end)
    assert (answer.output, answer.external) == (output, 3 * N)
    pair.check(hit=True)


def lose_primary(cluster: Cluster, pair: Pair, primary: Node, replica: Node) -> None:
    """A primary is killed between a lookup and its load; later its replica takes over."""
    wait_for(lambda: replica.client.dbsize() == primary.client.dbsize(), "the replica lags behind")
    prompt, output = pair.known[0]
    assert pair.engines[0].ask_held(prompt, primary.kill).output == output
    assert pair.said(FAILED_LOAD) == [1, 0]
    cluster.wait_until("fail")
    pair.check(hit=False)
    # Not with each lookup.
    assert all(1 <= count < len(pair.known) for count in pair.said(FAILED_LOOKUP))

    replica.client.config_set("cluster-replica-no-failover", "no")
    wait_for(replica.is_primary, "the replica does not take over")
    cluster.wait_until("ok")
    pair.check(hit=True)
    pair.store(pair.engines[0])
    pair.check(hit=True)


def return_primary(pair: Pair, primary: Node, replica: Node) -> None:
    """A lost primary comes back as a replica, and takes its place again as planned."""
    primary.start()
    wait_for(primary.follows, "the lost primary does not come back")
    primary.client.execute_command("CLUSTER", "FAILOVER")
    wait_for(primary.is_primary, "the planned failover does not end")
    wait_for(replica.follows, "the replica does not make room")
    pair.check(hit=True)
    pair.store(pair.engines[1])
    pair.check(hit=True)
