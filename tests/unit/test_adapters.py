# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters by content: real files, vLLM's classes that load and evict them."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoRAConfig
from vllm.lora.lora_model import MoEEPLoadSpec
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

import vllm_patch
from lmcache_hybrid.identity.adapters import ADAPTERS, MOST_WAITING, UNKNOWN, Adapter
from vllm_patch.configuration import CONNECTOR

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


def test_nothing_is_known_where_stages_are_at_other_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(ADAPTERS, "stages", 2)
    assert loaded(write(tmp_path / "one")) == UNKNOWN


def test_an_adapter_whose_files_cannot_be_looked_at_is_not_cached(tmp_path, hybrid_log):
    """Its requests are computed; vLLM loads what it can read."""
    folder, manager = write(tmp_path / "one"), engine()
    (folder / "adapter_more.bin").symlink_to(tmp_path / "nowhere")
    assert ADAPTERS.content(ask(folder)) == UNKNOWN
    assert not ADAPTERS.holds(Adapter(ask(folder), (b"said before",)))
    assert hybrid_log.text.count("its files cannot be looked at") == 1
    assert "adapter_more.bin" in hybrid_log.text
    manager.add_adapter(ask(folder))
    assert ADAPTERS.content(ask(folder)) != UNKNOWN, "what is loaded needs no file"


def test_an_adapter_that_was_read_ahead_is_loaded_although_a_link_broke_meanwhile(tmp_path):
    folder, manager = write(tmp_path / "one"), engine()
    assert ADAPTERS.content(ask(folder)) != UNKNOWN
    (folder / "adapter_more.bin").symlink_to(tmp_path / "nowhere")
    manager.add_adapter(ask(folder))
    assert ADAPTERS.content(ask(folder)) != UNKNOWN


def test_an_adapter_whose_tensors_cannot_be_read_is_loaded_and_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr("xxhash.xxh3_128", lambda *_: (_ for _ in ()).throw(RuntimeError("bytes")))
    assert loaded(write(tmp_path / "one")) == UNKNOWN


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


def test_the_thread_that_runs_the_model_reads_no_files(tmp_path, monkeypatch):
    """Others displaced the adapter before vLLM took it: the load's thread reads it again."""
    named = []
    engine()
    for number in range(1, MOST_WAITING + 2):
        adapter = ask(write(tmp_path / str(number), seed=number), number)
        named.append(Adapter(adapter, (ADAPTERS.content(adapter),)))
    with monkeypatch.context() as patch:
        patch.setattr(ADAPTERS, "_read", lambda *_: pytest.fail("read on the model's thread"))
        held = [ADAPTERS.holds(each) for each in named]
    assert held == [False] + [True] * MOST_WAITING
    assert ADAPTERS.holds(named[0], reads=True)
    assert ADAPTERS.holds(named[0])


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
        assert ADAPTERS.holds(named, reads=True) == (seed == 1)
        write(folder, seed=seed)
        manager.add_adapter(ask(folder))
        assert not ADAPTERS.holds(named)
    ADAPTERS.forget()  # all caches were reset: what was computed before is stored nowhere
    assert ADAPTERS.holds(named)


def test_an_adapter_reloaded_in_place_with_other_content_is_cached_no_more(tmp_path):
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
