# SPDX-License-Identifier: Apache-2.0
"""The identity of weights, as vLLM's own loaders read them."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import vllm_patch
from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.core.groups import plan_groups
from lmcache_hybrid.identity import weights
from lmcache_hybrid.identity.weights import (
    LOADED,
    TensorDigest,
    WeightsStream,
    files_identity,
    weights_identity,
)
from lmcache_hybrid.tools.tiny_models import make_model

from .layouts import N, build

vllm_patch.register()

EXPERTS = "experts.w13_weight"


class Toy(nn.Module):
    """A norm, a fused tensor of 128 experts and a buffer, filled as vLLM's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(128, 64, 16), requires_grad=False)
        self.register_buffer("scale", torch.zeros(()))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        state, loaded = self.state_dict(), set()
        for name, tensor in weights:
            state[name].copy_(tensor)
            loaded.add(name)
        return loaded


class Fused(Toy):
    """As a model that keeps a part of its weights in a folder of its own."""

    secondary_weights: tuple = ()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "norm": torch.randn(8, generator=generator, dtype=torch.float32),
        EXPERTS: torch.randn(128, 64, 16, generator=generator, dtype=torch.float32),
        "scale": torch.tensor(3.0, dtype=torch.float32),
    }


def fine_tuned() -> dict[str, torch.Tensor]:
    """10 of 128 experts: in 92 % of the tensor's bytes nothing changes."""
    changed = tensors()
    changed[EXPERTS][40:50] += 0.01
    return changed


@pytest.fixture(scope="module")
def made(model_dir: Path) -> VllmConfig:
    model = make_model("granite4", model_dir / "granite4")
    config = EngineArgs(model=str(model), max_model_len=4096).create_engine_config()
    config.kv_transfer_config = KVTransferConfig("LMCacheConnectorV1", kv_role="kv_both")
    return config


@pytest.fixture(autouse=True)
def cpu(monkeypatch) -> None:
    """vLLM's workers do so for CPUs."""
    monkeypatch.setattr("torch.accelerator.empty_cache", lambda: None)


@pytest.fixture
def folder(made: VllmConfig, tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return shutil.copytree(made.model_config.model, tmp_path / "model", ignore=ignore)


def configured(made: VllmConfig, model: Path | str, load_format: str = "auto") -> VllmConfig:
    config = copy.deepcopy(made)
    config.model_config.model = str(model)
    config.load_config.load_format = load_format
    return config


def loaded(
    made: VllmConfig,
    model: Path | str,
    load_format: str = "auto",
    loader: BaseModelLoader | None = None,
    toy: nn.Module | None = None,
) -> str:
    """Identity after the real ``load_model`` of one of vLLM's loaders."""
    config = configured(made, model, load_format)
    loader = loader or get_model_loader(config.load_config)
    toy = toy or Toy()
    loader.create_model = lambda **_: toy
    with set_current_vllm_config(config):
        found = loader.load_model(vllm_config=config, model_config=config.model_config)
    own = vars(toy)["load_weights"].__wrapped__
    assert found is toy and own == type(toy).load_weights.__get__(toy)
    assert "load_weights" not in vars(loader)
    [identity] = weights_identity(config)["model"]
    return identity


def write_safetensors(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model.safetensors")


def write_bin(folder: Path, content: dict[str, torch.Tensor]) -> None:
    torch.save(content, folder / "pytorch_model.bin")


def write_pt(folder: Path, content: dict[str, torch.Tensor]) -> None:
    torch.save(content, folder / "model.pt")


def write_mistral(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "consolidated.safetensors")


def write_ranks(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model-rank-0-part-0.safetensors")


FORMATS = {
    "auto": write_safetensors,
    "safetensors": write_safetensors,
    "hf": write_bin,
    "npcache": write_bin,
    "pt": write_pt,
    "mistral": write_mistral,
    "sharded_state": write_ranks,
}


@pytest.fixture
def one_rank(monkeypatch) -> None:
    """Groups of one rank, which only an engine's workers make."""
    for name in ("get_tensor_model_parallel_rank", "get_pipeline_model_parallel_rank"):
        monkeypatch.setattr(f"vllm.distributed.{name}", lambda: 0)
    for name in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(f"vllm.distributed.{name}", lambda: SimpleNamespace(world_size=1))


@pytest.mark.parametrize("load_format", FORMATS)
def test_ten_of_128_experts_matter_in_every_format(made, folder, load_format, one_rank):
    write = FORMATS[load_format]
    write(folder, tensors())
    before = loaded(made, folder, load_format)
    assert loaded(made, folder, load_format) == before
    shutil.rmtree(folder / "np", ignore_errors=True)  # npcache's copy of the weights
    write(folder, fine_tuned())
    assert loaded(made, folder, load_format) != before


def test_every_tensor_matters_and_where_it_lies_does_not(made, folder, tmp_path):
    write_safetensors(folder, tensors())
    first = loaded(made, folder)
    found = {first}
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "other")
    assert loaded(made, moved) == first
    for name in tensors():
        changed = tensors()
        changed[name].view(-1)[-1] += 1
        write_safetensors(moved, changed)
        found.add(loaded(made, moved))
    assert len(found) == 1 + len(tensors())


def test_how_a_checkpoint_is_cut_into_files_does_not_matter(made, folder):
    write_safetensors(folder, tensors())
    first = loaded(made, folder)
    (folder / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(reversed(tensors().items())):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    assert loaded(made, folder) == first
    write_bin(folder, tensors())
    assert loaded(made, folder, "pt", toy=only("*.bin")) == first


def only(pattern: str) -> Toy:
    toy = Toy()
    toy.allow_patterns_overrides = [pattern]
    return toy


def test_weights_in_a_subfolder_matter(made, folder):
    (folder / "audio").mkdir()
    content = tensors()
    save_file({"scale": content.pop("scale")}, folder / "audio" / "model.safetensors")
    write_safetensors(folder, content)

    def identity() -> str:
        toy = Fused()
        source = DefaultModelLoader.Source(str(folder), None, subfolder="audio")
        toy.secondary_weights = (source,)
        return loaded(made, folder, toy=toy)

    before = identity()
    save_file({"scale": torch.tensor(4.0)}, folder / "audio" / "model.safetensors")
    assert identity() != before


class FromFile(BaseModelLoader):
    """A loader from outside vLLM, for a model that is named by its file."""

    def download_model(self, model_config) -> None: ...

    def load_weights(self, model: nn.Module, model_config) -> None:
        model.load_weights(weights=load_file(model_config.model).items())


def test_a_weight_file_named_by_its_path_matters(made, folder):
    file = folder / "weights.gguf"
    save_file(tensors(), file)
    before = loaded(made, file, loader=FromFile(made.load_config))
    save_file(fine_tuned(), file)
    assert loaded(made, file, loader=FromFile(made.load_config)) != before


def streaming(made: VllmConfig, content: Callable[[], dict], monkeypatch) -> BaseModelLoader:
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
    return RunaiModelStreamerLoader(made.load_config)


def test_an_object_under_the_same_url_matters(made, folder, monkeypatch):
    config = copy.deepcopy(made)
    config.model_config.model_weights = "s3://bucket/model"
    found = []
    for content in (tensors, fine_tuned, tensors):
        loader = streaming(config, content, monkeypatch)
        found.append(loaded(config, folder, "runai_streamer", loader))
    assert found[0] == found[2] != found[1]
    write_safetensors(folder, tensors())
    assert loaded(made, folder) == found[0], "the same weights on disk"


def test_dummy_weights_are_known_by_their_values(made, folder):
    one = loaded(made, folder, "dummy")
    assert one == loaded(made, folder, "dummy")
    wide = Toy()
    wide.norm = nn.Parameter(torch.zeros(9), requires_grad=False)
    assert loaded(made, folder, "dummy", toy=wide) != one


def test_buffers_count_where_nothing_is_streamed(made, folder, one_rank):
    write_ranks(folder, tensors())
    before = loaded(made, folder, "sharded_state")
    write_ranks(folder, {**tensors(), "scale": torch.tensor(4.0)})
    assert loaded(made, folder, "sharded_state") != before


def test_a_tensorizer_file_of_another_framework(made, folder, monkeypatch):
    """Its loader does not call its own ``load_weights``."""

    def identity(content: dict) -> str:
        loader = object.__new__(TensorizerLoader)
        BaseModelLoader.__init__(loader, made.load_config)
        loader.tensorizer_config = SimpleNamespace(
            verify_with_model_config=lambda _: None, verify_with_parallel_config=lambda _: None
        )
        loader._get_weights_iterator = lambda: iter(content.items())
        toy = Toy()
        module = "vllm.model_executor.model_loader.tensorizer_loader"
        monkeypatch.setattr(f"{module}.is_vllm_tensorized", lambda _: False)
        monkeypatch.setattr(f"{module}.initialize_model", lambda **_: toy)
        return loaded(made, folder, "tensorizer", loader, toy)

    assert identity(tensors()) == identity(tensors()) != identity(fine_tuned())


# What is not known


class Silent(BaseModelLoader):
    """A loader from outside vLLM that does all by itself."""

    def download_model(self, model_config) -> None: ...

    def load_weights(self, model, model_config) -> None: ...

    def load_model(self, vllm_config, model_config, prefix="") -> nn.Module:
        return self.create_model()


def test_a_loader_that_shows_nothing_is_refused(made, folder):
    with pytest.raises(UnknownWeightsError, match=r"^load_format=auto does not tell .* model "):
        loaded(made, folder, loader=Silent(made.load_config))


def test_an_engine_whose_weights_are_not_known_opens_no_store(monkeypatch, hybrid_log):
    """It serves, and says why once."""
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
    connector._kv_cache_config, connector.plan = built.config, plan_groups(built.config)
    connector._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a0": SimpleNamespace(kv_cache_dtype="auto")}
        )
    )
    connector._manager = SimpleNamespace(
        config=None, post_init=lambda: opened.append("store"), lmcache_engine=None
    )
    connector.worker = None
    monkeypatch.setattr("lmcache_hybrid.connector.check_pool", lambda *_: None)

    def fingerprint(*_):
        raise UnknownWeightsError("load_format=mine does not tell, use another one")

    monkeypatch.setattr("lmcache_hybrid.connector.fingerprint", fingerprint)
    connector.register_kv_caches(dict(built.views))
    assert connector.worker is None and not opened
    assert hybrid_log.text.count("LMCache is off on this rank, which computes every prompt") == 1
    assert "since load_format=mine does not tell, use another one." in hybrid_log.text


def test_an_earlier_load_does_not_count_for_a_later_one(made, folder):
    write_safetensors(folder, tensors())
    config = configured(made, folder)
    for loader in (DefaultModelLoader(config.load_config), Silent(config.load_config)):
        loader.create_model = lambda **_: Toy()
        with set_current_vllm_config(config):
            loader.load_model(vllm_config=config, model_config=config.model_config)
    assert LOADED.of(config.model_config) is None


def test_a_copy_of_the_configuration_has_loaded_nothing(made):
    LOADED.note(made.model_config, "weights")
    assert LOADED.of(made.model_config) == "weights"
    assert LOADED.of(copy.deepcopy(made.model_config)) is None


def test_an_identity_ends_with_its_configuration():
    """Numbers of objects are used again."""
    notes = weights.LoadedWeights()
    config = nn.Module()
    notes.note(config, "weights")
    [(ref, _)] = notes._identities.values()
    del config
    assert ref() is None
    for _ in range(100):
        assert notes.of(nn.Module()) is None


def test_a_tensor_without_bytes_is_refused_and_still_loaded(hybrid_log):
    stream = WeightsStream()
    content = [("a", torch.zeros(2)), ("b", torch.empty(3, device="meta")), ("c", torch.ones(2))]
    assert [name for name, _ in stream.read(content)] == ["a", "b", "c"]
    assert stream.identity(nn.Module()) is None
    assert "Cannot read the bytes of weight b" in hybrid_log.text


def test_engines_without_the_connector_are_left_alone(made, folder, monkeypatch):
    write_safetensors(folder, tensors())
    config = configured(made, folder)
    config.kv_transfer_config = None
    monkeypatch.setattr(WeightsStream, "read", None)
    loader = get_model_loader(config.load_config)
    loader.create_model = lambda **_: Toy()
    with set_current_vllm_config(config):
        loader.load_model(vllm_config=config, model_config=config.model_config)
    assert LOADED.of(config.model_config) is None


def test_a_reload_in_place_leaves_the_identity(made, folder):
    """vLLM calls a loader's load_weights; the fingerprint is the reset's business."""
    write_safetensors(folder, tensors())
    config = configured(made, folder)
    loader = get_model_loader(config.load_config)
    toy = Toy()
    loader.create_model = lambda **_: toy
    with set_current_vllm_config(config):
        loader.load_model(vllm_config=config, model_config=config.model_config)
        before = LOADED.of(config.model_config)
        write_safetensors(folder, fine_tuned())
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


def test_weights_of_every_rank_count_on_each(made, monkeypatch):
    """A rank's pages come out of sums over all ranks."""
    LOADED.note(made.model_config, "one")
    assert weights_identity(made) == {"model": ["one"]}
    for others, expected in (
        ([], ["one"]),
        (["one", "one"], ["one"]),
        (["two", "three"], ["one", "two", "three"]),
        (["three", "two"], ["one", "three", "two"]),
    ):
        on_ranks(monkeypatch, [{"model": identity} for identity in others])
        assert weights_identity(made) == {"model": expected}
    on_ranks(monkeypatch, [{"model": "one"}, {"model": None}])
    with pytest.raises(UnknownWeightsError):
        weights_identity(made)


def test_a_draft_model_has_weights_of_its_own(made):
    config = copy.deepcopy(made)
    draft = copy.deepcopy(made.model_config)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    LOADED.note(config.model_config, "one")
    with pytest.raises(UnknownWeightsError, match="the draft model"):
        weights_identity(config)
    LOADED.note(draft, "two")
    assert weights_identity(config) == {"model": ["one"], "draft model": ["two"]}


def test_ranks_that_join_later_are_refused(made):
    config = copy.deepcopy(made)
    LOADED.note(config.model_config, "dummy")
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(UnknownWeightsError, match="^enable_elastic_ep does not tell"):
        weights_identity(config)


# The digest


def digest_of(**content: torch.Tensor) -> str | None:
    digest = TensorDigest()
    for name, tensor in content.items():
        digest.add(name, tensor)
    return digest.hexdigest()


def test_a_digest_covers_name_type_shape_and_bytes():
    base = torch.arange(6, dtype=torch.int32)
    found = [
        digest_of(a=base),
        digest_of(b=base),
        digest_of(a=base.view(2, 3)),
        digest_of(a=base.view(torch.float32)),
        digest_of(a=base.flip(0)),
        digest_of(a=base, b=base),
        digest_of(),
    ]
    assert len(set(found)) == len(found) and found[-1] is None
    assert digest_of(b=base, a=base) == found[5], "loaders read files in any order"
    assert digest_of(a=torch.stack([base, base], 1)[:, 0]) == found[0], "strides are no content"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.int8])
def test_digests_of_every_type(dtype):
    zeros, ones = torch.zeros(4).to(dtype), torch.ones(4).to(dtype)
    assert digest_of(a=zeros) != digest_of(a=ones)
    assert digest_of(a=zeros[0]) and digest_of(a=zeros[:0])


# Files beside the weights


def model_of(model: Path | str, revision=None, commit=None, config_path=None) -> SimpleNamespace:
    return SimpleNamespace(
        model=str(model),
        revision=revision,
        hf_config_path=config_path,
        hf_config=SimpleNamespace(_commit_hash=commit),
    )


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "preprocessor_config.json", "modeling_x.py"]
)
def test_what_is_made_of_weights_and_items_matters(folder, name):
    """Quantisation beside the config; sizes that an item's hash does not cover; own code."""
    before = files_identity(model_of(folder))
    (folder / name).write_text("{}")
    (folder / "model.gguf").touch()
    assert files_identity(model_of(folder)) != before
    assert files_identity(model_of(folder / "model.gguf")) == files_identity(model_of(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "chat_template.jinja"])
def test_what_only_makes_token_ids_does_not_matter(folder, name):
    """Keys are made of token ids."""
    before = files_identity(model_of(folder))
    (folder / name).write_text("{}")
    (folder / "x_config.json").mkdir()
    assert files_identity(model_of(folder)) == before


SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "model, expected",
    [
        (model_of("org/name", commit="c1"), "org/name@c1"),
        (model_of("org/name", "v1", commit="c1"), "org/name@c1"),
        (model_of("org/name", SHA), f"org/name@{SHA}"),
        (model_of("org/name", SHA, "other", "org/config"), f"org/name@{SHA}"),
    ],
)
def test_names_of_a_hub_count_with_their_commit(model, expected):
    assert files_identity(model) == expected


@pytest.mark.parametrize(
    "model",
    [
        model_of("org/name"),
        model_of("org/name", "main"),
        model_of("s3://bucket/model"),
        # The commit is another repository's.
        model_of("org/name", "main", "c1", "org/config"),
    ],
)
def test_names_without_a_commit_are_refused(model):
    with pytest.raises(UnknownWeightsError, match="with a known commit, download it and name"):
        files_identity(model)
