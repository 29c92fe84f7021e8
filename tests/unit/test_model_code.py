# SPDX-License-Identifier: Apache-2.0
"""Code from outside vLLM that a model is made of: of plugins, of transformers, of other places.

Packages are real files and distributions; transformers itself imports what comes with a model.
"""

import copy
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import dynamic_module_utils
from transformers.activations import GELUActivation
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader

from lmcache_hybrid.core.errors import UnknownCodeError, UnknownWeightsError
from lmcache_hybrid.identity.model_code import classes_of, model_code
from lmcache_hybrid.identity.weights import LOADED, weights_identity

from .test_code_identity import EDITABLE, distribution, forget, package, site  # noqa: F401
from .test_weights import on_ranks
from .toy_weights import Toy, loaded, tensors, write_safetensors

ONE, TWO = "1" * 40, "2" * 40
MODEL = """
from torch import nn
class Model(nn.Module):
    SCALE = 1
"""


@pytest.fixture
def config(granite: VllmConfig) -> VllmConfig:
    return copy.deepcopy(granite)


def plugged(folder: Path, scale: int = 1) -> type[nn.Module]:
    """The model class of a plugin, as a process that starts now imports it."""
    package(folder, content=MODEL.replace("1", str(scale)))
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugged"]:
        del sys.modules[name]
    forget()
    return importlib.import_module("plugged.backend").Model


def code_of(config: VllmConfig, *parts: nn.Module | type[nn.Module]) -> list[str]:
    """What counts of a model with these parts."""
    model = nn.Module()
    for number, part in enumerate(parts):
        model.add_module(str(number), part() if isinstance(part, type) else part)
    LOADED.note(config.model_config, "weights", classes_of(model))
    return model_code(config).get("model", [])


# Packages


def test_a_model_class_of_a_plugin_counts_with_its_version(site, config):  # noqa: F811
    """Registered under a name of vLLM's own, too: the configuration is the same."""
    model = plugged(site)
    distribution(site, "1.2")
    assert code_of(config, model) == ["plugged-kit==1.2"]
    model = plugged(site)
    distribution(site, "1.3")
    assert code_of(config, model) == ["plugged-kit==1.3"]


def test_a_file_that_was_put_into_an_installed_package_counts(site, config):  # noqa: F811
    found = set()
    for scale in (1, 2):
        model = plugged(site, scale)
        distribution(site, "1.2")
        (record,) = site.glob("*.dist-info/RECORD")
        record.write_text("plugged/__init__.py,,\n")
        found.update(code_of(config, model))
    assert len(found) == 2


@pytest.mark.parametrize("url", [None, EDITABLE])
def test_without_a_version_to_trust_it_counts_by_its_content(site, config, url):  # noqa: F811
    found = []
    for scale in (1, 2, 1):
        model = plugged(site, scale)
        if url:
            distribution(site, "1.2", url=url)
        found.append(code_of(config, model))
    assert found[0] == found[2] != found[1] and "code " in found[0][0]


def test_bases_parts_and_quantisation_methods_count(site, config):  # noqa: F811
    model = plugged(site)
    distribution(site, "1.2")
    derived = type("Derived", (model,), {"__module__": "vllm.model_executor.models.x"})
    within, quantised = nn.Sequential(nn.Sequential(model())), nn.Linear(1, 1)
    method = {"__module__": model.__module__, "apply": None, "create_weights": None}
    quantised.quant_method = type("Method", (QuantizeMethodBase,), method)()
    for part in (derived, within, quantised):
        assert code_of(config, part) == ["plugged-kit==1.2"]
    of_plugin = {"__module__": model.__module__, "model_type": "mine"}
    config.model_config.hf_config = type("Config", (transformers.PretrainedConfig,), of_plugin)()
    assert code_of(config) == ["plugged-kit==1.2"]


def test_a_function_that_a_plugin_puts_into_a_class_of_vllm_counts(site, config, monkeypatch):  # noqa: F811
    module = sys.modules[plugged(site).__module__]
    distribution(site, "1.2")
    part = object.__new__(SiluAndMul)
    nn.Module.__init__(part)
    assert code_of(config, part) == []
    monkeypatch.setattr(
        SiluAndMul, "forward", FunctionType((lambda self, x: x).__code__, vars(module))
    )
    assert code_of(config, part) == ["plugged-kit==1.2"]


def test_what_vllm_ships_counts_with_vllm_only(config):
    """Fingerprints of ordinary models have nothing in addition."""
    norm = type("Norm", (nn.Module,), {"__module__": "vllm.model_executor.layers.norm"})
    assert code_of(config, nn.Linear(1, 1), norm, GELUActivation) == []
    assert SiluAndMul.__module__.startswith("vllm.")
    assert weights_identity(config, code=model_code(config)) == {"model": ["weights"]}


def test_models_of_transformers_count_with_its_version(config):
    """--model-impl transformers, and towers that vLLM takes from there."""
    made = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        model = transformers.LlamaModel(made)
    assert code_of(config, model) == [f"transformers=={transformers.__version__}"]


@pytest.mark.parametrize("place", ["__main__", "__mp_main__", "no_such_package.models"])
def test_code_that_belongs_to_nothing_is_refused(config, place):
    made_up = type("MadeUp", (nn.Module,), {"__module__": place})
    with pytest.raises(UnknownCodeError, match=f"the code of {place}.MadeUp.*a module of its own"):
        code_of(config, made_up)


def test_the_program_itself_is_no_package_though_it_has_a_file(config, monkeypatch):
    """As with python -m."""
    forget()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", pytest.__spec__)
    with pytest.raises(UnknownCodeError):
        code_of(config, type("MadeUp", (nn.Module,), {"__module__": "__main__"}))


# Where it enters


@pytest.mark.parametrize("load_format", ["auto", "dummy", "ipc_cache"])
def test_vllms_loaders_note_what_a_model_is_made_of(
    granite, model_folder, monkeypatch, load_format
):
    """Those that stream weights, those that fill tensors, and those that do it all themselves."""
    toy, seen, note = Toy(), [], LOADED.note
    write_safetensors(model_folder, tensors())
    monkeypatch.setattr(LOADED, "note", lambda *args: (seen.append(args[2:]), note(*args)))
    loader = None
    if load_format == "ipc_cache":
        ipc = "vllm.model_executor.model_loader.weight_cache.ipc_loader"
        monkeypatch.setattr(f"{ipc}.check_ipc_platform_support", lambda: None)
        loader = IpcModelLoader(granite.load_config)
        monkeypatch.setattr(loader, "_fetch_entries", lambda *_: None)
        monkeypatch.setattr(loader, "_build_model", lambda *_: toy)
    loaded(granite, model_folder, load_format, loader, toy)
    assert seen[-1] == (frozenset({Toy, nn.Module}),)


def test_code_of_every_rank_and_of_the_draft_counts(site, config, monkeypatch):  # noqa: F811
    distribution(site, "1.2")
    draft = copy.deepcopy(config.model_config)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    code_of(config)
    before = weights_identity_of(config, draft, frozenset())
    found = weights_identity_of(config, draft, classes_of(plugged(site)()))
    assert before == {"model": ["weights"], "draft model": ["draft"]}
    assert found == {"model": ["weights"], "draft model": ["draft by plugged-kit==1.2"]}
    on_ranks(monkeypatch, [{label: identity for label, [identity] in before.items()}])
    found = weights_identity_of(config, draft, classes_of(plugged(site)()))
    assert found["draft model"] == ["draft by plugged-kit==1.2", "draft"]


def weights_identity_of(config, draft, classes) -> dict[str, list[str]]:
    LOADED.note(draft, "draft", classes)
    return weights_identity(config, code=model_code(config))


def test_unknown_weights_stay_unknown(config):
    LOADED.note(config.model_config, None)
    with pytest.raises(UnknownWeightsError):
        weights_identity(config, code={"model": ["plugged-kit==1.2"]})


# Code that comes with models

REMOTE = """
from torch import nn
from transformers import PretrainedConfig
from .helper import SCALE
class Config(PretrainedConfig): model_type = "mine"
class Model(nn.Module): ...
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., type]]:
    """Has transformers import code of a folder, or of a repository whose branch is at a commit."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "is_offline_mode", lambda: True)
    monkeypatch.setattr(sys, "path", list(sys.path))  # transformers appends that folder

    def get(place: Path | str, kind: str = "Config", commit: str = "", scale: int = 1) -> type:
        folder, hub = Path(place), tmp_path / "hub"
        if commit:
            repository = hub / f"models--{str(place).replace('/', '--')}"
            folder = repository / "snapshots" / commit
            (repository / "refs").mkdir(parents=True, exist_ok=True)
            (repository / "refs" / "main").write_text(commit)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "helper.py").write_text(f"SCALE = {scale}")
        (folder / "code.py").write_text(REMOTE)
        return dynamic_module_utils.get_class_from_dynamic_module(
            f"code.{kind}", str(place), cache_dir=hub
        )

    yield get
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def configured(config: VllmConfig, code: type, **names) -> VllmConfig:
    """A model whose configuration is of a class."""
    for name, value in names.items():
        setattr(config.model_config, name, value)
    config.model_config.hf_config = code()
    LOADED.note(config.model_config, "weights")
    return config


def test_code_of_another_repository_counts_with_its_commit(config, imported):
    """Whatever --code-revision was; pickled for a rank, a class has its name only."""
    for commit in (ONE, TWO):
        code = imported("other/repo-1", commit=commit)
        del sys.modules[code.__module__]
        for revision in (None, "main"):
            configured(config, code, code_revision=revision)
            assert model_code(config) == {"model": [f"other.repo_hyphen_1@{commit}"]}


def test_a_configuration_within_and_a_model_of_another_repository_count(config, imported):
    config.model_config.hf_config.text_config = imported("other/text", commit=ONE)()
    model = imported("other/model", "Model", TWO)
    assert code_of(config, model) == [f"other.model@{TWO}", f"other.text@{ONE}"]


def test_the_models_own_code_counts_with_its_files_only(config, imported, tmp_path):
    code = imported("org/own", commit=ONE)
    assert model_code(configured(config, code, model="org/own", revision=ONE)) == {}
    assert model_code(configured(config, code, revision=TWO, code_revision=ONE)) == {}
    # Without the Hub vLLM takes the folder in its cache; `auto_map` may name the repository.
    snapshot = tmp_path / "hub" / "models--org--own" / "snapshots" / ONE
    config.model_config.code_revision = None
    for same in (code, imported(snapshot)):
        assert model_code(configured(config, same, model=str(snapshot), revision=None)) == {}
    assert model_code(configured(config, imported("org/own", commit=TWO))) != {}


@pytest.mark.parametrize("name", ["model", "3b-model.v1"])
def test_code_in_the_models_folder_counts_with_its_files_only(config, imported, tmp_path, name):
    code = imported(tmp_path / name)
    assert model_code(configured(config, code, model=f"{tmp_path / name}/")) == {}
    found = []
    for scale in (1, 2, 1):
        code = imported(tmp_path / "elsewhere" / name, scale=scale)
        configured(config, code, hf_config_path=str(tmp_path / "elsewhere" / name))
        found += model_code(config)["model"]
    assert found[0] == found[2] != found[1]
    config.model_config.hf_config_path = None
    other = imported(tmp_path / "other")
    assert model_code(configured(config, other)) == {"model": [found[0]]}


def test_code_of_another_folder_that_auto_map_names_counts(config, imported, tmp_path):
    """Though it has the name of the model's."""
    elsewhere, found = tmp_path / "elsewhere" / "model", []
    for scale in (1, 2):
        configured(config, imported(elsewhere, scale=scale), model=str(tmp_path / "model"))
        config.model_config.hf_config.auto_map = {"AutoConfig": f"{elsewhere}--code.Config"}
        found += model_code(config)["model"]
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["AutoProcessor", "AutoImageProcessor"])
def test_processors_of_another_repository_count_where_there_are_media(
    config, imported, model_folder, tmp_path, monkeypatch, kind
):
    """They run in other processes, with the code that the Hub's cache has for the main branch."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config.model_config.model, config.model_config.trust_remote_code = str(model_folder), True
    places = {kind: "other/repo--code.Config", "AutoTokenizer": ["a/b--code.Config", None]}
    (model_folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": places}))
    (model_folder / "x_config.json").write_text("[]")
    assert code_of(config) == []
    config.model_config.multimodal_config = SimpleNamespace()
    assert code_of(config) == [], "nobody has imported it here"
    for commit in (ONE, TWO):
        imported("other/repo", commit=commit)
        imported("a/b", commit=commit)
        assert code_of(config) == [f"other/repo@{commit}"]
    config.model_config.code_revision = TWO
    assert code_of(config) == []
    config.model_config.code_revision = ONE
    config.model_config.trust_remote_code = False
    assert code_of(config) == []


def test_code_whose_place_cannot_be_read_off_its_name_is_refused(config):
    code = type("Model", (nn.Module,), {"__module__": "transformers_modules.renamed.code"})
    with pytest.raises(UnknownCodeError, match="where .*renamed.code.Model, .* comes from; put"):
        code_of(config, code)
