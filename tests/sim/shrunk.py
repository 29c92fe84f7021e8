# SPDX-License-Identifier: Apache-2.0
"""Programs that found bugs of vLLM's, as hypothesis shrank them.

With our repairs they end well; without the one that is named they fail, see tests/repairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_patch import partial_hits, scheduler_repairs

from .engine import Stuck
from .model import WrongBytes
from .offers import LOADS
from .program import Run, Tally
from .setup import Setup
from .storage import N


@dataclass(frozen=True)
class Shrunk:
    """A program, and what happens in it.

    Attributes:
        name: what must be true.
        repair: without which it fails.
        error: what it fails with.
        met: events by how often they happen at least where it does not fail.
    """

    name: str
    repair: Callable[[], None]
    error: type[AssertionError]
    setup: Setup
    operations: tuple
    met: dict[str, int]

    def play(self) -> None:
        """Raises Stuck or WrongBytes, or Missed where no bug could show."""
        tally = Tally()
        Run(self.setup, tally).play(self.operations)
        missed = {event for event, count in self.met.items() if tally.events[event] < count}
        if missed:
            raise Missed(f"{self.name!r} shows nothing any more: no {', '.join(missed)}")

    def __str__(self) -> str:
        return self.name


class Missed(AssertionError):
    """A program does not get to where its bug was."""


SHRUNK = (
    Shrunk(
        "loads of different priority do not block each other",
        scheduler_repairs.promote_loads_in_order,
        Stuck,
        Setup(groups="as", blocks=10, batch=2 * N, seqs=2, priority=True, part_bytes=1),
        (
            *(("add", 0, 14, 0), ("step", 0, 15, 0), ("reset", 0, 0, 0)),
            *(("add", 0, 2, 10), ("add", 0, 104, 0), ("hold", 0, 0, 0)),
            *(("step", 0, 0, 0), ("step", 0, 0, 0), ("step", 0, 3, 0), ("step", 0, 8, 0)),
        ),
        {"preempted": 1, "hits": 1},
    ),
    Shrunk(
        "two failed loads do not block each other",
        scheduler_repairs.free_failed_loads,
        Stuck,
        Setup(groups="aw", engines=2, blocks=12, batch=2 * N, seqs=1, part_bytes=1, window=2),
        (
            *(("add", 0, 4, 0), ("again", 1, 0, 0), ("step", 0, 0, 0)),
            *(("again", 1, 0, 0), ("flip", 0, 0, 0)),
        ),
        {"failed loads": 2},
    ),
    Shrunk(
        "a load reserves room for its windows",
        scheduler_repairs.reserve_windows,
        Stuck,
        Setup(groups="aaws", blocks=38, batch=29, seqs=2, priority=True, checkpoint=N, window=9),
        (
            *(("add", 0, 248, 396), ("add", 0, 11147, 35753), ("step", 0, 6, 0)),
            *(("step", 0, 2, 0), ("again", 0, 35, 1 << 16), ("step", 0, 3, 0)),
            *(("step", 0, 15, 0), ("again", 0, 287, 45987), ("step", 0, 6, 0)),
        ),
        {"hits": 2},
    ),
    Shrunk(
        "a step that was taken back leaves nothing to hit",
        scheduler_repairs.unhash_uncomputed_blocks,
        WrongBytes,
        Setup(
            groups="awsss",
            blocks=39,
            batch=2 * N,
            seqs=2,
            drafts=2,
            priority=True,
            checkpoint=N,
            window=2,
            part_bytes=1,
        ),
        (
            *(("add", 0, 9, 255), ("step", 0, 12, 0), ("add", 0, 0, 0), ("step", 0, 4, 0)),
            *(("again", 0, 0, 3496), ("add", 0, 5, 0)),
        ),
        {"preempted": 1, "hits": 1},
    ),
    Shrunk(
        "a chunk that starts inside a block ends with it",
        partial_hits.stop_at_the_next_boundary,
        WrongBytes,
        Setup(
            groups="as", blocks=13, batch=2 * N, seqs=1, hash_size=N // 2, part_bytes=1, interior=1
        ),
        (("add", 0, 163, 0), ("add", 0, 1231, 7613), ("again", 0, 1, 215)),
        {"checkpoints inside a chunk": 1},
    ),
    Shrunk(
        "a load that ends inside a block needs no block that was not reserved",
        scheduler_repairs.skip_partial_publish_when_full,
        Stuck,
        Setup(
            groups="ssa",
            ranks=4,
            engines=2,
            blocks=18,
            batch=N,
            seqs=3,
            hash_size=1,
            retention=None,
            checkpoint=3 * N,
            answers=3,
            runner="v2",
            seed=1394,
        ),
        (
            *(("break", 2, 1900, 2284), ("add", 3, 285, 49619)),
            *(("again", 3, 10374, 5210), ("reload", 2, 21226, 291)),
            *(("full", 1, 6846, 0), ("step", 3, 0, 31422)),
            *(("reload", 0, 8730, 480), ("lose", 0, 7726, 54043)),
            *(("step", 2, 3132, 373), ("header", 0, 7911, 7148)),
            *(("reset", 2, 316, 55459), ("step", 1, 2480, 530)),
            *(("header", 3, 1151, 54904), ("sleep", 0, 367, 58809)),
            *(("load", 1, 3940, 44039), ("break", 2, 59626, 426)),
            *(("add", 1, 363, 59692), ("step", 2, 3329, 442)),
            *(("step", 3, 474, 30870), ("step", 1, 576, 65536)),
            *(("full", 3, 505, 25981), ("reset running", 1, 8152, 40499)),
            *(("reset", 2, 320, 49616), ("again", 2, 7728, 247)),
            *(("step", 2, 2400, 1560), ("step", 2, 1314, 17611)),
            ("again", 1, 1664, 767),
        ),
        {LOADS: 1},
    ),
)
