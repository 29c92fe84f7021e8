# SPDX-License-Identifier: Apache-2.0
"""Block hashes that also cover the tokens behind a block, as vLLM 0.33 makes them beside EAGLE."""

from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig

from lmcache_hybrid.config import drafts
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY
from lmcache_hybrid.scheduler.prompt import extended, inner_hashes, prefix_of
from lmcache_hybrid.scheduler.step_ends import Drafter, StepEnds
from lmcache_hybrid.worker import fingerprint
from vllm_patch import look_ahead

from .helpers import N, make_request
from .scheduler_rig import Rig
from .test_inside_blocks import INSIDE, UNIT
from .test_kv_events import EventRig, saved

LOOKS = hasattr(VllmConfig, "num_hash_lookahead_tokens")
of_033 = pytest.mark.skipif(not LOOKS, reason="vLLM hashes look ahead since 0.33")


def cache(junctions: bool = False) -> SimpleNamespace:
    return SimpleNamespace(enable_mamba_shared_prefix_checkpoint=junctions)


def drafting(config, drops: bool = True, **speculative) -> SimpleNamespace:
    speculative = SimpleNamespace(use_eagle_block_drop=lambda: drops, **speculative)
    engine = {"cache_config": cache(), "kv_transfer_config": transfer()}
    return SimpleNamespace(speculative_config=speculative, **{**engine, **config})


def transfer(**extra) -> SimpleNamespace:
    return SimpleNamespace(kv_connector_extra_config=extra)


# The repair


@pytest.fixture
def guarded(monkeypatch):
    """vLLM 0.33's guard, whatever vLLM is installed; returns what an engine's hashes cover."""
    vllms = property(lambda self: 0 if self.kv_transfer_config is not None else self.wanted)
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", vllms, raising=False)
    look_ahead.let_hashes_look_ahead()
    covers = VllmConfig.num_hash_lookahead_tokens.fget

    def ask(
        connector: str | None,
        hybrid: bool = True,
        wanted: int = 1,
        junctions: bool = False,
        **extra,
    ) -> int:
        transfer = connector and KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        )
        return covers(
            SimpleNamespace(
                kv_transfer_config=transfer,
                model_config=SimpleNamespace(is_hybrid=hybrid),
                cache_config=cache(junctions),
                wanted=wanted,
            )
        )

    return ask


def test_hashes_of_a_hybrid_model_look_ahead_as_without_a_connector(guarded):
    assert guarded(None, wanted=1) == guarded("LMCacheConnectorV1", wanted=1) == 1
    assert guarded(None, wanted=0) == guarded("LMCacheConnectorV1", wanted=0) == 0


def test_with_several_modules_hashes_cover_what_the_last_one_reads(guarded):
    assert guarded(None, wanted=3) == guarded("LMCacheConnectorV1", wanted=3) == 3


def test_where_states_would_be_lost_vllms_guard_stays(guarded):
    for wanted in (1, 3):
        assert guarded(None, junctions=True, wanted=wanted) == wanted
        assert guarded("LMCacheConnectorV1", junctions=True, wanted=wanted) == 0


def test_beside_others_and_with_other_models_vllms_guard_stays(guarded):
    assert guarded("MultiConnector") == guarded("OffloadingConnector") == 0
    assert guarded("LMCacheConnectorV1", hybrid=False) == 0
    # As MultiConnector's child is configured.
    assert guarded("LMCacheConnectorV1", **{BESIDE_KEY: False}) == 0


@pytest.mark.parametrize("old", [False, True])
def test_before_033_nothing_is_replaced(monkeypatch, old):
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", "vLLM's", raising=False)
    if old:
        monkeypatch.delattr(VllmConfig, "num_hash_lookahead_tokens")
    called = []
    monkeypatch.setattr(look_ahead, "let_hashes_look_ahead", lambda: called.append(1))
    look_ahead.install()
    assert called == ([] if old else [1])


# What is said


NEW = {"num_hash_lookahead_tokens": 0}


@pytest.mark.parametrize(
    "config, words",
    [
        (SimpleNamespace(speculative_config=None), None),
        (drafting({}, drops=False), None),
        (drafting({"num_hash_lookahead_tokens": 1}), None),
        (drafting({}), ["this release of vLLM", "0.33 need not"]),
        (
            drafting({**NEW, "kv_transfer_config": transfer(**{BESIDE_KEY: True})}),
            ["in a MultiConnector (alone it need not)."],
        ),
        (
            drafting({"kv_transfer_config": transfer(**{BESIDE_KEY: False})}),
            ["this release", "MultiConnector"],
        ),
        (
            drafting({**NEW, "cache_config": cache(True)}),
            ["shared-prefix-checkpoint is set (leave"],
        ),
        (drafting(NEW, disable_lookahead_block_hashes=True), ["leave it out"]),
    ],
)
def test_where_tokens_are_lost_a_sentence_says_how_many_and_why(config, words):
    said = drafts.why_hits_are_shorter(config, 1568)
    assert drafts.drops_block(config) is (words is not None)
    if words is None:
        assert said is None
    else:
        assert said.endswith(".") and all(each in said for each in ["1,568 tokens", *words])


OLD, NEW_RULES = "the last 784 tokens of each hit, because this release", "Hits lose nothing"


@pytest.mark.parametrize(
    "method, more, old, new",
    [
        ("mtp", {}, OLD, "at least num_speculative_tokens tokens"),
        ("mtp", {"num_speculative_tokens": 1}, OLD, "to this drafter."),
        ("qwen3_next_mtp", {}, OLD, NEW_RULES),
        ("eagle3", {"num_speculative_tokens": 4}, OLD, "to this drafter."),
        ("mtp", {"num_speculative_tokens": 4}, OLD, "a hit ends where at least 4 tokens"),
        (
            "mtp",
            {"disable_lookahead_block_hashes": True},
            OLD,
            "784 tokens of each hit, because dis",
        ),
        ("mtp", {"disable_eagle_block_drop": True}, NEW_RULES, NEW_RULES),
        ("dflash", {"disable_lookahead_block_hashes": True}, OLD, NEW_RULES),
        ("ngram", {}, NEW_RULES, NEW_RULES),
    ],
)
def test_what_is_lost_can_be_told_before_there_is_an_engine(method, more, old, new):
    said = drafts.planned({"method": method, **more}, 784)
    assert list(said) == ["0.32", "0.33"]
    for sentence, words in zip(said.values(), (old, new)):
        assert words in sentence and sentence.endswith(".")
        assert ("fewer than 1,568 tokens" in sentence) is ("784" in sentence)


@pytest.mark.parametrize("tokens", ["3", True, 1.5])
def test_how_many_are_drafted_is_a_number(tokens):
    with pytest.raises(ConfigError, match="num_speculative_tokens=.* write 1 or more"):
        drafts.planned({"method": "mtp", "num_speculative_tokens": tokens}, N)


@pytest.mark.parametrize("method", "mtp eagle eagle3 dflash dspark ngram draft_model".split())
@pytest.mark.parametrize("kept", [False, True])
def test_what_is_told_is_what_this_vllm_does(method, kept):
    speculative = {"disable_eagle_block_drop": kept, "disable_lookahead_block_hashes": True}
    said = drafts.planned({"method": method, **speculative}, N)["0.33" if LOOKS else "0.32"]
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=1,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        disable_eagle_block_drop=kept,
    )
    config.method = method
    assert ("gives up" in said) is config.use_eagle_block_drop()


@pytest.mark.parametrize(
    "drafter, longest",
    [
        (Drafter(), N),
        (Drafter(drops_block=True, runway=1), 2 * N - 1),
        (Drafter(runway=1, look_ahead=1), N),
        (Drafter(runway=3, look_ahead=3), N + 2),
    ],
)
def test_the_longest_prompt_that_leaves_no_state(drafter, longest):
    assert drafter.longest_without_state(N) == longest
    for tokens, stored in ((longest, False), (longest + 1, True)):
        made = StepEnds(N, 0, False, drafter=drafter)
        made.begin(tokens)
        assert bool(made.end) is stored


def test_records_under_other_rules_have_other_names():
    engine = dict(method="mtp", num_speculative_tokens=1, draft_model_config=None)
    named = [
        fingerprint._speculative(drafting({"model_config": None, **ahead}, **engine))
        for ahead in ({}, *({"num_hash_lookahead_tokens": tokens} for tokens in (0, 1, 2)))
    ]
    assert named[0] == named[1] and len(set(named)) == 3


# Blocks without a hash


def request_of(tokens: int, ahead: int, unit: int = N):
    """A request with hashes up to the last that covers ``ahead`` known tokens."""
    request = make_request(tokens=tokens, hash_block_size=unit)
    del request.block_hashes[max(0, tokens - ahead) // unit :]
    return request


@pytest.mark.parametrize("more, blocks", [(-1, 2), (0, 2), (1, 3), (2, 3)])
def test_a_prompts_blocks_are_those_with_a_hash(more, blocks):
    prefix = prefix_of(request_of(3 * N + more, ahead=1), N, 1)
    assert len(prefix.hashes) == blocks
    assert prefix.hashes == prefix_of(make_request(tokens=3 * N + more), N, 1).hashes[:blocks]


def test_a_prefix_grows_up_to_the_last_hash():
    request = request_of(3 * N, ahead=1)
    prefix = extended(prefix_of(request, N, 1), request, 3, 1)
    assert len(prefix.hashes) == 2
    request.append_output_token_ids(5)
    assert len(extended(prefix, request, 3, 1).hashes) == 3


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("more", range(4))
def test_boundaries_inside_a_block_have_a_hash(ahead, more):
    rig = Rig(1, INSIDE, UNIT)
    rig.scheduler.drafter = Drafter(runway=ahead, look_ahead=ahead)
    request = request_of(N + 2 * UNIT + more, ahead, UNIT)
    tracker = rig.scheduler._track(request)
    assert tracker.inner == (N + 2 * UNIT + more - ahead) // UNIT * UNIT
    assert inner_hashes(request, range(UNIT, tracker.inner + 1, UNIT), INSIDE)


# Events


@of_033
def test_events_name_the_tokens_that_a_hash_covers():
    rig, request = EventRig(look_ahead=1), make_request(tokens=3 * N + 1)
    saved(rig, request, 3)
    events = rig.stored(request, 3, states=(3,))
    ahead = {tuple(event.token_ids): event.lookahead_token_ids for event in events}
    assert ahead == {tuple(range(i * N, (i + 1) * N)): [[(i + 1) * N]] for i in range(3)}
