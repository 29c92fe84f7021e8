# SPDX-License-Identifier: Apache-2.0
"""A Redis cluster that loses a node, and gets it back, under a running engine."""

import random
import re
import time
from pathlib import Path

import pytest
from broken_store import CUTS, N
from engine import Engine
from servers import Cluster

from lmcache_hybrid.tools.tiny_models import make_model

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
