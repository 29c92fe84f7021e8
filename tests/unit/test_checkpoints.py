# SPDX-License-Identifier: Apache-2.0
import pytest

from lmcache_hybrid.scheduler.checkpoints import Checkpoints

N = 16


def stops(num_tokens: int, junction: int = 0, **options) -> Checkpoints:
    made = Checkpoints(**{"block_size": N, "interval": 0, "decode": False, **options})
    made.begin(num_tokens)
    made.junction = junction
    return made


def walk(made: Checkpoints, computed: int = 0, count: int = 12) -> list[int]:
    """All boundaries wanted, in the order in which they are reached."""
    found = []
    while (computed := made.after(computed)) and len(found) < count:
        found.append(computed)
    return found


def test_nothing_is_wanted_by_default():
    assert walk(stops(10 * N)) == []


def test_a_junction_is_wanted_once():
    assert walk(stops(10 * N, junction=4 * N)) == [4 * N]
    assert walk(stops(10 * N, junction=4 * N), computed=4 * N) == []


def test_a_junction_past_the_last_boundary_is_not():
    assert walk(stops(10 * N, junction=10 * N)) == []


def test_an_interval_ends_at_the_last_boundary():
    assert walk(stops(10 * N, interval=3 * N)) == [3 * N, 6 * N, 9 * N]
    assert walk(stops(9 * N, interval=3 * N)) == [3 * N, 6 * N]
    assert walk(stops(10 * N, junction=5 * N, interval=3 * N), 4 * N) == [5 * N, 6 * N, 9 * N]


@pytest.mark.parametrize("tokens", [N // 2, N, N + 1])
def test_decoding_goes_on_from_the_last_boundary(tokens):
    first = (tokens - 1) // N * N + N
    assert walk(stops(tokens, decode=True), count=3) == [first, first + N, first + 2 * N]


def test_what_vllm_does_not_offer_includes_the_last_boundary():
    assert walk(stops(10 * N, offered=False)) == [9 * N]
    assert walk(stops(10 * N, offered=False, interval=4 * N)) == [4 * N, 8 * N, 9 * N]


def test_admitted_again_with_more_tokens():
    made = stops(10 * N, junction=4 * N)
    made.begin(13 * N)
    assert (made.junction, made.end) == (0, 12 * N)
