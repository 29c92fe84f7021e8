# SPDX-License-Identifier: Apache-2.0
"""The formulae behind docs/scale.md count what lookups, loads and saves ask for."""

import pytest

from benchmarks.performance.path import prefix_of
from benchmarks.performance.shapes import QWEN36_27B, SMALL
from benchmarks.scale.model import Sizes, Stream, demand, hot_key_bytes
from lmcache_hybrid.protocol.hit_records import load_keys


def sizes_of(shape, ranks: int = 1) -> Sizes:
    attention = shape.layers * shape.attention_bytes
    state = shape.layers * shape.states * shape.state_bytes
    return Sizes(attention, state, shape.states, ranks)


@pytest.mark.parametrize("shape", [QWEN36_27B, SMALL], ids=lambda shape: shape.name)
@pytest.mark.parametrize("start", [0, 5])
def test_a_hit_reads_what_a_load_reads(shape, start):
    sizes = sizes_of(shape)
    assert sizes.records_of(14 - start) == len(load_keys(prefix_of(14), start, 14, shape.plan))
    assert sizes.bytes_of(14) == shape.bytes_at(14)


def test_commands_and_bytes_of_one_request_each_second():
    sizes = Sizes(attention=100, state=1000, groups=3, ranks=2)
    hit = demand(sizes, Stream("hits", 1, 4, 1, 4, 0, 0), 1)
    # On each rank 4 + 3 records are asked for and read.
    assert hit.commands == 2 * (7 + 7)
    assert (hit.bytes_out, hit.bytes_in, hit.memory_per_hour) == (1400, 0, 0)
    new = demand(sizes, Stream("new", 1, 4, 0, 4, 4, 1), 10)
    # Each is asked for twice, and written.
    assert new.commands == 10 * 2 * (7 + 2 * 7)
    assert (new.bytes_out, new.bytes_in, new.memory_per_hour) == (0, 14_000, 3600 * 14_000)


def test_servers_are_counted_by_what_bounds_them():
    asked = demand(Sizes(60, 0, 0), Stream("hits", 1, 1, 1, 1, 0, 0), 10)
    assert asked.bytes_out == 600
    assert asked.nodes(1000, 0.0, 1.0) == {"network": 1, "core": 0, "memory": 0}
    assert asked.nodes(999, 0.0021, 1.0) == {"network": 2, "core": 3, "memory": 0}


def test_a_hot_block_does_not_get_smaller_with_more_servers():
    stream = Stream("hits", 2, 1, 0.5, 1, 0, 0)
    assert hot_key_bytes(Sizes(100, 0, 3, ranks=4), stream, 10) == 10 * 100 / 4
