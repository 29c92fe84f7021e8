# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters by content: real files, vLLM's classes that load and evict them."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace as Namespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoRAConfig
from vllm.lora.lora_model import MoEEPLoadSpec
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

import vllm_patch
from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.identity.adapters import ADAPTERS, MOST_WAITING, UNKNOWN, Adapter
from lmcache_hybrid.protocol.lookup import LookupRequest
from lmcache_hybrid.protocol.metadata import ConnectorMetadata, SaveSpec
from lmcache_hybrid.protocol.prefix import Prefix
from lmcache_hybrid.storage.weights_guard import WeightsGuard
from vllm_patch.configuration import CONNECTOR

from . import test_rpc
from .helpers import N, make_request
from .scheduler_rig import STATES, Rig

vllm_patch.register()
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def write(folder: Path, seed: int = 0, when: int = 10**18, change: int = 0, **config) -> Path:
    """An adapter as PEFT writes it; ``change`` is added to one number of one matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    matrices = {
        f"{LAYER}.lora_A.weight": torch.randn(4, 32, generator=generator),
        f"{LAYER}.lora_B.weight": torch.randn(16, 4, generator=generator),
    }
    matrices[f"{LAYER}.lora_B.weight"][15, 3] += change
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        os.utime(file, ns=(when, when))
    return folder


class Models(LRUCacheLoRAModelManager):
    """vLLM's cache of adapters, without a model and its kernels."""

    def __init__(self, capacity: int) -> None:
        self._registered_adapters = AdapterLRUCache(capacity, lambda _: None)
        self.lora_config = Namespace(max_cpu_loras=capacity, max_loras=capacity)
        self.supported_lora_modules, self.packed_modules_mapping = ["q_proj"], {}
        self.model, self.moe_ep_load_spec = None, None

    capacity = property(lambda self: self.lora_config.max_cpu_loras)

    def _add_adapter(self, lora) -> None:
        self._registered_adapters[lora.id] = lora

    def _validate(self, lora) -> None:
        return None

    _validate_moe_lora_format = _validate_modules_to_save = _validate
    _validate_token_classification_lora = _validate_classification_head_lora = _validate
    _classification_head = None
    activate_adapter = deactivate_adapter = lambda self, number: True


def engine(
    capacity: int = 2, connector: str = CONNECTOR, encoder: bool = False
) -> LRUCacheWorkerLoRAManager:
    """What a rank of a new engine loads adapters with."""
    config = Namespace(
        scheduler_config=Namespace(max_num_seqs=1, max_num_batched_tokens=1),
        model_config=Namespace(
            get_vocab_size=lambda: 9,
            is_encoder_decoder=False,
            hf_config=Namespace(get_text_config=lambda: Namespace(max_position_embeddings=9)),
        ),
        lora_config=LoRAConfig(
            max_lora_rank=8, lora_dtype=torch.float32, enable_tower_connector_lora=encoder
        ),
        kv_transfer_config=Namespace(has_connector=lambda name: name == connector),
    )
    manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), {})
    manager._adapter_manager = Models(capacity)
    return manager


def ask(folder: Path, number: int = 1, **fields) -> LoRARequest:
    return LoRARequest("name", number, str(folder), **fields)


def loaded(folder: Path, **fields) -> bytes:
    """The content that a new engine loads."""
    engine().add_adapter(ask(folder, **fields))
    return ADAPTERS.content(ask(folder, **fields))


# What the content is


def test_equal_content_is_equal_wherever_and_whenever_it_was_written(tmp_path):
    one = loaded(write(tmp_path / "one"))
    assert one not in (UNKNOWN, loaded(write(tmp_path / "other", seed=1)))
    assert one == loaded(write(tmp_path / "two", when=2 * 10**18))


@pytest.mark.parametrize(
    "change",
    [
        dict(change=1e-3),
        dict(lora_alpha=9),
        dict(use_rslora=True),
        dict(alpha_pattern={"q_proj": 2}),
    ],
    ids=str,
)
def test_other_content_differs_though_sizes_and_times_are_the_same(tmp_path, change):
    """As in the layers of an image, where all files have one time."""
    assert loaded(write(tmp_path / "a")) != loaded(write(tmp_path / "a", **change))


# When it is taken


def test_files_that_are_replaced_after_vllm_loaded_them_keep_no_name(tmp_path):
    """The content is that of the tensors in memory; a new engine takes the new files'."""
    folder = write(tmp_path / "a")
    old = loaded(folder)
    write(folder, seed=1)
    assert ADAPTERS.content(ask(folder)) == old
    assert loaded(folder) not in (old, UNKNOWN)


def test_an_adapter_that_is_not_loaded_is_read_once_for_lookup_and_vllm(tmp_path, monkeypatch):
    folder, manager = write(tmp_path / "a"), engine()
    content = ADAPTERS.content(ask(folder))
    assert content != UNKNOWN and not manager.list_adapters()
    shutil.copytree(folder, tmp_path / "same")
    read = ADAPTERS._read
    monkeypatch.setattr(ADAPTERS, "_read", lambda *_: pytest.fail("read twice"))
    assert ADAPTERS.content(ask(folder)) == content
    manager.add_adapter(ask(folder))
    assert ADAPTERS.holds(Adapter(ask(folder), (content,)))
    monkeypatch.setattr(ADAPTERS, "_read", read)
    assert loaded(tmp_path / "same") == content


def test_files_that_are_replaced_between_lookup_and_loading_are_noticed(tmp_path):
    folder, manager = write(tmp_path / "a"), engine()
    promised = Adapter(ask(folder), (ADAPTERS.content(ask(folder)),))
    assert ADAPTERS.holds(promised)
    write(folder, seed=1, when=2 * 10**18)
    assert not ADAPTERS.holds(promised)
    manager.add_adapter(ask(folder))  # vLLM gets the new files, as it would without us
    assert not ADAPTERS.holds(promised)
    (layer,) = manager._adapter_manager.get_adapter(1).loras.values()
    assert torch.equal(layer.lora_a, torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))


def test_an_adapter_that_changed_while_it_was_evicted_is_cached_no_more(tmp_path):
    """vLLM's own prefix cache knows it by name and path: blocks of the old one stay."""
    folder, other = write(tmp_path / "a"), write(tmp_path / "b")
    manager = engine(capacity=1)
    manager.add_adapter(ask(folder))
    content = ADAPTERS.content(ask(folder))
    manager.add_adapter(ask(other, 2))
    assert manager.list_adapters() == {2}
    assert ADAPTERS.content(ask(folder)) == content  # unchanged: read again
    write(folder, seed=1, when=2 * 10**18)
    assert ADAPTERS.content(ask(folder)) == UNKNOWN
    manager.add_adapter(ask(folder))
    assert ADAPTERS.content(ask(folder)) == UNKNOWN
    assert not ADAPTERS.holds(Adapter(ask(folder), (content,)))
    assert ADAPTERS.content(ask(other, 2)) != UNKNOWN


def test_an_adapter_that_was_another_one_in_between_holds_nothing(tmp_path):
    """A block whose first half the other one computed is not stored under the first one's name."""
    folder, other = write(tmp_path / "a"), write(tmp_path / "b")
    manager = engine(capacity=1)
    manager.add_adapter(ask(folder))
    named = Adapter(ask(folder), (ADAPTERS.content(ask(folder)),))
    for seed in (1, 0):
        manager.add_adapter(ask(other, 2))
        assert ADAPTERS.holds(named) == (seed == 1)
        write(folder, seed=seed)
        manager.add_adapter(ask(folder))
        assert not ADAPTERS.holds(named)
    ADAPTERS.forget()  # all caches were reset: what was computed before is stored nowhere
    assert ADAPTERS.holds(named)


def test_an_adapter_that_is_reloaded_in_place(tmp_path):
    folder, manager = write(tmp_path / "a"), engine()
    in_place = ask(folder, load_inplace=True)
    assert ADAPTERS.content(in_place) == UNKNOWN  # not loaded, and read anew in any case
    manager.add_adapter(in_place)
    old = ADAPTERS.content(in_place)
    manager.add_adapter(in_place)
    assert old == ADAPTERS.content(in_place) != UNKNOWN
    write(folder, seed=1)
    manager.add_adapter(in_place)
    assert ADAPTERS.content(in_place) == UNKNOWN
    assert not ADAPTERS.holds(Adapter(in_place, (old,)))
    ADAPTERS.forget()  # all caches were reset
    assert ADAPTERS.content(in_place) not in (old, UNKNOWN)
    write(folder, seed=2)
    manager.add_adapter(in_place)
    assert ADAPTERS.content(in_place) == UNKNOWN


@pytest.mark.parametrize("encoder", [False, True])
def test_the_encoders_cache_knows_an_adapter_by_its_name(tmp_path, encoder):
    """Embeddings of the adapter at one path serve the one at another, and survive a reset."""
    manager = engine(encoder=encoder)
    manager.add_adapter(ask(write(tmp_path / "a")))
    manager.add_adapter(ask(write(tmp_path / "b", seed=1), 2))
    ADAPTERS.forget()
    assert (ADAPTERS.content(ask(tmp_path / "b", 2)) == UNKNOWN) == encoder


def test_what_waits_for_vllm_is_bounded(tmp_path):
    engine()
    for number in range(1, MOST_WAITING + 3):
        folder = write(tmp_path / str(number), seed=number)
        assert ADAPTERS.content(ask(folder, number)) != UNKNOWN
    assert len(ADAPTERS._waiting) == MOST_WAITING


@pytest.mark.parametrize(("local", "known"), [(2, False), (4, True)])
def test_experts_on_ranks_of_other_engines_are_not_known(tmp_path, monkeypatch, local, known):
    manager = engine()
    monkeypatch.setattr(ADAPTERS, "ranks", 2)
    manager._adapter_manager.moe_ep_load_spec = MoEEPLoadSpec(0, local, 8)
    manager.add_adapter(ask(write(tmp_path / "a")))
    assert (ADAPTERS.content(ask(tmp_path / "a")) != UNKNOWN) == known


@pytest.mark.parametrize("path", ["someone/adapter", "broken"])
def test_what_cannot_be_read_is_not_known(tmp_path, path):
    """vLLM downloads a name of a hub when it loads it; the content is known from then on."""
    engine()
    (write(tmp_path / "broken") / "adapter_model.safetensors").write_bytes(b"x")
    assert ADAPTERS.content(ask(tmp_path / path if path == "broken" else path)) == UNKNOWN


def test_engines_without_our_connector_are_left_alone(tmp_path):
    mine = engine()
    other = engine(connector="NixlConnector")
    other.add_adapter(ask(write(tmp_path / "a")))
    assert ADAPTERS.serves(mine) and not ADAPTERS._contents


# Keys


def lora_request(name: str = "r"):
    return make_request(name, lora=LoRARequest("name", 1, "/adapter"))


def test_every_rank_counts():
    tags = {Adapter(ask(Path("/a")), contents).tag for contents in [(b"1", b"2"), (b"1", b"3")]}
    assert len(tags) == 2


def test_a_prefix_is_known_when_the_ranks_named_the_adapter():
    new = Prefix((b"h",), (("user", "a"),), Adapter(ask(Path("/a"))))
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
        rig.scheduler.finished(request)
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


def test_a_request_that_asks_for_no_hit_is_not_stored_under_an_unknown_name():
    rig, request = Rig(), lora_request()
    request.skip_reading_prefix_cache = True
    offers = [(group, 5, 3 * N) for group in STATES]
    assert rig.match(request) == (0, False)
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


# Workers


def named(prefix: Prefix) -> Prefix:
    return msgspec.structs.replace(prefix, adapter=Adapter(ask(Path("/a")), (b"1",)))


def test_a_step_of_another_adapter_stores_nothing(worker_rig, monkeypatch):
    rig = worker_rig()
    (save,) = rig.save_metadata().saves
    save = SaveSpec(save.request_id, named(save.prefix), save.attention, save.states)
    monkeypatch.setattr(rig.worker._adapters, "holds", lambda adapter: False)
    rig.worker.save(ConnectorMetadata(saves=(save,)))
    assert (
        not rig.store.records and rig.worker.counts.skipped_saves.items() == {"adapter": 1}.items()
    )
    monkeypatch.setattr(rig.worker._adapters, "holds", lambda adapter: True)
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
    monkeypatch.setattr(type(rig.worker._adapters), "_known", lambda self, lora: b"1")
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


@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["before", "meanwhile"])
def test_a_load_of_another_adapter_fails(worker_rig, monkeypatch, answers):
    rig = worker_rig().saved()
    load = rig.load()
    object.__setattr__(load, "prefix", named(load.prefix))
    left = [*answers, answers[-1]]
    monkeypatch.setattr(rig.worker._adapters, "holds", lambda adapter: left.pop(0))
    results = rig.run(load)
    assert results.failed_recving == results.finished_recving == {"r"}
    assert dict(rig.worker.counts.failed_loads.items()) == {"adapter,none": 1}
    rig.assert_clean()


# Over the wire


def test_ranks_name_their_contents_in_order(monkeypatch):
    wire = test_rpc.Wire(2, 5000)
    try:
        contents = iter([b"1", b"2", UNKNOWN, b"2"])
        monkeypatch.setattr(ADAPTERS, "content", lambda lora: next(contents))
        assert sorted(wire.client.contents(ask(Path("/a")))) == [b"1", b"2"]
        assert sorted(wire.client.contents(ask(Path("/a")))) == [UNKNOWN, b"2"]

        def broken(lora):
            raise RuntimeError

        monkeypatch.setattr(ADAPTERS, "content", broken)
        assert wire.client.contents(ask(Path("/a"))) == (UNKNOWN, UNKNOWN)
    finally:
        wire.close()
