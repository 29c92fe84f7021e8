# SPDX-License-Identifier: Apache-2.0
"""Files beside the weights, and names of a hub, as part of a model's identity."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.identity.weights import files_identity


def model_of(model: Path | str, revision: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(model=str(model), revision=revision)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without its weights."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    return tmp_path


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


@pytest.mark.parametrize("asked", [None, "v1", SHA])
def test_names_of_a_hub_count_with_the_commit_that_vllm_resolved(asked, tmp_path):
    """What huggingface_hub gives vLLM reads "main" or "v1", here from its cache; to ranks it
    comes pickled."""
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / (asked or "main")).write_text(SHA)
    revision = HfApi(endpoint="http://127.0.0.1:1").resolve_revision(
        "org/name", revision=asked, cache_dir=tmp_path
    )
    assert revision == (asked or "main")
    for each in (revision, pickle.loads(pickle.dumps(revision))):
        assert files_identity(model_of("org/name", each)) == f"org/name@{SHA}"


@pytest.mark.parametrize(
    "model", [model_of("org/name"), model_of("org/name", "main"), model_of("s3://bucket/model")]
)
def test_names_without_a_commit_are_refused(model):
    """Nobody resolved the revision: the Hub was silent, or it is another hub."""
    with pytest.raises(UnknownWeightsError, match="or its cache here could tell, download it and"):
        files_identity(model)
