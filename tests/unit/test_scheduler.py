# SPDX-License-Identifier: Apache-2.0
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from lmcache_hybrid.protocol.metadata import NOTHING, ConnectorMetadata, LoadSpec, SaveSpec
from lmcache_hybrid.protocol.prefix import load_keys
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.scheduler.scheduler import HybridScheduler

from .helpers import OPTIONS, PLAN, WIDE, WINDOWS, N, Ranks, fill, make_output, make_request

# PLAN: states in groups 0, 1 and 3, attention in group 2.
STATES = PLAN.states


class Rig:
    """A scheduler over ranks, and the small part of vLLM that calls it."""

    def __init__(self, ranks: int = 1, plan=PLAN, hash_block_size: int = N, **options) -> None:
        self.ranks = Ranks(ranks, plan)
        self.plan = plan
        self.scheduler = HybridScheduler(
            plan, dataclasses.replace(OPTIONS, **options), hash_block_size, self.ranks.queue
        )

    def holds(self, request, attention: int, *states: int) -> "Rig":
        """Let every rank hold blocks of the request's prompt."""
        prefix = prefix_of(request, N, 1)
        for store in self.ranks.stores:
            fill(store, prefix, attention, states, self.plan)
        return self

    def match(self, request, computed: int = 0) -> tuple[int, bool]:
        return self.scheduler.match(request, computed)

    def step(self, scheduled=None, tables=None, offers=None, new=()) -> ConnectorMetadata:
        """One step; its dropped claims are released as the workers do."""
        metadata = self.scheduler.step(make_output(scheduled or {}, tables, offers, new))
        for dropped in metadata.dropped:
            for lookup in self.ranks.lookups:
                lookup.drop(*dropped)
        return metadata

    def admit(self, request, computed: int = 0, tables=None) -> LoadSpec | None:
        """Match, allocate, and the step that carries the load."""
        tokens, is_async = self.match(request, computed)
        assert is_async == (tokens > 0)
        tables = tables or table(request)
        self.scheduler.allocated(request, tables, tokens)
        loads = self.step().loads
        assert len(loads) == (tokens > 0)
        return loads[0] if loads else None

    def loaded(self, request, failed: bool = False) -> None:
        """The workers report the end of a load."""
        for lookup in self.ranks.lookups:
            claim = lookup.take(request.request_id)
            if claim is not None:
                claim.release()
        done = {request.request_id}
        output = KVConnectorOutput(finished_recving=done, failed_recving=done if failed else set())
        self.scheduler.transferred(output)

    def forward(self, request, tokens: int, offers=(), tables=None) -> SaveSpec | None:
        """A step that computes ``tokens`` of a request, and what it stores."""
        rid = request.request_id
        metadata = self.step(
            {rid: tokens}, {rid: tables or table(request)}, {rid: list(offers)} if offers else {}
        )
        request.num_computed_tokens += tokens
        assert len(metadata.saves) <= 1
        return metadata.saves[0] if metadata.saves else None

    def prefill(self, request, tokens: int | None = None, computed: int = 0) -> SaveSpec | None:
        """Match without a hit, then compute the prompt in one step."""
        assert self.match(request, computed)[0] == 0
        self.scheduler.allocated(request, table(request), 0)
        return self.forward(request, request.num_tokens if tokens is None else tokens)


def table(request) -> tuple[list[int], ...]:
    """Block ids per group: attention 201, 202, ...; groups at 101, 301, 401 likewise."""
    blocks = -(-request.num_tokens // N)
    return tuple([100 * (g + 1) + 1 + i for i in range(blocks)] for g in range(4))


def all_offers(boundary: int, block: int = 50, groups=STATES) -> list[tuple[int, int, int]]:
    """What vLLM hands off for a boundary (in blocks), groups in any order."""
    return [(group, block + group, boundary * N) for group in reversed(groups)]


def attention_of(save: SaveSpec | None) -> list[int]:
    return [block for block, _ in save.attention] if save else []


# Admission


@pytest.mark.parametrize(
    "tokens, hit",
    [
        (N - 1, 0),
        (N, 0),  # its last token is computed: a state that has seen it is too deep
        (N + 1, 1),
        (3 * N - 1, 2),
        (3 * N, 2),
        (3 * N + 1, 3),
    ],
)
def test_a_hit_leaves_the_last_token_to_compute(tokens, hit):
    long = make_request("long", 4 * N)
    rig = Rig().holds(long, 4, 1, 2, 3, 4)
    assert rig.match(make_request(tokens=tokens)) == (hit * N, hit > 0)


def test_a_hit_goes_to_the_state_boundary():
    request = make_request(tokens=5 * N + 1)
    rig = Rig().holds(request, 5, 1, 3)
    assert rig.match(request) == (3 * N, True)
    counts = rig.scheduler.counts
    assert counts.lookups == {"hit": 1}
    assert (counts.lost_hits, counts.lost_tokens) == (1, 2 * N)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_must_hold_it(ranks):
    request = make_request(tokens=5 * N)
    rig = Rig(ranks).holds(request, 4, 1, 2, 4)
    last = rig.ranks.stores[-1]
    del last.records[load_keys(prefix_of(request, N, 1), 0, 4, PLAN)[-1]]
    assert rig.match(request) == (2 * N, True)


def test_waiting_requests_ask_once():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request) == rig.match(request) == (3 * N, True)
    assert len(rig.ranks.questions) == 1
    other = make_request("miss", 5 * N)
    other_rig = Rig()
    assert other_rig.match(other) == other_rig.match(other) == (0, False)
    assert len(other_rig.ranks.questions) == 1


def test_less_in_the_local_cache_asks_again():
    """The claim starts at the old floor, so the blocks below it are not pinned."""
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 2 * N) == (N, True)
    assert rig.match(request, N) == (2 * N, True)
    assert [q.floor for q in rig.ranks.questions] == [2, 1]


def test_more_in_the_local_cache_needs_no_new_question():
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 0) == (3 * N, True)
    assert rig.match(request, 2 * N) == (N, True)
    rig.scheduler.allocated(request, table(request), N)
    (load,) = rig.step().loads
    assert (load.start, load.boundary) == (2, 3)


@pytest.mark.parametrize("computed", [3 * N, 4 * N])
def test_nothing_to_load_where_the_local_cache_is_as_deep(computed):
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 4, 3)
    assert rig.match(request, computed) == (0, False)
    rig.scheduler.allocated(request, table(request), 0)
    metadata = rig.step({"r": N}, {"r": table(request)})
    assert not metadata.loads
    assert rig.ranks.pins == 0


def test_a_claim_that_the_local_cache_overtook_is_dropped():
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request, 0) == (3 * N, True)
    assert rig.match(request, 3 * N) == (0, False)
    assert rig.step().dropped == (("r", 1),)
    assert rig.ranks.pins == 0 and rig.ranks.num_claims == [0]


def test_a_claim_is_dropped_when_vllm_takes_none_of_it():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request)[0]
    rig.scheduler.allocated(request, table(request), 0)
    assert rig.step().dropped == (("r", 1),)
    assert rig.ranks.pins == 0


@pytest.mark.parametrize("limit, hit", [(3 * N, 3 * N), (3 * N + 1, 0)])
def test_small_hits_are_not_worth_a_load(limit, hit):
    request = make_request()
    rig = Rig(min_retrieve_tokens=limit).holds(request, 3, 3)
    assert rig.match(request) == (hit, hit > 0)
    assert rig.step().dropped == (() if hit else (("r", 1),))


@pytest.mark.parametrize(
    "limit, computed, hit", [(2 * N, 0, 2), (2 * N, N, 3), (3 * N - 1, 0, 2), (99 * N, 0, 4)]
)
def test_max_tokens_per_load(limit, computed, hit):
    request = make_request(tokens=4 * N + 1)
    rig = Rig(max_tokens_per_load=limit).holds(request, 4, 1, 2, 3, 4)
    assert rig.match(request, computed) == (hit * N - computed, True)


def test_a_request_that_must_not_read_is_not_looked_up():
    """Prompt log-probabilities and pooling need every token computed."""
    request = make_request()
    request.skip_reading_prefix_cache = True
    rig = Rig().holds(request, 3, 3)
    assert rig.match(request) == (0, False)
    assert not rig.ranks.questions
    assert attention_of(rig.prefill(request)) == [0, 1, 2]  # but it is stored


def test_a_rank_that_does_not_answer_is_a_miss_and_lets_go():
    request = make_request()
    rig = Rig(2).holds(request, 3, 3)
    rig.ranks.silent = True
    assert rig.match(request) == (0, False)
    rig.step()
    assert rig.ranks.pins == 0


def test_vllms_dummy_requests_are_left_alone():
    rig = Rig()
    assert rig.match(make_request("mock_req_1")) == (0, False)
    assert rig.scheduler.num_tracked == 0


# Loads


def test_a_load_names_each_groups_blocks():
    request = make_request(tokens=4 * N)
    rig = Rig().holds(request, 3, 3)
    load = rig.admit(request, N)
    prefix = prefix_of(request, N, 1)
    assert load == LoadSpec(
        "r",
        load.prefix,
        start=1,
        boundary=3,
        attention_blocks=((302, 303),),
        state_blocks=(103, 203, 403),
    )
    assert load.prefix.hashes == prefix.hashes[:3]
    assert rig.ranks.stores[0].pins == dict.fromkeys(load_keys(prefix, 1, 3, PLAN), 1)
    assert rig.scheduler.counts.hit_tokens == {"naive": 2 * N}


def test_several_attention_groups():
    request = make_request(tokens=2 * N + 1)
    rig = Rig(plan=WIDE).holds(request, 2, 2)
    load = rig.admit(request, tables=([1, 2, 3], [0, 9], [4, 5, 6]))
    assert load.attention_blocks == ((1, 2), (4, 5)) and load.state_blocks == (9,)
    save = rig.forward(request, 2 * N + 1, tables=([1, 2, 3], [0, 9], [4, 5, 6]))
    assert save is None  # all of it is in the store


@pytest.mark.parametrize(
    "states, expected",
    [
        ([0, 0, 14], 14),  # earlier entries of a state table are null
        ([0, 0, 14, 15, 16], 14),  # later ones are running or speculative blocks
        ([0, 0], 0),  # the worker refuses block 0
        ([], 0),
        ([7, 8, 0], 0),
    ],
)
def test_the_state_block_is_the_entry_of_the_boundary(states, expected):
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    load = rig.admit(request, tables=(states, [0, 0, 24], [1, 2, 3], [0, 0, 34]))
    assert load.state_blocks == (expected, 24, 34)


def test_a_load_goes_out_once():
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    assert rig.admit(request)
    assert not rig.step().loads


def test_a_failed_load_is_not_promised_again_and_all_is_stored_anew():
    """Else vLLM comes back to the lookup for ever."""
    request = make_request()
    rig = Rig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request, failed=True)
    questions = len(rig.ranks.questions)
    assert rig.match(request) == (0, False)
    assert len(rig.ranks.questions) == questions
    rig.scheduler.allocated(request, table(request), 0)
    save = rig.forward(request, 3 * N + 1, all_offers(3))
    assert attention_of(save) == [0, 1, 2]
    assert [end for end, _ in save.states] == [3]
    assert rig.scheduler.counts.failed_loads == 1
    assert rig.ranks.pins == 0


def test_after_a_good_load_only_what_is_new_is_stored():
    """vLLM offers the restored boundary again in the step after its load."""
    request = make_request(tokens=5 * N)
    rig = Rig().holds(request, 3, 3)
    rig.admit(request)
    rig.loaded(request)
    request.num_computed_tokens = 3 * N
    save = rig.forward(request, 2 * N, all_offers(3) + all_offers(5))
    assert attention_of(save) == [3, 4]
    assert [end for end, _ in save.states] == [5]


def test_a_preempted_request_is_looked_up_again():
    request = make_request()
    rig = Rig()
    rig.prefill(request)
    rig.holds(request, 3, 3)
    request.num_computed_tokens = 0
    assert rig.match(request) == (3 * N, True)


def test_what_a_failed_save_left_out_is_stored_after_a_preemption():
    """The workers report no failed save; what they hold at the next admission is the truth."""
    request = make_request(tokens=4 * N)
    rig = Rig()
    assert attention_of(rig.prefill(request)) == [0, 1, 2, 3]
    rig.holds(request, 2)  # and no more of it
    request.num_computed_tokens = 0
    assert attention_of(rig.prefill(request)) == [2, 3]


def test_a_failed_save_of_a_state_is_made_up_for_after_a_preemption():
    request = make_request(tokens=4 * N)
    rig = Rig()
    rig.match(request)
    rig.scheduler.allocated(request, table(request), 0)
    assert rig.forward(request, 4 * N, all_offers(3)).states
    rig.holds(request, 4)  # the pages came through
    request.num_computed_tokens = 0
    assert rig.match(request) == (0, False)
    rig.scheduler.allocated(request, table(request), 0)
    assert [end for end, _ in rig.forward(request, 4 * N, all_offers(3)).states] == [3]


def test_without_an_answer_what_was_saved_counts_after_a_preemption():
    request = make_request(tokens=4 * N)
    rig = Rig()
    rig.prefill(request)
    rig.ranks.silent = True
    request.num_computed_tokens = 0
    assert rig.prefill(request) is None


# Saves


def test_a_prefill_stores_whole_blocks_and_offered_states():
    request = make_request(tokens=3 * N + 5)
    save = Rig().prefill(request)
    assert save.states == ()
    rig = Rig()
    rig.match(request)
    request.num_computed_tokens = 0
    save = rig.forward(request, 3 * N + 5, all_offers(3))
    assert save.request_id == "r" and save.prefix == prefix_of(request, N, 1)
    assert save.attention == ((0, (301,)), (1, (302,)), (2, (303,)))
    assert save.states == ((3, (50, 51, 53)),)  # in the plan's order


@settings(max_examples=50)
@given(st.data(), st.integers(1, 6 * N))
def test_chunked_prefill_stores_every_whole_block_once(data, tokens):
    request = make_request(tokens=tokens)
    rig = Rig()
    rig.match(request)
    rig.scheduler.allocated(request, table(request), 0)
    stored = []
    while request.num_computed_tokens < tokens:
        chunk = data.draw(st.integers(1, tokens - request.num_computed_tokens))
        new = attention_of(rig.forward(request, chunk))
        assert all((block + 1) * N <= request.num_computed_tokens for block in new)
        stored += new
    assert stored == list(range(tokens // N))
    assert not rig.forward(request, 1)


def test_generated_tokens_are_not_stored():
    request = make_request(tokens=N + 1)
    rig = Rig()
    rig.prefill(request)
    request.append_output_token_ids(list(range(2 * N)))
    assert rig.forward(request, 2 * N, all_offers(2) + all_offers(3)) is None
    assert not rig.scheduler.counts.dropped_offers  # nobody wanted them


def test_what_the_store_has_is_not_stored_again():
    request = make_request(tokens=4 * N + 1)
    rig = Rig().holds(request, 2)  # attention pages, no state: no hit
    assert attention_of(rig.prefill(request)) == [2, 3]


@pytest.mark.parametrize(
    "offers, stored, dropped",
    [
        ([(g, 0, 2 * N) for g in STATES], [], {"unusable": 3}),  # the null block
        (
            [(0, 50, 2 * N), (1, 0, 2 * N), (3, 53, 2 * N)],
            [],
            {"unusable": 1, "incomplete": 2},
        ),
        ([(g, 50, 2 * N - 1) for g in STATES], [], {"unusable": 3}),  # no block boundary
        ([(g, 50, 0) for g in STATES], [], {"unusable": 3}),
        (all_offers(2, groups=(0, 3)), [], {"incomplete": 2}),  # group 1 is missing
        (all_offers(3), [], {"unusable": 3}),  # past what this step computes
        ([(g, 50, 4 * N) for g in STATES], [], {}),  # past the prompt: nobody wants it
        (all_offers(2) + all_offers(2), [2], {}),
    ],
)
def test_offers_that_are_dropped(offers, stored, dropped):
    request = make_request(tokens=3 * N + 1)
    rig = Rig()
    rig.match(request)
    save = rig.forward(request, 2 * N + 3, offers)
    assert attention_of(save) == [0, 1]
    assert [end for end, _ in save.states] == stored
    assert rig.scheduler.counts.dropped_offers == dropped


def test_a_boundary_is_stored_once():
    request = make_request(tokens=3 * N)
    rig = Rig()
    rig.match(request)
    assert rig.forward(request, 2 * N, all_offers(2)).states
    save = rig.forward(request, N, all_offers(2) + all_offers(3))
    assert [end for end, _ in save.states] == [3]
    assert not rig.scheduler.counts.dropped_offers  # offered again is no loss
    rig.forward(request, N, [(g, 50, 2 * N + 1) for g in STATES])  # another state than that one
    assert rig.scheduler.counts.dropped_offers == {"unusable": len(STATES)}


def test_a_state_alone_is_stored_after_its_attention_pages():
    request = make_request(tokens=3 * N)
    rig = Rig()
    rig.prefill(request)
    save = rig.forward(request, 1, all_offers(3))
    assert save.attention == () and [end for end, _ in save.states] == [3]


@pytest.mark.parametrize("gone", ["finished", "preempted", "never seen"])
def test_offers_of_requests_that_do_not_run_are_dropped(gone):
    """Their blocks may hold another request's state by now."""
    request = make_request(tokens=3 * N)
    rig = Rig()
    if gone != "never seen":
        rig.match(request)
    if gone == "finished":
        rig.scheduler.finished(request)
    other = make_request("other", N)
    metadata = rig.step(
        {"other": N}, {"other": table(other), "r": table(request)}, {"r": all_offers(1)}
    )
    assert not metadata.saves
    assert rig.scheduler.counts.dropped_offers == {"not_running": len(STATES)}


def test_requests_of_one_step_keep_apart():
    one, two = make_request("one", 2 * N), make_request("two", list(range(5, 5 + 2 * N)))
    rig = Rig()
    for request in (one, two):
        rig.match(request)
    tables = {"one": table(one), "two": tuple([b + 50 for b in ids] for ids in table(two))}
    saves = rig.step({"one": 2 * N, "two": N}, tables, {"two": all_offers(1)}, (one, two)).saves
    by_id = {save.request_id: save for save in saves}
    assert by_id["one"].attention == ((0, (301,)), (1, (302,))) and not by_id["one"].states
    assert by_id["two"].attention == ((0, (351,)),) and len(by_id["two"].states) == 1
    assert not set(by_id["one"].prefix.hashes) & set(by_id["two"].prefix.hashes)


@pytest.mark.parametrize(
    "options, request_args, saved",
    [
        ({}, {}, True),
        ({"save": False}, {}, False),  # kv_consumer
        ({"priority_limit": 2}, {"priority": 2}, True),
        ({"priority_limit": 2}, {"priority": 3}, False),
        ({"priority_limit": 0}, {"priority": 1}, False),
        ({}, {"priority": 3}, True),
        ({}, {"params": {"lmcache.skip_save": True}}, False),
        ({}, {"params": {"lmcache.skip_save": False}}, True),
    ],
)
def test_who_stores(options, request_args, saved):
    request = make_request(tokens=2 * N + 1, **request_args)
    rig = Rig(**options)
    rig.match(request)
    save = rig.forward(request, 2 * N + 1, all_offers(2))
    assert (save is not None) == saved
    # All of them load.
    again = make_request("again", 2 * N + 1, **request_args)
    assert Rig(**options).holds(again, 2, 2).match(again) == (2 * N, True)


# Keys


def keys(**kwargs):
    return prefix_of(make_request(tokens=2 * N, **kwargs), N, 1)


HERE = Path(__file__).parent  # folders stand for adapters' folders


def lora(name: str = "a", path: Path = HERE) -> LoRARequest:
    return LoRARequest(name, 1, str(path))


def tagged(**tags) -> dict:
    return {f"lmcache.tag.{name}": value for name, value in tags.items()}


@pytest.mark.parametrize(
    "other",
    [
        dict(cache_salt="x"),
        dict(params=tagged(user="a")),
        dict(params=tagged(user="b")),
        dict(params=tagged(team="a")),
        dict(params=tagged(user="a", team="a")),
        dict(lora=lora()),
        dict(lora=lora("b")),
        dict(lora=lora(path=HERE.parent)),
    ],
    ids=str,
)
def test_requests_that_must_not_share_have_other_keys(other):
    all_kinds = [
        dict(),
        dict(cache_salt="x"),
        dict(params=tagged(user="a")),
        dict(params=tagged(user="b")),
        dict(params=tagged(team="a")),
        dict(params=tagged(user="a", team="a")),
        dict(lora=lora()),
        dict(lora=lora("b")),
        dict(lora=lora(path=HERE.parent)),
    ]
    mine = keys(**other)
    assert mine == keys(**other)
    assert sum(mine == keys(**kind) for kind in all_kinds) == 1


def test_parameters_that_are_no_tags_do_not_change_keys():
    assert keys(params={"lmcache.skip_save": True, "other": 1}) == keys()


def test_the_order_of_tags_does_not_matter():
    one = keys(params=tagged(a="1", b="2"))
    assert one == keys(params=dict(reversed(tagged(a="1", b="2").items())))
    assert one.tags == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize("value", ["a@b", "50%", 7, None, ["x"], {"a": 1}])
def test_a_bad_tag_means_no_caching(value):
    tagged_request = make_request(params=tagged(user=value))
    rig = Rig().holds(make_request(), 3, 3)
    assert rig.match(tagged_request) == (0, False)
    assert not rig.ranks.questions
    assert rig.forward(tagged_request, 3 * N + 1, all_offers(3)) is None


def test_a_bad_tag_name_means_no_caching():
    assert keys(params={"lmcache.tag.a@b": "x"}) is None


def test_tagged_requests_hit_their_own_tags_only():
    mine = dict(tokens=3 * N + 1, params=tagged(user="a"))
    rig = Rig().holds(make_request(**mine), 3, 3)
    assert rig.match(make_request("same", **mine)) == (3 * N, True)
    assert rig.match(make_request("none", 3 * N + 1)) == (0, False)
    assert rig.match(make_request("b", 3 * N + 1, params=tagged(user="b"))) == (0, False)


def test_embeddings_are_not_cached():
    """Block hashes cover token ids, and these prompts have none."""
    request = make_request()
    request.prompt_embeds = object()
    assert prefix_of(request, N, 1) is None


def test_refuses_hashes_that_end_elsewhere_than_blocks():
    """Also with python -O: a block would get another one's name."""
    with pytest.raises(ValueError, match="have no hash of their own"):
        Rig(hash_block_size=N - 1)


@pytest.mark.parametrize("tokens", [1, N - 1, N, N + 1, 2 * N, 5 * N - 1])
@pytest.mark.parametrize("hash_block_size", [N, N // 2, N // 4])
def test_a_block_has_the_hash_at_its_end(tokens, hash_block_size):
    request = make_request(tokens=tokens, hash_block_size=hash_block_size)
    per_block = N // hash_block_size
    hashes = prefix_of(request, N, per_block).hashes
    assert len(hashes) == tokens // N
    for i, found in enumerate(hashes):
        assert found == request.block_hashes[(i + 1) * per_block - 1]


def test_generated_tokens_do_not_lengthen_the_prefix():
    request = make_request(tokens=N + 1)
    request.append_output_token_ids(list(range(2 * N)))
    assert len(request.block_hashes) == 3
    assert len(prefix_of(request, N, 1).hashes) == 1


# Life cycle


@pytest.mark.parametrize("when", ["matched", "allocated", "loading", "loaded", "prefilled"])
def test_nothing_is_tracked_after_the_end(when):
    request = make_request()
    rig = Rig(2).holds(request, 3, 3)
    tokens, _ = rig.match(request)
    if when != "matched":
        rig.scheduler.allocated(request, table(request), tokens)
    if when in ("loading", "loaded", "prefilled"):
        rig.step()
    if when in ("loaded", "prefilled"):
        rig.loaded(request)
    if when == "prefilled":
        rig.forward(request, 3 * N + 1, all_offers(3))
    rig.scheduler.finished(request)
    rig.scheduler.finished(request)
    metadata = rig.step()
    assert rig.scheduler.num_tracked == 0 and not rig.scheduler._unsaved
    if when in ("allocated", "loading"):
        # The load goes on and reports its end; its claim ends with it.
        assert (when == "allocated") == bool(metadata.loads)
        rig.loaded(request)
    assert rig.ranks.pins == 0 and rig.ranks.num_claims == [0, 0]
    assert rig.step({"x": 1}) is NOTHING


def test_completions_of_unknown_requests_are_ignored():
    rig = Rig()
    rig.scheduler.transferred(KVConnectorOutput(finished_recving={"x"}, failed_recving={"x"}))
    rig.scheduler.transferred(KVConnectorOutput())
    rig.scheduler.allocated(make_request("x"), ([],) * 4, 0)
    assert rig.scheduler.num_tracked == 0


def test_a_decode_step_does_nothing():
    request = make_request()
    rig = Rig()
    rig.prefill(request)
    request.append_output_token_ids([1])
    output = make_output({"r": 1}, {})  # no table: reading one would raise
    assert rig.scheduler.step(output) is NOTHING
    output.kv_connector_block_state = None
    assert rig.scheduler.step(output) is NOTHING


def test_idle_steps_are_told_apart():
    rig = Rig()
    assert rig.step().idle
    assert not rig.step({"x": 1}).idle


actions = st.tuples(
    st.sampled_from(["match", "allocate", "load", "fail", "forward", "preempt", "finish"]),
    st.sampled_from("abc"),
    st.integers(1, 2 * N),
)


@settings(max_examples=100)
@given(st.lists(actions, max_size=40))
def test_no_claim_and_no_request_is_left_behind(steps):
    """Random lives of three requests, in the order of calls that vLLM keeps."""
    rig = Rig(2).holds(make_request(tokens=4 * N), 4, 1, 3, 4)
    alive, offered, loading = {}, {}, set()
    for action, rid, tokens in steps:
        request = alive.get(rid)
        if action == "match" and rid not in loading:
            request = alive.setdefault(rid, make_request(rid, 4 * N))
            if not request.num_computed_tokens:
                offered[rid] = rig.match(request)[0]
        elif action == "allocate" and rid in offered:
            taken = offered.pop(rid)
            rig.scheduler.allocated(request, table(request), taken)
            assert len(rig.step().loads) == (taken > 0)
            if taken:
                loading.add(rid)
            else:
                request.num_computed_tokens = 1
        elif action in ("load", "fail") and rid in loading:
            loading.discard(rid)
            target = request or make_request(rid, 4 * N)
            rig.loaded(target, failed=action == "fail")
            if request is not None:
                request.num_computed_tokens = 0 if action == "fail" else 3 * N
        elif action == "forward" and request and request.num_computed_tokens:
            rig.forward(request, tokens, all_offers(tokens % 5))
        elif action == "preempt" and request and rid not in loading:
            request.num_computed_tokens = 0
            offered.pop(rid, None)
        elif action == "finish" and request:
            rig.scheduler.finished(alive.pop(rid))
            offered.pop(rid, None)
    for rid in list(loading):
        rig.loaded(make_request(rid, 4 * N))
    for request in alive.values():
        rig.scheduler.finished(request)
    rig.step()
    assert rig.ranks.pins == 0
    assert rig.scheduler.num_tracked == 0


def test_a_fully_stored_prompt_costs_later_steps_nothing():
    """Its decode steps must not look at it again and again for blocks to store."""
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.match(request) == (3 * N, True)
    assert not rig.scheduler._unsaved


def test_a_new_question_keeps_its_claim_from_an_unsent_drop():
    """Given up and asked anew within one step: the drop of the old claim must not go out."""
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    rig.holds(request, 3, 3)
    assert rig.match(request, 3 * N) == (0, False)
    load = rig.admit(request, 0)
    assert load is not None and load.boundary == 3
    assert all(lookup.num_claims for lookup in rig.ranks.lookups)


@pytest.mark.parametrize("save_decode, windows", [(False, []), (True, [2, 3, 4])])
def test_a_resumed_request_is_past_its_prompt(save_decode, windows):
    """Preempted while decoding: what it generated has no name unless it is to be stored."""
    rig = Rig(plan=WINDOWS, save_decode=save_decode)
    request = make_request(tokens=3 * N + 1)
    rig.prefill(request)
    request.append_output_token_ids([1] * (2 * N))
    request.num_computed_tokens = 0
    save = rig.prefill(request)
    # These ranks hold nothing: what was stored before the preemption counts as lost.
    assert sorted(block for _, block, _ in save.windows) == windows
    assert max(save.boundaries, default=0) <= len(save.prefix.hashes)


def test_what_is_cached_locally_past_the_prompt_has_no_name():
    rig = Rig()
    request = make_request(tokens=3 * N + 1)
    request.append_output_token_ids([1] * (2 * N))
    rig.match(request, 5 * N)
    assert rig.scheduler._trackers["r"].kept == set()
