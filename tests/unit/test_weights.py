# SPDX-License-Identifier: Apache-2.0
"""The identity of weights, as vLLM's own loaders read them."""

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.core.groups import plan_groups
from lmcache_hybrid.identity import weights
from lmcache_hybrid.identity.weights import LOADED, WeightsStream, weights_identity
from vllm_patch import loaders

from .helpers import OPTIONS
from .layouts import N, build
from .toy_weights import (
    FORMATS,
    Fused,
    Toy,
    configured,
    fine_tuned,
    loaded,
    tensors,
    write_bin,
    write_ranks,
    write_safetensors,
)


@pytest.fixture
def one_rank(monkeypatch) -> None:
    """Groups of one rank, which only an engine's workers make."""
    for name in ("get_tensor_model_parallel_rank", "get_pipeline_model_parallel_rank"):
        monkeypatch.setattr(f"vllm.distributed.{name}", lambda: 0)
    for name in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(f"vllm.distributed.{name}", lambda: SimpleNamespace(world_size=1))


@pytest.mark.parametrize("load_format", FORMATS)
def test_ten_of_128_experts_matter_in_every_format(granite, model_folder, load_format, one_rank):
    write = FORMATS[load_format]
    write(model_folder, tensors())
    before = loaded(granite, model_folder, load_format)
    assert loaded(granite, model_folder, load_format) == before
    shutil.rmtree(model_folder / "np", ignore_errors=True)  # npcache's copy of the weights
    write(model_folder, fine_tuned())
    assert loaded(granite, model_folder, load_format) != before


def test_every_tensor_matters_and_where_it_lies_does_not(granite, model_folder, tmp_path):
    write_safetensors(model_folder, tensors())
    first = loaded(granite, model_folder)
    found = {first}
    moved = shutil.copytree(model_folder, tmp_path / "elsewhere" / "other")
    assert loaded(granite, moved) == first
    for name in tensors():
        changed = tensors()
        changed[name].view(-1)[-1] += 1
        write_safetensors(moved, changed)
        found.add(loaded(granite, moved))
    assert len(found) == 1 + len(tensors())


def test_how_a_checkpoint_is_cut_into_files_does_not_matter(granite, model_folder):
    write_safetensors(model_folder, tensors())
    first = loaded(granite, model_folder)
    (model_folder / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(reversed(tensors().items())):
        save_file({name: tensor}, model_folder / f"model-{number}.safetensors")
    assert loaded(granite, model_folder) == first
    write_bin(model_folder, tensors())
    assert loaded(granite, model_folder, "pt", toy=only("*.bin")) == first


def only(pattern: str) -> Toy:
    toy = Toy()
    toy.allow_patterns_overrides = [pattern]
    return toy


def test_weights_in_a_subfolder_matter(granite, model_folder):
    (model_folder / "audio").mkdir()
    content = tensors()
    save_file({"scale": content.pop("scale")}, model_folder / "audio" / "model.safetensors")
    write_safetensors(model_folder, content)

    def identity() -> str:
        toy = Fused()
        source = DefaultModelLoader.Source(str(model_folder), None, subfolder="audio")
        toy.secondary_weights = (source,)
        return loaded(granite, model_folder, toy=toy)

    before = identity()
    save_file({"scale": torch.tensor(4.0)}, model_folder / "audio" / "model.safetensors")
    assert identity() != before


class FromFile(BaseModelLoader):
    """A loader from outside vLLM, for a model that is named by its file."""

    def download_model(self, model_config) -> None: ...

    def load_weights(self, model: nn.Module, model_config) -> None:
        model.load_weights(weights=load_file(model_config.model).items())


def test_a_weight_file_named_by_its_path_matters(granite, model_folder):
    file = model_folder / "weights.gguf"
    save_file(tensors(), file)
    before = loaded(granite, file, loader=FromFile(granite.load_config))
    save_file(fine_tuned(), file)
    assert loaded(granite, file, loader=FromFile(granite.load_config)) != before


def streaming(granite: VllmConfig, content: Callable[[], dict], monkeypatch) -> BaseModelLoader:
    """The loader of object stores. It gives the same memory to tensor after tensor."""

    def stream(files, *_):
        assert files == ["s3://bucket/model/model.safetensors"]
        room = torch.zeros(128, 64, 16, dtype=torch.float32)
        for name, tensor in content().items():
            part = room.view(-1)[: tensor.numel()].view(tensor.shape)
            part.copy_(tensor)
            yield name, part

    module = "vllm.model_executor.model_loader.runai_streamer_loader"
    monkeypatch.setattr(f"{module}.runai_safetensors_weights_iterator", stream)
    monkeypatch.setattr(f"{module}.list_safetensors", lambda path: [f"{path}/model.safetensors"])
    return RunaiModelStreamerLoader(granite.load_config)


def test_an_object_under_the_same_url_matters(granite, model_folder, monkeypatch):
    config = copy.deepcopy(granite)
    config.model_config.model_weights = "s3://bucket/model"
    found = []
    for content in (tensors, fine_tuned, tensors):
        loader = streaming(config, content, monkeypatch)
        found.append(loaded(config, model_folder, "runai_streamer", loader))
    assert found[0] == found[2] != found[1]
    write_safetensors(model_folder, tensors())
    assert loaded(granite, model_folder) == found[0], "the same weights on disk"


def test_dummy_weights_are_known_by_their_values(granite, model_folder):
    one = loaded(granite, model_folder, "dummy")
    assert one == loaded(granite, model_folder, "dummy")
    wide = Toy()
    wide.norm = nn.Parameter(torch.zeros(9), requires_grad=False)
    assert loaded(granite, model_folder, "dummy", toy=wide) != one


def test_buffers_count_where_nothing_is_streamed(granite, model_folder, one_rank):
    write_ranks(model_folder, tensors())
    before = loaded(granite, model_folder, "sharded_state")
    write_ranks(model_folder, {**tensors(), "scale": torch.tensor(4.0)})
    assert loaded(granite, model_folder, "sharded_state") != before


def test_a_tensorizer_file_of_another_framework_counts_by_its_tensors(
    granite, model_folder, monkeypatch
):
    """Its loader does not call its own ``load_weights``."""

    def identity(content: dict) -> str:
        loader = object.__new__(TensorizerLoader)
        BaseModelLoader.__init__(loader, granite.load_config)
        loader.tensorizer_config = SimpleNamespace(
            verify_with_model_config=lambda _: None, verify_with_parallel_config=lambda _: None
        )
        loader._get_weights_iterator = lambda: iter(content.items())
        toy = Toy()
        module = "vllm.model_executor.model_loader.tensorizer_loader"
        monkeypatch.setattr(f"{module}.is_vllm_tensorized", lambda _: False)
        monkeypatch.setattr(f"{module}.initialize_model", lambda **_: toy)
        return loaded(granite, model_folder, "tensorizer", loader, toy)

    assert identity(tensors()) == identity(tensors()) != identity(fine_tuned())


def test_weights_of_vllms_daemon_count_by_the_tensors_that_they_become(
    granite, model_folder, monkeypatch
):
    """Its loader maps them into the model, with no ``load_weights`` at all."""

    def identity(content: dict) -> str:
        loader, toy = IpcModelLoader(granite.load_config), Toy()

        def mapped(*_) -> Toy:
            toy.load_weights(iter(content.items()))
            return toy

        monkeypatch.setattr(loader, "_fetch_entries", lambda *_: None)
        monkeypatch.setattr(loader, "_build_model", mapped)
        return loaded(granite, model_folder, "ipc_cache", loader, toy)

    module = "vllm.model_executor.model_loader.weight_cache.ipc_loader"
    monkeypatch.setattr(f"{module}.check_ipc_platform_support", lambda: None)
    assert identity(tensors()) == identity(tensors()) != identity(fine_tuned())


# Whose identity is tested above, by one format or another.
STREAM = (DefaultModelLoader, RunaiModelStreamerLoader)
FILL = (ShardedStateLoader, DummyModelLoader, TensorizerLoader, IpcModelLoader)


def test_the_docs_say_of_each_loader_of_vllms_what_is_digested():
    """One that is new, or that takes another class, fails here."""
    rows = (Path(__file__).parents[2] / "docs/reliability.md").read_text().splitlines()
    streamed, filled = (
        set(re.findall(r"`(\w+)`", row.split("; a plugin's")[0]))
        for row in rows
        if row.startswith("| `") and "; a plugin's" in row
    )
    known = {
        name: loader
        for name, loader in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()
        if loader.__module__.startswith("vllm.")
    }
    assert {name for name, loader in known.items() if loader in STREAM} == streamed
    assert {name for name, loader in known.items() if loader in FILL} == filled
    # A package of its own does what that loader says.
    assert known.keys() - streamed - filled <= {"modelexpress"}


# What is not known


class Silent(BaseModelLoader):
    """A loader from outside vLLM that does all by itself."""

    def download_model(self, model_config) -> None: ...

    def load_weights(self, model, model_config) -> None: ...

    def load_model(self, vllm_config, model_config, prefix="") -> nn.Module:
        return self.create_model()


def test_a_loader_that_shows_nothing_is_refused(granite, model_folder):
    with pytest.raises(UnknownWeightsError, match=r"^load_format=auto does not tell .* model "):
        loaded(granite, model_folder, loader=Silent(granite.load_config))


def test_an_engine_whose_weights_are_not_known_opens_no_store(monkeypatch, hybrid_log):
    """The engine serves without a store and says why once."""
    attention = FullAttentionSpec(block_size=N, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=N,
        shapes=((64, 8),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    built = build(KVCacheLayout.LBNHC, {"m0": state, "a0": attention})
    opened: list[str] = []
    connector = object.__new__(HybridConnector)
    connector._registered = {}
    connector.kv_cache_config, connector.plan = built.config, plan_groups(built.config)
    connector._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a0": SimpleNamespace(kv_cache_dtype="auto")}
        ),
    )
    connector._manager = SimpleNamespace(
        config=None, post_init=lambda: opened.append("store"), lmcache_engine=None
    )
    connector.worker, connector._options = None, OPTIONS
    monkeypatch.setattr("lmcache_hybrid.worker_side.check_sizes", lambda *_: None)

    def fingerprints(*_):
        raise UnknownWeightsError("load_format=mine does not tell, use another one")

    monkeypatch.setattr("lmcache_hybrid.connector.fingerprints", fingerprints)
    connector.register_kv_caches(dict(built.views))
    assert connector.worker is None and not opened
    assert hybrid_log.text.count("LMCache is off on this rank, which computes every prompt") == 1
    assert "because load_format=mine does not tell, use another one." in hybrid_log.text
    assert connector.get_kv_connector_kv_cache_events() is None


def test_an_earlier_load_does_not_count_for_a_later_one(granite, model_folder):
    write_safetensors(model_folder, tensors())
    config = configured(granite, model_folder)
    for loader in (DefaultModelLoader(config.load_config), Silent(config.load_config)):
        loader.create_model = lambda **_: Toy()
        with set_current_vllm_config(config):
            loader.load_model(vllm_config=config, model_config=config.model_config)
    assert LOADED.of(config.model_config) is None


def test_a_copy_of_the_configuration_has_loaded_nothing(granite):
    LOADED.note(granite.model_config, "weights")
    assert LOADED.of(granite.model_config) == "weights"
    assert LOADED.of(copy.deepcopy(granite.model_config)) is None


def test_an_identity_ends_with_its_configuration():
    """Numbers of objects are used again."""
    notes = weights.LoadedWeights()
    config = nn.Module()
    notes.note(config, "weights")
    [loaded] = notes._loaded.values()
    del config
    assert loaded.owner() is None
    later = nn.Module()
    notes._loaded[id(later)] = loaded  # as if it had got that number
    assert notes.of(later) is None and notes.classes_of(later) == frozenset()


def test_a_tensor_without_bytes_is_refused_and_still_loaded(hybrid_log):
    stream = WeightsStream()
    content = [("a", torch.zeros(2)), ("b", torch.empty(3, device="meta")), ("c", torch.ones(2))]
    assert [name for name, _ in stream.read(content)] == ["a", "b", "c"]
    assert stream.identity(nn.Module()) is None
    assert "Cannot read the bytes of weight b" in hybrid_log.text


def test_what_a_drafter_skips_of_its_targets_checkpoint_is_not_read():
    class Drafter(nn.Module):
        def is_unused_checkpoint_weight(self, name):
            return not name.startswith("mtp.")

        def load_weights(self, weights):
            return [name for name, _ in weights]

    found = set()
    for rest in (torch.empty(3, device="meta"), torch.ones(3)):
        stream, model = WeightsStream(), Drafter()
        with loaders._streamed(model, stream):
            read = model.load_weights([("mtp.a", torch.ones(2)), ("model.b", rest)])
        assert read == ["mtp.a", "model.b"], "vLLM itself leaves out what it skips"
        found.add(stream.identity(model))
    assert len(found) == 1 and None not in found


def test_engines_without_the_connector_are_left_alone(granite, model_folder, monkeypatch):
    write_safetensors(model_folder, tensors())
    config = configured(granite, model_folder)
    config.kv_transfer_config = None
    monkeypatch.setattr(WeightsStream, "read", None)
    loader = get_model_loader(config.load_config)
    loader.create_model = lambda **_: Toy()
    with set_current_vllm_config(config):
        loader.load_model(vllm_config=config, model_config=config.model_config)
    assert LOADED.of(config.model_config) is None


def test_a_reload_in_place_leaves_the_identity(granite, model_folder):
    """vLLM calls a loader's load_weights; the fingerprint is the reset's business."""
    write_safetensors(model_folder, tensors())
    config = configured(granite, model_folder)
    loader = get_model_loader(config.load_config)
    toy = Toy()
    loader.create_model = lambda **_: toy
    with set_current_vllm_config(config):
        loader.load_model(vllm_config=config, model_config=config.model_config)
        before = LOADED.of(config.model_config)
        write_safetensors(model_folder, fine_tuned())
        loader.load_weights(toy, config.model_config)
    assert LOADED.of(config.model_config) == before is not None


# Several ranks and models


def on_ranks(monkeypatch, others: list[dict[str, str | None]]) -> None:
    """This process as the first of several ranks; the others say what they have loaded."""
    group = SimpleNamespace(world_size=1 + len(others), cpu_group="cpu")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", lambda: group)

    def all_gather_object(ranks, own, group):
        assert group == "cpu" and len(ranks) == 1 + len(others)
        ranks[:] = [own, *others]

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)


def test_weights_of_every_rank_count_on_each(granite, monkeypatch):
    """A rank's pages come out of sums over all ranks."""
    LOADED.note(granite.model_config, "one")
    assert weights_identity(granite) == {"model": ["one"]}
    for others, expected in (
        ([], ["one"]),
        (["one", "one"], ["one"]),
        (["two", "three"], ["one", "two", "three"]),
        (["three", "two"], ["one", "three", "two"]),
    ):
        on_ranks(monkeypatch, [{"model": identity} for identity in others])
        assert weights_identity(granite) == {"model": expected}
    on_ranks(monkeypatch, [{"model": "one"}, {"model": None}])
    with pytest.raises(UnknownWeightsError):
        weights_identity(granite)


def test_a_draft_model_has_weights_of_its_own(granite):
    config = copy.deepcopy(granite)
    draft = copy.deepcopy(granite.model_config)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    LOADED.note(config.model_config, "one")
    with pytest.raises(UnknownWeightsError, match="the draft model"):
        weights_identity(config)
    LOADED.note(draft, "two")
    assert weights_identity(config) == {"model": ["one"], "draft model": ["two"]}


def test_ranks_that_join_later_are_refused(granite):
    config = copy.deepcopy(granite)
    LOADED.note(config.model_config, "dummy")
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(UnknownWeightsError, match="^enable_elastic_ep does not tell"):
        weights_identity(config)
