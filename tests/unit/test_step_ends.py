# SPDX-License-Identifier: Apache-2.0
import pytest

from lmcache_hybrid.scheduler.step_ends import Drafter, StepEnds

N = 16
MTP, MODULES = Drafter(drops_block=True, runway=1), Drafter(drops_block=True, runway=3)
# Of vLLM 0.33, whose hashes cover what the drafter reads.
AHEAD, MODULES_AHEAD = Drafter(runway=1, look_ahead=1), Drafter(runway=3, look_ahead=3)


def stops(num_tokens: int, junction: int = 0, **options) -> StepEnds:
    made = StepEnds(**{"block_size": N, "interval": 0, "decode": False, **options})
    made.begin(num_tokens)
    made.junction = junction
    return made


def walk(made: StepEnds, computed: int = 0, count: int = 12) -> list[int]:
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


def test_where_others_wait_a_step_ends_and_the_state_lasts():
    made = stops(10 * N, junction=4 * N)
    made.meetings |= {2 * N, 6 * N, 10 * N}
    assert walk(made) == [2 * N, 4 * N, 6 * N]
    assert [made.lasting(end * N) for end in (2, 3, 4, 6)] == [True, False, True, True]
    made.begin(10 * N)
    assert walk(made) == [], "another admission, other waits"


def test_where_steps_end_is_known():
    made = stops(10 * N + 1, junction=4 * N, interval=3 * N)
    made.meetings.add(5 * N)
    assert [end for end in range(1, 11) if made.ends_at(end * N)] == [3, 4, 5, 6, 9, 10]
    assert not stops(10 * N + 1, junction=4 * N, barred={4 * N}).ends_at(4 * N)


def test_where_blocks_of_states_are_smaller_vllm_ends_no_step_at_the_last_boundary():
    """It does at multiples of a state's block, and only common multiples can be hit."""
    made = stops(4 * N + N // 2 + 1, state_tokens=N // 2)
    assert (made.stop, made.end, made.last) == (4 * N + N // 2, 4 * N, 4 * N)
    assert walk(made) == [4 * N] and made.ends_at(4 * N) and made.lasting(4 * N)
    assert walk(stops(4 * N + N // 2, state_tokens=N // 2)) == [], "there it does by itself"
    made = stops(4 * N + N // 2 + 1, state_tokens=N // 2, drafter=MTP)
    assert (made.stop, made.end) == (4 * N, 4 * N) and walk(made) == []
    assert walk(stops(4 * N + 1, state_tokens=N // 2, offered=False)) == [4 * N]


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


@pytest.mark.parametrize(
    "tokens, end",
    [(N, 0), (2 * N - 1, 0), (2 * N, N), (9 * N + 1, 8 * N), (10 * N - 1, 8 * N), (10 * N, 9 * N)],
)
def test_beside_mtp_the_last_state_of_a_prompt_lies_a_block_earlier(tokens, end):
    made = stops(tokens, drafter=MTP)
    boundaries = range(N, 12 * N, N)
    assert [b for b in boundaries if made.lasting(b)] == [b for b in boundaries if b >= end]


def test_beside_mtp_the_block_behind_that_state_may_have_one_too():
    """A hit may end there: what the store returns is not shortened by a block."""
    assert walk(stops(10 * N + 1, drafter=MTP)) == []
    assert walk(stops(10 * N + 1, junction=10 * N, drafter=MTP)) == [10 * N]
    assert walk(stops(10 * N + 1, interval=5 * N, drafter=MTP)) == [5 * N, 10 * N]
    assert walk(stops(10 * N + 1, decode=True, drafter=MTP), count=2) == [11 * N, 12 * N]


@pytest.mark.parametrize("more, last", [(1, 8 * N), (2, 8 * N), (3, 10 * N), (N, 10 * N)])
def test_no_step_ends_where_modules_need_what_follows(more, last):
    found = walk(stops(10 * N + more, interval=2 * N, drafter=MODULES))
    assert found == list(range(2 * N, last + 1, 2 * N))


@pytest.mark.parametrize("more", [1, 3, N])
@pytest.mark.parametrize("drafter", [MTP, MODULES])
def test_what_is_stored_without_a_state_needs_no_end_of_a_step(drafter, more):
    made = stops(10 * N + more, offered=False, drafter=drafter)
    assert walk(made) == [10 * N]
    assert made.lasting(10 * N) and not made.lasting(9 * N)


@pytest.mark.parametrize("drafter", [AHEAD, MODULES_AHEAD])
@pytest.mark.parametrize("more", range(5))
def test_where_hashes_look_ahead_the_last_boundary_is_that_with_a_hash(drafter, more):
    made = stops(10 * N + more, drafter=drafter)
    deepest = 10 * N if more >= drafter.look_ahead else 9 * N
    assert made.last == made.stop == made.end == deepest
    assert walk(stops(10 * N + more, interval=N, drafter=drafter))[-1] == deepest


@pytest.mark.parametrize("tokens", range(4))
def test_a_prompt_that_is_shorter_than_what_hashes_cover_has_no_boundary(tokens):
    made = stops(tokens, drafter=MODULES_AHEAD)
    assert (made.last, made.end, made.after(0)) == (0, 0, 0)


@pytest.mark.parametrize(
    "drafter, wanted", [(Drafter(), True), (MTP, True), (AHEAD, True), (MODULES, False)]
)
def test_ends_of_steps_are_wanted_unless_they_are_computed_again(drafter, wanted):
    made = stops(10 * N, drafter=drafter, chunk_ends=True)
    assert made.wants_end(2 * N) is wanted
