# SPDX-License-Identifier: Apache-2.0
"""The adapter in a request's key: lookups, saves and loads hold to it on every rank."""

from types import SimpleNamespace as Namespace

import msgspec
import pytest
import torch
from vllm.lora.request import LoRARequest

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.identity.adapters import ADAPTERS, UNKNOWN, Adapter
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata, SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.weights_guard import WeightsGuard

from . import test_rpc
from .helpers import Later, N, Ranks, make_request
from .scheduler_rig import STATES, Rig, attention_of, table

LORA = LoRARequest("name", 1, "/a")


def lora_request(name: str = "r"):
    return make_request(name, lora=LORA)


def test_the_tag_of_an_adapter_depends_on_the_content_of_every_rank():
    tags = {Adapter(LORA, contents).tag for contents in [(b"1", b"2"), (b"1", b"3")]}
    assert len(tags) == 2


def test_a_prefix_is_known_when_the_ranks_named_the_adapter():
    new = Prefix((b"h",), (("user", "a"),), Adapter(LORA))
    known = new.computed_with((b"1", b"2"))
    assert known.tags == (("user", "a"), known.adapter.tag) and known.up_to(0).tags == known.tags
    assert known.computed_with((b"1", b"2")) == known
    assert known.computed_with((b"1", b"3")) is None
    assert new.computed_with(()) is None and new.computed_with((b"1", UNKNOWN)) is None


def test_requests_share_with_their_adapters_content_only():
    rig = Rig(2)
    keys = []
    for contents in [(b"1", b"2"), (b"1", b"3"), (b"1", b"2")]:
        rig.ranks.contents = contents
        request = lora_request()
        save = rig.prefill(request)
        assert save.attention and save.prefix.adapter.contents == contents
        keys.append((save.prefix.hashes, save.prefix.tags))
        rig.scheduler.request_finished(request)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("contents", [(), (b"1", UNKNOWN)], ids=["no answer", "not known"])
def test_what_a_rank_does_not_know_is_neither_hit_nor_stored(contents):
    rig, request = Rig(2), lora_request()
    rig.ranks.contents = contents
    assert rig.match(request) == (0, False)
    assert not rig.ranks.questions
    offers = [(group, 5, 3 * N) for group in STATES]
    assert rig.forward(request, request.num_tokens, offers) is None
    assert dict(rig.scheduler.counts.skipped_requests.items()) == {"adapter": 1}
    verdict = "miss" if contents else "unavailable"
    assert dict(rig.scheduler.counts.lookups.items()) == {verdict: 1}


@pytest.mark.parametrize("contents", [(), (b"1", UNKNOWN), (b"1", b"2")], ids=str)
def test_a_request_that_asks_for_no_hit_is_not_stored_under_an_unknown_name(contents):
    rig, request = Rig(2), lora_request()
    rig.ranks.contents = contents
    request.skip_reading_prefix_cache = True
    offers = [(group, 5, 3 * N) for group in STATES]
    assert rig.match(request) == (0, False)
    save = rig.forward(request, request.num_tokens, offers)
    if contents == (b"1", b"2"):
        assert save is not None and save.prefix.adapter.contents == contents
    else:
        assert save is None
    assert rig.scheduler.counts.skipped_requests == {"skip_reading": 1}
    assert not rig.scheduler.counts.lookups.items()


def test_who_must_not_read_is_stored_once_the_ranks_have_named_its_adapter():
    later = Later()
    rig, request = Rig(Ranks(2, executor=later)), lora_request()
    rig.ranks.contents = b"1", b"2"
    request.skip_reading_prefix_cache = True
    assert rig.match(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, table(request), 0)
    offers = [(group, 5, 2 * N) for group in STATES]
    assert rig.forward(request, 2 * N, offers) is None
    later.run()
    save = rig.forward(request, request.num_tokens - 2 * N)
    assert save is not None and save.prefix.adapter.contents == (b"1", b"2")
    assert attention_of(save)[:2] == [0, 1] and not save.states


def test_nothing_is_stored_before_the_ranks_have_named_the_adapter():
    """Whatever had vLLM run the request before they answered."""
    rig, request = Rig(2), lora_request()
    assert rig.scheduler._track(request).save
    offers = [(group, 5, 3 * N) for group in STATES]
    assert rig.forward(request, request.num_tokens, offers) is None


def test_an_adapter_that_changed_since_the_first_answer_is_a_miss():
    rig, request = Rig(), lora_request()
    stored = rig.prefill(lora_request("before")).prefix
    rig.ranks.contents = (b"other",)
    rig.match(request)
    assert rig.scheduler._trackers["r"].prefix.tags != stored.tags
    rig.ranks.contents = (b"0",)
    asked = len(rig.ranks.questions)
    question = LookupRequest("x", rig.scheduler._trackers["r"].prefix, 3, 0)
    assert rig.ranks.queue.submit(question).poll().boundary == 0
    assert len(rig.ranks.questions) == asked


def named(prefix: Prefix) -> Prefix:
    return msgspec.structs.replace(prefix, adapter=Adapter(LORA, (b"1",)))


def test_a_step_of_another_adapter_stores_nothing(worker_rig, monkeypatch):
    rig = worker_rig()
    (save,) = rig.save_metadata().saves
    save = SaveSpec(save.request_id, named(save.prefix), save.attention, save.states)
    monkeypatch.setattr(rig.worker.loads._adapters, "holds", lambda adapter, reads=False: False)
    rig.worker.save(ConnectorMetadata(saves=(save,)))
    assert (
        not rig.store.records and rig.worker.counts.skipped_saves.items() == {"adapter": 1}.items()
    )
    monkeypatch.setattr(rig.worker.loads._adapters, "holds", lambda adapter, reads=False: True)
    rig.worker.save(ConnectorMetadata(saves=(save,)))
    assert rig.store.records


def on_ranks(monkeypatch, *others: list[int]) -> list[list[int]]:
    """This process as one of several ranks; the others say what they hold. Returns the calls."""
    calls: list[list[int]] = []
    group = Namespace(world_size=1 + len(others), cpu_group="cpu")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)

    def all_reduce(flags, how, group):
        assert group == "cpu" and how == torch.distributed.ReduceOp.MIN
        calls.append(flags.tolist())
        for other in others:
            flags.copy_(torch.minimum(flags, torch.tensor(other, dtype=flags.dtype)))

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    return calls


@pytest.mark.parametrize("other", [[0], [1]], ids=["changed", "same"])
def test_what_another_rank_computed_with_another_adapter_is_not_stored(
    worker_rig, monkeypatch, other
):
    """A rank's pages come out of sums over all ranks; files may change between two ranks' reads."""
    rig = worker_rig()
    (save,) = rig.save_metadata().saves
    save = SaveSpec(save.request_id, named(save.prefix), save.attention, save.states)
    monkeypatch.setattr(type(rig.worker.loads._adapters), "_known", lambda *_: b"1")
    calls = on_ranks(monkeypatch, other)
    rig.worker.save(ConnectorMetadata(saves=(save,)))
    assert bool(rig.store.records) == bool(other[0]) and calls == [[1]]
    assert rig.worker.counts.skipped_saves.get("adapter", 0) == 1 - other[0]


def test_ranks_ask_each_other_about_adapters_only(worker_rig, monkeypatch):
    rig, calls = worker_rig(), on_ranks(monkeypatch)
    rig.worker.save(rig.save_metadata())
    assert rig.store.records and not calls


def test_a_rank_without_a_store_answers_the_others(worker_rig, monkeypatch):
    """One whose store failed to open, or takes nothing at the moment: the others wait for it."""
    rig, calls = worker_rig(), on_ranks(monkeypatch, [1])
    (save,) = rig.save_metadata().saves
    metadata = ConnectorMetadata(
        saves=(SaveSpec("r", named(save.prefix), save.attention, save.states),)
    )
    connector = object.__new__(HybridConnector)
    connector.worker, connector._metadata = None, metadata
    connector.wait_for_save()
    connector.worker, connector._guard = rig.worker, WeightsGuard()
    monkeypatch.setattr(rig.store, "writable", lambda: False)
    connector.wait_for_save()
    assert calls == [[0], [0]]


@pytest.mark.parametrize("held", [0, 1, 2], ids=["before", "meanwhile", "after"])
def test_a_load_of_another_adapter_fails(worker_rig, monkeypatch, held):
    rig = worker_rig().saved()
    load = rig.load()
    object.__setattr__(load, "prefix", named(load.prefix))
    left, adapters = [True] * held + [False] * 2, rig.worker.loads._adapters
    monkeypatch.setattr(adapters, "holds", lambda adapter, reads=False: left.pop(0))
    results = rig.run(load)
    assert results.failed_recving == results.finished_recving == {"r"}
    assert dict(rig.worker.counts.failed_loads.items()) == {"adapter,none": 1}
    rig.assert_clean()


def test_ranks_name_their_contents_in_order(worker_rig, lenient, monkeypatch):
    worker = worker_rig().worker
    wire = test_rpc.Wire(2, 5000)
    try:
        contents = iter([b"1", b"2", UNKNOWN, b"2"])
        monkeypatch.setattr(ADAPTERS, "_content_that_stays", lambda *_: next(contents))
        assert sorted(wire.client.contents(LORA)) == [b"1", b"2"]
        assert sorted(wire.client.contents(LORA)) == [UNKNOWN, b"2"]

        def broken(lora, reads):
            raise RuntimeError

        monkeypatch.setattr(ADAPTERS, "_content_that_stays", broken)
        assert wire.client.contents(LORA) == (UNKNOWN, UNKNOWN)
        assert worker.counts.caught_errors == lenient == {"adapter_content": 2}
    finally:
        wire.close()
