# SPDX-License-Identifier: Apache-2.0
"""What ``plan`` says that engines ask of one store is what a real Valkey counts."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.performance.shapes import SMALL
from benchmarks.scale import measure
from lmcache_hybrid.core.digests import DIGEST_BYTES
from lmcache_hybrid.storage.record_format import HEADER_BYTES
from lmcache_hybrid.storage.remote import redis, servers
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.sizing import sharing
from lmcache_hybrid.tools.sizing.blocks import Group, Sizes
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE
from lmcache_hybrid.tools.sizing.sharing import Sharing
from lmcache_hybrid.tools.sizing.storage import Workload

BLOCKS = 5
# Of records of 1,000 and 2,000 bytes.
PAGE, STATES = (size - HEADER_BYTES - DIGEST_BYTES for size in (1000, 2000))


def sizes_of(*groups: Group, tp: int = 1, n: int = 16) -> Sizes:
    return Sizes(n, 1, 1, groups, tp)


def tiny(tp: int = 1, replicated: bool = False) -> Sizes:
    groups = Group(STATE, 1, STATES), Group(ATTENTION, 1, PAGE, replicated)
    return sizes_of(*groups, tp=tp)


def plan(*words: str) -> str:
    answer = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"})
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_real_redis_counts_the_same() -> None:
    state = Group(STATE, SMALL.layers, SMALL.layers * SMALL.state_bytes)
    page = Group(ATTENTION, SMALL.layers, SMALL.layers * SMALL.attention_bytes)
    sizes = sizes_of(*SMALL.states * [state], page, n=SMALL.block_size)
    # A prompt that hits at the end of its last block, as those that are measured do.
    work = Workload(BLOCKS * SMALL.block_size + 1, 1)
    found = measure.events(SMALL, BLOCKS, 2)
    for name, asked in {
        "lookup of a new prompt": sharing.lookup(sizes, work),
        "lookup of a stored prompt": sharing.lookup(sizes, work),
        "hit": sharing.lookup(sizes, work).plus(sharing.hit(sizes, work)),
        "save": sharing.save(sizes, work),
    }.items():
        event = found["events"][name]
        # A connection that is opened meanwhile is no request.
        opening = sum(event["commands"].get(each, 0) for each in ("client|setinfo", "hello"))
        assert sum(event["commands"].values()) - opening == asked.commands, name
        for direction, size in (("bytes_out", asked.read), ("bytes_in", asked.written)):
            if size:
                assert 1 <= event[direction] / size < 1.001, name
    assert 1 <= found["connections"] <= sharing.REDIS_CONNECTIONS


def test_a_rank_has_a_connection_for_each_thread() -> None:
    assert sharing.REDIS_CONNECTIONS == redis.READERS + redis.WRITERS + redis.ASKERS
    assert sharing.REDIS_CONNECTIONS <= servers.KEPT


def test_a_request_hits_or_is_stored() -> None:
    work = Workload(40, 1)  # two blocks and a bit, one state
    sizes = tiny()
    assert sharing.lookup(sizes, work) == sharing.Asked(3, 0, 0)
    assert sharing.hit(sizes, work) == sharing.Asked(3, 4000, 0)
    assert sharing.save(sizes, work) == sharing.Asked(6, 0, 4000)
    found = sharing.demand(sizes, work, Sharing(20, 2, 0.75, 1e6))
    rows = found.pop("rows")
    assert found == {"engines": 20, "requests": 2, "hit_share": 0.75, "store_rate": 1e6}
    assert [row["engines"] for row in rows] == [1, 10, 20]
    assert rows[-1] == {
        "engines": 20,
        "connections": 20 * sharing.REDIS_CONNECTIONS,
        "requests": 40,
        "commands": 40 * (3 + 0.75 * 3 + 0.25 * 6),
        "read": 40 * 0.75 * 4000,
        "written": 40 * 0.25 * 4000,
        "stored_in_an_hour": 3600 * 40 * 0.25 * 4000,
        "servers": 1,
    }


def test_checkpoints_are_written_and_only_the_last_state_is_read() -> None:
    sizes, work = tiny(), Workload(65, 1, checkpoint=16)
    assert sharing.save(sizes, work).written == 4 * 1000 + 4 * 2000
    assert sharing.hit(sizes, work).read == 4 * 1000 + 2000


def test_a_hit_inside_a_block_reads_a_page_more() -> None:
    sizes, work = tiny(), Workload(41, 1, unit=8)
    assert sharing.hit(sizes, work) == sharing.Asked(3 + 1, 3 * 1000 + 2000, 0)
    assert sharing.lookup(sizes, work).commands == 3 + 1
    # Its states at 32 and 40.
    assert sharing.save(sizes, work).written == 3 * 1000 + 2 * 2000


def test_a_prompt_without_a_boundary_is_stored_and_never_read() -> None:
    sizes, work = tiny(), Workload(16, 1)
    assert sharing.hit(sizes, work) == sharing.Asked(0, 0, 0)
    assert sharing.save(sizes, work).written == 1000


def test_equal_pages_are_read_by_each_rank_and_written_by_one() -> None:
    work = Workload(40, 1)
    same = sharing.save(tiny(4, replicated=True), work)
    assert same.written == 2 * 1000 + 4 * 2000
    assert sharing.save(tiny(4), work).written == 4 * 4000
    assert sharing.hit(tiny(4, replicated=True), work) == sharing.hit(tiny(4), work)


@pytest.mark.parametrize(
    ("engines", "expected"), [(1, [1]), (10, [1, 10]), (11, [1, 10, 11]), (200, [1, 10, 100, 200])]
)
def test_rows_grow_tenfold_up_to_what_is_asked(engines: int, expected: list[int]) -> None:
    assert sharing.steps(engines) == expected


def test_servers_are_those_that_have_the_network() -> None:
    """Of 60 % of each; reads and writes do not add up."""
    asked = sharing.demand(tiny(), Workload(40, 1), Sharing(3, 1000, 1, 10e6))
    assert [row["servers"] for row in asked["rows"]] == [1, 2]
    asked = sharing.demand(tiny(), Workload(40, 1), Sharing(3, 1000, 0, 10e6))
    assert [row["servers"] for row in asked["rows"]] == [1, 2]
    assert asked["rows"][-1]["read"] == 0


def test_plan_prints_the_table_that_its_json_has() -> None:
    words = ["Qwen3.6-27B", "--tp", "2", "--engines", "1000", "--requests-per-second", "2"]
    words += ["--hit-share", "0.25", "--store-rate", "10"]
    found = json.loads(plan(*words, "--json"))["one_store"]
    printed = plan(*words)
    rows = re.findall(r"^ ([\d,]+) +([\d,]+) +[\d,.]+ +([\d,.]+) ", printed, re.MULTILINE)[-4:]
    engines = ["1", "10", "100", "1,000"]
    assert [row[0] for row in rows] == engines
    for (_, connections, read), row in zip(rows, found["rows"], strict=True):
        assert int(connections.replace(",", "")) == row["connections"] == 16 * row["engines"]
        assert float(read.replace(",", "")) == pytest.approx(row["read"] / (1 << 30), rel=0.01)
    assert "25 % of them hit" in printed and "10 GiB/s each (--store-rate)" in printed
    assert "A Redis takes 10,000 of them: set its maxclients higher." in printed
    assert "maxclients" not in plan(*words[:3], "--engines", "10")


def test_without_engines_nothing_is_said_of_them() -> None:
    assert "Engines on one store" not in plan("Qwen3.6-27B")
    assert json.loads(plan("Qwen3.6-27B", "--json"))["one_store"] is None


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    words = ["Qwen3.6-27B", "--tp", "2", "--engines", "1000", "--requests-per-second", "2"]
    assert f"lmcache-hybrid plan {' '.join(words)}\n" in page
    table = plan(*words).partition("Engines on one store")[2].partition("What to write")[0]
    for line in table.splitlines():
        assert line.rstrip() in page
