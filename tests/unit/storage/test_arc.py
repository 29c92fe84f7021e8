# SPDX-License-Identifier: Apache-2.0
"""What is evicted first: prompts seen once push out one another, and not what is used."""

from collections.abc import Iterable, Iterator
from itertools import count
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy

from lmcache_hybrid.storage import eviction_order
from lmcache_hybrid.storage.eviction_order import ARC

ROOM = 40


class Backend:
    """A full store of ROOM records under a policy, as LMCache's backends call it."""

    def __init__(self, policy=None, room: int = ROOM) -> None:
        self.policy = policy or ARC()
        self.index = self.policy.init_mutable_mapping()
        self.room, self._requests = room, count()

    def put(self, keys: Iterable[str]) -> None:
        for key in keys:
            while len(self.index) >= self.room:
                (evicted,) = self.policy.get_evict_candidates(self.index)
                del self.index[evicted]
            if key not in self.index:
                self.index[key] = SimpleNamespace(can_evict=True)
                self.policy.update_on_put(key)

    def store(self, keys: Iterable[str], passing: Iterable[str] = (), owner: str = "") -> None:
        """Save a prompt as one request, the ends of its chunks first."""
        keys, passing = list(keys), list(passing)
        self.put([*passing, *keys])
        owner = owner or f"request {next(self._requests)}"
        eviction_order.arrange(self.policy, self.index, keys[::-1], passing, owner)

    def hit(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.policy.update_on_hit(key, self.index)

    def has(self, keys: Iterable[str]) -> bool:
        return all(key in self.index for key in keys)


def prompt(name: str, pages: int = 4) -> list[str]:
    return [f"{name}{page}" for page in range(pages)]


def strangers() -> Iterator[list[str]]:
    return (prompt(f"stranger {number}/") for number in count())


def test_prompts_that_come_once_leave_what_was_hit():
    store, other = Backend(), strangers()
    for name in "abcde":
        store.store(prompt(name))
        store.hit(prompt(name))
    for _ in range(100):
        store.store(next(other))
    assert all(store.has(prompt(name)) for name in "abcde")
    plain = Backend(LRUCachePolicy())
    plain.store(prompt("a"))
    plain.hit(prompt("a"))
    for _ in range(100):
        plain.store(next(other))
    assert not plain.has(prompt("a"))


def test_a_hit_counts_where_lmcaches_own_count_fails(monkeypatch):
    """The read that is under way would fail, and its memory not come back."""

    def fails(self, key):
        raise OSError("of the test")

    store, other = Backend(), strangers()
    store.store(prompt("used"))
    with monkeypatch.context() as patch:
        patch.setattr(LRUCachePolicy, "update_chunk_hash_dict", fails)
        store.hit(prompt("used"))
    for _ in range(3 * ROOM):
        store.store(next(other))
    assert store.has(prompt("used"))


def test_what_was_hit_is_evicted_by_last_use():
    store = Backend(room=12)
    for name in "abc":
        store.store(prompt(name))
        store.hit(prompt(name))
    store.hit(prompt("a"))
    store.store(prompt("d"))
    store.hit(prompt("d"))
    assert store.has(prompt("a")) and store.has(prompt("c")) and not store.has(prompt("b")[:1])


@pytest.mark.parametrize("pages", [5, 20])
def test_the_newest_prompt_stays_whole(pages):
    """Also where it alone is more than may wait for a hit."""
    store = Backend()
    for name in "abcde":
        store.store(prompt(name))
        store.hit(prompt(name))
    store.store(prompt("before", 20))
    store.store(prompt("new", pages))
    store.put(["of a prompt that is being computed"])
    assert store.has(prompt("new", pages))


def test_a_prompt_that_is_computed_does_not_push_out_its_own_beginning():
    store = Backend(room=20)
    for name in "ab":
        store.store(prompt(name))
        store.hit(prompt(name))
    for number in range(5):
        store.store(prompt(f"once {number}/"))
    store.put(prompt("long", 8))
    assert store.has(prompt("long", 8)) and store.has(prompt("a")) and store.has(prompt("b"))


def test_the_end_of_a_prompt_goes_before_its_beginning():
    store = Backend(room=8)
    store.store(prompt("a"))
    store.store(prompt("b"))
    store.put(["c"])
    assert "a3" not in store.index and store.has(prompt("a", 3)) and store.has(prompt("b"))


def test_states_where_chunks_ended_go_first_unless_they_are_hit():
    store, other = Backend(), strangers()
    for name in "abcdefgh":
        store.store(prompt(name), [f"{name}/chunk"])
    assert len(store.index) == ROOM
    store.hit(["a/chunk"])
    store.store(next(other))
    assert sum(f"{name}/chunk" in store.index for name in "abcdefgh") == 4
    assert "a/chunk" in store.index and all(store.has(prompt(name)) for name in "abcdefgh")


def test_a_prefix_that_two_requests_computed_is_one_that_was_used():
    store, other = Backend(), strangers()
    store.store(prompt("shared"), owner="first")
    store.store(prompt("shared") + ["answer"], owner="first")  # it stores more: the same request
    store.store(prompt("both"), owner="one")
    store.store(prompt("both") + ["question"], owner="another")
    for _ in range(20):
        store.store(next(other))
    assert store.has(prompt("both"))
    assert not store.has(["shared0"])


def test_what_comes_back_after_its_eviction_is_kept():
    store, other = Backend(), strangers()
    for name in "abcde":
        store.store(prompt(name))
        store.hit(prompt(name))
    store.store(prompt("late"))
    for _ in range(6):
        store.store(next(other))
    assert not store.has(["late0"])
    store.store(prompt("late"))
    for _ in range(20):
        store.store(next(other))
    assert store.has(prompt("late"))


def test_a_conversation_that_goes_on_keeps_its_new_turns():
    """Its earlier turns were hit, the new ones not yet."""
    store, other = Backend(), strangers()
    store.store(prompt("chat"))
    store.hit(prompt("chat"))
    store.store([*prompt("chat"), "turn", "state"])
    for _ in range(20):
        store.store(next(other))
    assert store.has([*prompt("chat"), "turn", "state"])


def test_new_prompts_get_the_room_that_they_would_have_used():
    store = Backend()
    for name in "abcde":
        store.store(prompt(name))
        store.hit(prompt(name))
    for _ in range(3):  # as many as fit in half of it, each comes back once it was evicted
        for number in range(10):
            store.store(prompt(f"new {number}/"))
    waiting = store.policy._share
    assert waiting > 0 and not store.has([f"{name}0" for name in "abcde"])
    for name in "abcde":  # they were needed after all
        store.store(prompt(name))
    assert store.policy._share < waiting


def test_what_is_pinned_or_being_written_is_no_candidate():
    policy, index = ARC(), {}
    for key in "abc":
        policy.update_on_put(key)
    policy.arrange("ab", (), "request")
    index.update(b=SimpleNamespace(can_evict=False), c=SimpleNamespace(can_evict=True))
    assert policy.get_evict_candidates(index, 3) == ["c"]
    del index["c"]
    index["a"] = SimpleNamespace(can_evict=True)
    assert policy.get_evict_candidates(index, 3) == ["a"]


def test_what_the_policy_was_not_told_of_is_evicted_last():
    """As a record that was removed while its write was under way."""
    policy, index = ARC(), dict.fromkeys("ab", SimpleNamespace(can_evict=True))
    policy.update_on_put("b")
    policy.update_on_hit("c", index)  # gone meanwhile
    assert policy.get_evict_candidates(index, 3) == ["b", "a"]


def test_what_is_removed_is_forgotten():
    policy = ARC()
    for key in "ab":
        policy.update_on_put(key)
    policy.arrange("a", (), "request")
    for key in "abc":
        policy.update_on_force_evict(key)
    policy.arrange("ab", "b", "request")
    assert not policy._once and not policy._main


KEYS = st.lists(st.sampled_from("abcdefghij"), max_size=5, unique=True)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), KEYS, KEYS, st.sampled_from(["x", "y"])),
        st.tuples(st.just("hit"), KEYS),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=30,
)


@settings(max_examples=200)
@given(CALLS)
def test_every_record_can_be_evicted_once_whatever_happened(calls):
    store = Backend(room=8)
    for verb, *arguments in calls:
        if verb == "store":
            store.store(*arguments)
        elif verb == "hit":
            store.hit(key for key in arguments[0] if key in store.index)
        elif verb == "remove":
            for key in arguments[0]:
                store.index.pop(key, None)
                store.policy.update_on_force_evict(key)
        else:
            for key in store.policy.get_evict_candidates(store.index, *arguments):
                del store.index[key]
    assert sorted(store.policy.get_evict_candidates(store.index, 99)) == sorted(store.index)
    assert not store.policy._once and not store.policy._main


@pytest.mark.parametrize("chosen, kind", [({}, ARC), ({"cache_policy": "LRU"}, LRUCachePolicy)])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_policy_that_somebody_chose_is_lmcaches(box, tier, chosen, kind):
    backends = box(tier, **chosen).store.manager.storage_backends.values()
    policies = {type(each.cache_policy) for each in backends if hasattr(each, "cache_policy")}
    assert policies == {kind}


def test_memory_does_not_grow_with_all_that_was_ever_stored():
    policy = ARC()
    for number in range(eviction_order.NOTED + 10):
        policy.update_on_put(number)
        policy.update_on_force_evict(number)
    assert len(policy.chunk_hash_to_init_timestamp) <= eviction_order.NOTED
