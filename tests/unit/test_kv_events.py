# SPDX-License-Identifier: Apache-2.0
"""vLLM's events of what the store holds: a real scheduler side, reports as ranks send them."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_hybrid.config.options import log_events, read_options
from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.keys import STATE, tags_digest, wide_hash
from lmcache_hybrid.protocol.hit_records import record_keys
from lmcache_hybrid.protocol.record_reports import (
    DISK,
    RAM,
    REMOTE,
    RankReport,
    RankReports,
    RecordName,
)
from lmcache_hybrid.scheduler import events as module
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.prompt import prefix_of

from .helpers import PLAN, STATE_SPEC, N, make_request, tags_of
from .lmcache_settings import lmcache_config, transfer, vllm_config
from .scheduler_rig import Rig, all_offers

(PAGES,) = PLAN.attention
ATTENTION_SPEC = FullAttentionSpec(block_size=N, num_kv_heads=1, head_size=8, dtype=torch.float32)
GROUPS = [
    KVCacheGroupSpec([f"g{i}"], ATTENTION_SPEC if i == PAGES else STATE_SPEC) for i in range(4)
]


class EventRig(Rig):
    """A scheduler that publishes events."""

    def __init__(
        self, ranks: int = 1, plan=PLAN, hash_block_size: int = N, look_ahead: int = 0, **options
    ) -> None:
        self.events = KVEvents(plan, GROUPS, ranks, look_ahead)
        super().__init__(ranks, plan, hash_block_size, events=self.events, **options)
        assert self.events.drain() == [AllBlocksCleared()]

    def stored(self, request, blocks: int, states=(), tier=RAM, rank=0, epoch=0, **state) -> list:
        """Rank ``rank`` reports pages of the first blocks and states at boundaries."""
        prefix, changes = prefix_of(request, N, 1, tags_of(request)), []
        for at in range(blocks):
            keys = record_keys(prefix, at, N, 0, PLAN.attention)
            if at + 1 in states:
                keys += record_keys(prefix, at, N, STATE, PLAN.states)
            changes += [(record(key), tier) for key in keys]
        return self.report(*changes, rank=rank, epoch=epoch, **state)

    def report(self, *changes, rank=0, epoch=0, serving=True, writing=False) -> list:
        report = RankReport(rank, epoch, changes, serving, writing)
        self.scheduler.update_connector_output(
            KVConnectorOutput(kv_cache_events=RankReports([report]))
        )
        return self.events.drain()


def record(key) -> RecordName:
    return RecordName(key.group, wide_hash(key.block_hash), tags_digest(key.tags))


def published(request, block: int):
    return maybe_convert_block_hash(request.block_hashes[block])


def saved(rig: EventRig, request, boundary: int):
    """A prefill that stores pages and the states at ``boundary``."""
    assert rig.prefill(request, boundary * N) is not None
    assert rig.forward(request, 1, all_offers(boundary)) is not None
    assert rig.events.drain() == []  # nothing is there before a rank says so


def test_events_carry_what_vllm_publishes_of_its_own_cache() -> None:
    rig, request = EventRig(), make_request(tokens=3 * N + 1)
    saved(rig, request, 3)
    events = rig.stored(request, 3, states=(3,))
    pages = [event for event in events if event.group_idx == PAGES]
    states = [event for event in events if event.group_idx != PAGES]
    assert [event.block_hashes for event in pages] == [[published(request, i)] for i in range(3)]
    assert [event.parent_block_hash for event in pages] == [
        None,
        published(request, 0),
        published(request, 1),
    ]
    assert [event.token_ids for event in pages] == [
        list(range(i * N, (i + 1) * N)) for i in range(3)
    ]
    for event in events:
        assert isinstance(event, BlockStored) and event.block_size == N
        assert (event.medium, event.locality, event.ownership) == ("CPU", "LOCAL", None)
    assert {event.kv_cache_spec_kind for event in pages} == {"full_attention"}
    assert {event.kv_cache_spec_kind for event in states} == {"mamba"}
    assert [event.group_idx for event in states] == list(PLAN.states)
    assert {event.block_hashes[0] for event in states} == {published(request, 2)}
    # A block comes after its parent, whatever the group.
    assert [event.block_hashes for event in events][-4:] == [[published(request, 2)]] * 4
    assert not rig.events.pending


def test_media_and_withdrawals() -> None:
    rig, request = EventRig(), make_request(tokens=2 * N + 1)
    saved(rig, request, 2)
    rig.stored(request, 2, states=(2,))
    moved = rig.stored(request, 1, tier=DISK)
    assert [type(event) for event in moved] == [BlockRemoved, BlockStored]
    assert moved[0].medium == "CPU" and moved[0].block_hashes == [published(request, 0)]
    assert (moved[1].medium, moved[1].ownership) == ("STORAGE", "LocalDiskBackend")
    moved = rig.stored(request, 1, tier=REMOTE)
    assert (moved[1].medium, moved[1].locality) == ("STORAGE", "REMOTE")
    gone = rig.stored(request, 1, tier=None)
    assert all(isinstance(event, BlockRemoved) for event in gone)
    by_place = {(event.group_idx, event.medium): event.block_hashes for event in gone}
    assert by_place == {
        (PAGES, "STORAGE"): [published(request, 0)],
        (PAGES, "CPU"): [published(request, 1)],
        **{(group, "CPU"): [published(request, 1)] for group in PLAN.states},
    }


def test_both_ranks_must_hold_it_and_vllm_adds_up_their_reports() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    rig, request = EventRig(ranks=2), make_request(tokens=N + 1)
    saved(rig, request, 1)
    assert rig.stored(request, 1, states=(1,), rank=0) == []
    rig.report(*[(record(k), None) for k in record_keys(prefix_of(request, N, 1), 0, N, 1, (0,))])
    reports = []
    for rank in (0, 1):
        changes = [
            (record(key), RAM)
            for kind, groups in ((0, PLAN.attention), (STATE, PLAN.states))
            for key in record_keys(prefix_of(request, N, 1), 0, N, kind, groups)
        ]
        reports.append(pickle.dumps(RankReports([RankReport(rank, 0, tuple(changes), True, 0)])))
    outputs = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(kv_cache_events=pickle.loads(report)),
        )
        for report in reports
    ]
    output = KVOutputAggregator(2).aggregate(outputs)
    rig.scheduler.update_connector_output(output.kv_connector_output)
    assert len(rig.events.drain()) == 4


@pytest.mark.parametrize("tier", [DISK, REMOTE])
def test_what_is_found_is_announced_once_a_prompt_has_asked_for_it(tier) -> None:
    """After a restart, or of another engine on a shared store."""
    rig, request = EventRig(), make_request(tokens=3 * N + 1)
    assert rig.stored(request, 2, states=(2,), tier=tier) == []
    assert not rig.events.pending
    rig.holds(request, 2, 2)
    assert rig.match(request) == (2 * N, True)
    rig.step()
    assert [event.group_idx for event in rig.events.drain()].count(PAGES) == 2


def test_reports_from_before_a_reset_do_not_count() -> None:
    rig, request = EventRig(), make_request(tokens=N + 1)
    saved(rig, request, 1)
    assert len(rig.stored(request, 1, states=(1,))) == 4
    epoch = rig.scheduler.begin_reset()
    assert rig.events.pending
    assert all(isinstance(event, BlockRemoved) for event in rig.events.drain())
    rig.scheduler.end_reset(True)
    again = make_request("again", tokens=N + 1)
    saved(rig, again, 1)
    assert rig.stored(request, 1, states=(1,)) == []
    assert len(rig.stored(request, 1, states=(1,), epoch=epoch)) == 4


def test_all_is_announced_again_after_vllm_cleared_its_own_cache() -> None:
    rig, request = EventRig(), make_request(tokens=N + 1)
    saved(rig, request, 1)
    events = rig.stored(request, 1, states=(1,))
    rig.events.cleared()
    assert rig.events.pending and rig.events.drain() == events


def test_vllm_hears_what_ranks_report_through_the_connector() -> None:
    rig, request = EventRig(), make_request(tokens=N + 1)
    prefix = prefix_of(request, N, 1)
    rig.events.learn(request, prefix, 1)
    rig.report()
    keys = record_keys(prefix, 0, N, 0, PLAN.attention) + record_keys(
        prefix, 0, N, STATE, PLAN.states
    )
    report = RankReport(0, 0, tuple((record(key), RAM) for key in keys), True, False)
    connector = HybridConnector.__new__(HybridConnector)
    connector.scheduler, connector._events = rig.scheduler, rig.events
    connector.worker = SimpleNamespace(report=lambda serving: report if serving else None)
    connector._guard = SimpleNamespace(stands=True)
    assert not connector.has_pending_push_work() and not connector.take_events()
    reports = connector.get_kv_connector_kv_cache_events()
    connector.update_connector_output(KVConnectorOutput(kv_cache_events=reports))
    assert connector.has_pending_push_work()
    events = connector.take_events()
    assert len(events) == 4 and not connector.has_pending_push_work()
    connector.cleared()
    assert connector.has_pending_push_work() and connector.take_events() == events


def test_prompts_that_only_the_same_tags_hit_are_not_announced() -> None:
    rig = EventRig()
    request = make_request(tokens=N + 1, params={"lmcache.tag.user": "a"})
    saved(rig, request, 1)
    assert rig.stored(request, 1, states=(1,)) == []


def test_events_name_the_adapter_and_the_salt() -> None:
    rig = EventRig()
    lora = LoRARequest("sql", 3, "/adapters/sql")
    request = make_request(tokens=N + 1, lora=lora, cache_salt="salt")
    prefix = prefix_of(request, N, 1).computed_with((b"content",))
    rig.events.learn(request, prefix, 1)
    keys = record_keys(prefix, 0, N, 0, PLAN.attention)
    keys += record_keys(prefix, 0, N, STATE, PLAN.states)
    event = rig.report(*[(record(key), RAM) for key in keys])[0]
    assert (event.lora_name, event.lora_id) == ("sql", 3)
    assert event.extra_keys == [("sql", "salt")]


def test_boundaries_inside_a_block() -> None:
    unit = N // 4
    plan = PLAN.with_unit(unit)
    rig = EventRig(plan=plan, hash_block_size=unit)
    request = make_request(tokens=N + 3 * unit, hash_block_size=unit)
    assert rig.match(request)[0] == 0
    prefix = prefix_of(request, N, 4).with_inner({N + 2 * unit: request.block_hashes[5]})
    rig.events.learn(request, prefix, 1, [N + 2 * unit])
    tags = tags_digest(())
    inner = [(RecordName(g, request.block_hashes[5], tags), RAM) for g in range(4)]
    assert rig.report(*inner) == []  # its block begins after one that is not stored
    whole = RecordName(PAGES, request.block_hashes[3], tags), RAM
    events = rig.report(whole)
    assert [event.block_size for event in events] == [N] + [2 * unit] * 4
    assert events[-1].parent_block_hash == maybe_convert_block_hash(request.block_hashes[3])
    assert events[-1].token_ids == list(range(N, N + 2 * unit))


def test_an_idle_engine_makes_steps_until_writes_have_ended_but_not_for_ever(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    events = KVEvents(PLAN, GROUPS, 2)
    assert events.pending and events.drain() == [AllBlocksCleared()]
    assert not events.pending  # whatever ranks have found: it is announced once it is asked for
    events.receive(RankReports([RankReport(rank, 0, (), True, True) for rank in (0, 1)]))
    events.receive(RankReports([RankReport(0, 0, (), True, False)]))
    assert events.pending
    events.receive(RankReports([RankReport(1, 0, (), True, False)]))
    assert not events.pending
    events.receive(RankReports([RankReport(1, 0, (), True, True)]))
    assert events.pending
    now[0] += module.FLUSH_SECONDS + 1
    assert not events.pending  # a store that hangs keeps nobody awake


@pytest.mark.parametrize("reports", [None, object()])
def test_others_events_are_left_alone(reports) -> None:
    rig = EventRig()
    rig.scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=reports))
    assert rig.events.drain() == []


@pytest.mark.parametrize("vllm_publishes", [False, True])
@pytest.mark.parametrize("lmcache_publishes", [False, True])
def test_events_are_published_where_both_are_told_to(
    vllm_publishes, lmcache_publishes, hybrid_log
) -> None:
    """LMCache's option keeps its meaning: it adds what is stored to vLLM's own events."""
    config = vllm_config(transfer())
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=vllm_publishes)
    lmcache = lmcache_config(enable_kv_events=lmcache_publishes)
    assert read_options(config, lmcache).events == (vllm_publishes and lmcache_publishes)
    log_events(config, lmcache)
    said = [each.levelname for each in hybrid_log.records if "enable_kv_events" in each.message]
    wanted = {(True, False): ["INFO"], (False, True): ["WARNING"]}
    assert said == wanted.get((vllm_publishes, lmcache_publishes), [])
