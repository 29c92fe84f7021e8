# SPDX-License-Identifier: Apache-2.0
"""Files beside the weights, and names of a hub, as part of a model's identity."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.identity.weights import files_identity


def model_of(model: Path | str, revision=None, commit=None, config_path=None) -> SimpleNamespace:
    return SimpleNamespace(
        model=str(model),
        revision=revision,
        hf_config_path=config_path,
        hf_config=SimpleNamespace(_commit_hash=commit),
    )


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
