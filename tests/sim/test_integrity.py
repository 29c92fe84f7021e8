# SPDX-License-Identifier: Apache-2.0
"""Each rule that the simulation checks after a step, broken once."""

from functools import partial
from types import SimpleNamespace

import pytest

from lmcache_hybrid.storage.tiers.ram import unpin_memory

from .engine import SimEngine
from .integrity import check
from .setup import Setup
from .storage import Pool, close_storage
from .warm import PROMPT


class Memory:
    """A record in LMCache's pool with one reference, the claim's."""

    references = 1

    def get_ref_count(self) -> int:
        return self.references

    def ref_count_down(self) -> None:
        self.references -= 1


def fine() -> None:
    pass


def broken() -> None:
    raise AssertionError("of the test")


def claim(memory: Memory) -> SimpleNamespace:
    return SimpleNamespace(_pinned=[partial(unpin_memory, [memory])])


def engine(filed=(), taken=(), scheduler=fine, lookup=fine, store=fine, worker=fine):
    """One rank whose lookup filed some claims and whose loads took others."""
    loads = {str(at): SimpleNamespace(claim=each) for at, each in enumerate(taken)}
    joined = SimpleNamespace(loads=SimpleNamespace(_running=loads), check_integrity=worker)
    claims = {str(at): (1, each) for at, each in enumerate(filed)}
    return SimpleNamespace(
        hybrid=SimpleNamespace(check_integrity=scheduler),
        ranks=[SimpleNamespace(connector=SimpleNamespace(worker=joined))],
        lookups=[SimpleNamespace(_claims=claims, check_integrity=lookup)],
        stores=[SimpleNamespace(check_integrity=store)],
    )


def test_claims_of_a_lookup_and_of_loads_are_fine():
    check(engine([claim(Memory())], [claim(Memory()), None]))


@pytest.mark.parametrize("part", ["scheduler", "lookup", "store", "worker"])
def test_every_part_is_asked(part):
    with pytest.raises(AssertionError, match="of the test"):
        check(engine(**{part: broken}))


def test_a_claim_that_is_filed_and_taken_is_found():
    both = claim(Memory())
    with pytest.raises(AssertionError, match="filed and taken"):
        check(engine([both], [both]))


@pytest.mark.parametrize("place", ["filed", "taken"])
def test_a_claim_whose_memory_was_given_back_is_found(place):
    memory = Memory()
    memory.ref_count_down()
    with pytest.raises(AssertionError, match="given back"):
        check(engine(**{place: [claim(memory)]}))


@pytest.mark.parametrize("how", ["flip", "header", "swap"])
def test_what_a_load_copies_is_not_damaged(how):
    """A device copies it after its check. What is only claimed is damaged."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sas", answers=0), pool)
    engine.add("first", PROMPT, 2)
    engine.drain()
    _, memory = pool.records[0]
    memory.ref_count_up()  # as a claim
    memory.ref_count_up()  # as a load
    before = bytes(memory.byte_array)
    pool.damage(0, how)
    assert bytes(memory.byte_array) == before and not pool.damaged
    memory.ref_count_down()
    pool.damage(0, how)
    assert bytes(memory.byte_array) != before and pool.damaged
    memory.ref_count_down()


def test_the_end_of_the_storage_writes_into_no_record():
    """LMCache gives back their memory first: what is written there damages the heap."""
    pool = Pool()
    engine = SimEngine(Setup(groups="sas", answers=0), pool)
    engine.add("first", PROMPT, 2)
    engine.drain()
    assert pool.records
    before = pool.reuses.copy()
    close_storage()
    assert pool.reuses == before
