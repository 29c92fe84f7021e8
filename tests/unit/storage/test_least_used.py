# SPDX-License-Identifier: Apache-2.0
"""The order in which records of a folder go: by minutes, and at one time the deepest first."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lmcache_hybrid.core.keys import ATTENTION, STATE, RecordKey
from lmcache_hybrid.storage.folder.least_used import MINUTE, UNREADABLE, depth_of, least_used
from lmcache_hybrid.storage.record_format import record_bytes, seal

N = 16


@dataclass(frozen=True)
class Record:
    used: float
    taken: int = 10
    boundary: int = N
    kind: int = ATTENTION

    def depth(self) -> tuple[int, int]:
        return -self.boundary, -self.kind


def chosen(records: list[Record], excess: int) -> list[Record]:
    return sorted(least_used(lambda: iter(records), excess), key=records.index)


OLD, LATER, NEW = (Record(minute * MINUTE + 1) for minute in (5, 6, 7))


@pytest.mark.parametrize(
    "excess, expected",
    [
        (-5, []),
        (0, []),
        (1, [OLD]),
        (10, [OLD]),
        (11, [OLD, LATER]),
        (30, [OLD, LATER, NEW]),
        (99, [OLD, LATER, NEW]),
    ],
)
def test_least_recently_used_first_and_as_few_as_will_do(excess, expected):
    assert set(chosen([NEW, OLD, LATER], excess)) == set(expected)


def prompt(minute: float, boundaries: int) -> list[Record]:
    """Pages of a prompt, written one behind the other, and the state at its end."""
    ends = [(at + 1) * N for at in range(boundaries)]
    pages = [Record(minute * MINUTE + at, boundary=end) for at, end in enumerate(ends)]
    return [*pages, Record(minute * MINUTE + 30, boundary=ends[-1], kind=STATE)]


def test_of_one_prompt_the_end_goes_first_and_its_state_before_its_page():
    """Without the first page nothing behind it is of use."""
    pages, state = prompt(5, 4)[:-1], prompt(5, 4)[-1]
    for fewer, expected in [
        (10, [state]),
        (20, [state, pages[3]]),
        (30, [state, pages[3], pages[2]]),
        (50, [state, *reversed(pages)]),
    ]:
        assert set(chosen([*pages, state], fewer)) == set(expected)


def test_an_older_prompt_goes_before_the_end_of_a_newer_one():
    older, newer = prompt(5, 2), prompt(6, 4)
    assert chosen([*newer, *older], 30) == older
    assert chosen([*newer, *older], 40) == [newer[-1], *older]


def test_records_that_change_between_two_looks():
    """A file that is used meanwhile stays, and one that is gone leaves no hole."""
    looks = iter([[OLD, LATER, NEW], [OLD, LATER, NEW], [Record(9 * MINUTE), NEW]])
    assert list(least_used(lambda: iter(next(looks)), 10)) == []
    looks = iter([[OLD, NEW], [NEW], [NEW]])
    assert list(least_used(lambda: iter(next(looks)), 10)) == []


def test_it_keeps_no_record_in_memory():
    alive = most = 0

    class Counted(Record):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def scan() -> Iterator[Counted]:
        nonlocal alive, most
        for number in range(1000):
            alive += 1
            most = max(most, alive)
            yield Counted(float(number % 120))

    assert sum(1 for _ in least_used(scan, 5000)) == 500
    assert most < 10


def header(kind: int, boundary: int) -> bytes:
    record = bytearray(record_bytes(0))
    seal(memoryview(record), RecordKey(kind, 0, b"h" * 32, boundary), bytes(16), b"")
    return bytes(record)


def test_depth_comes_from_the_header():
    order = [
        UNREADABLE,
        depth_of(header(STATE, 4 * N)),
        depth_of(header(ATTENTION, 4 * N)),
        depth_of(header(STATE, N)),
        depth_of(header(ATTENTION, N)),
    ]
    assert order == sorted(set(order))
    assert depth_of(b"") == depth_of(bytes(200)) == UNREADABLE
