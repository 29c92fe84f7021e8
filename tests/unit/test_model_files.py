# SPDX-License-Identifier: Apache-2.0
"""Files beside the weights, and names of a hub, as part of a model's identity."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from lmcache_hybrid.core.errors import UnknownWeightsError
from lmcache_hybrid.identity.model_files import files_identity
from lmcache_hybrid.storage.key_names import readable_name


def model_of(model: Path | str, revision: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(model=str(model), revision=revision, code_revision=None)


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


def test_a_file_that_cannot_be_read_is_named(folder):
    """The engine then starts with LMCache off, see tests/unit/test_collectives.py."""
    (folder / "modeling_x.py").symlink_to("/proc/self/mem")  # reading its first byte is an EIO
    with pytest.raises(UnknownWeightsError) as error:
        files_identity(model_of(folder))
    assert str(error.value).startswith(
        f"{folder}/modeling_x.py cannot be read (Input/output error)"
    )


@pytest.mark.parametrize("name", ["code/modeling_x.py", "code/deep/__init__.py"])
def test_code_in_subfolders_matters(folder, name):
    """The model's own code imports from there."""
    before = files_identity(model_of(folder))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("SCALE = 1")
    first = files_identity(model_of(folder))
    (folder / name).write_text("SCALE = 2")
    assert len({before, first, files_identity(model_of(folder))}) == 3
    (folder / name).write_text("SCALE = 1")
    (folder / "code").rename(folder / "codes")
    assert files_identity(model_of(folder)) != first, "what it is imported as is another"


def test_code_behind_a_link_matters_and_links_may_lead_in_circles(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (folder / "code").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    found = {files_identity(model_of(folder))}
    for content in ("SCALE = 1", "SCALE = 2"):
        (elsewhere / "modeling_x.py").write_text(content)
        found.add(files_identity(model_of(folder)))
    assert len(found) == 3


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


def cached(folder: Path, contents: dict[str, bytes], large: tuple[str, ...] = ()) -> Path:
    """A model in the Hub's cache with the Hub's list; of ``large`` files it tells the SHA-256."""
    root = folder / "models--org--name"
    snapshot, files = root / "snapshots" / SHA, {}
    snapshot.mkdir(parents=True)
    for name, content in contents.items():
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).write_bytes(content)
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)
        digest = (hashlib.sha256(content) if name in large else git).hexdigest()
        files[name] = {"size": len(content), "blob_id": digest}
    (root / "trees").mkdir()
    (root / "trees" / f"{SHA}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    return snapshot


FILES = {"config.json": b"{}", "modeling_x.py": b"pass", "tokenizer.json": b"{}"}
COUNTED = sorted(FILES)[:2]


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of org/name at SHA, in this process' own cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return cached(tmp_path, FILES, large=("modeling_x.py",))


def test_its_folder_in_the_hubs_cache_is_the_name_at_its_commit(snapshot, tmp_path):
    """vLLM takes it with HF_HUB_OFFLINE=1, and the name without."""
    (tmp_path / "link").symlink_to(snapshot)
    for model in (snapshot, tmp_path / "link"):
        assert files_identity(model_of(model)) == f"org/name@{SHA}"
        assert readable_name(str(model)) == "name" == readable_name("org/name")
    assert files_identity(model_of("org/name", SHA)) == f"org/name@{SHA}"


@pytest.mark.parametrize("name", [*COUNTED, "modeling_y.py"])
def test_a_file_that_was_changed_or_added_in_the_hubs_cache_makes_it_another_model(snapshot, name):
    (snapshot / name).write_bytes(b"{ }")
    changed = files_identity(model_of(snapshot))
    assert "@" not in changed
    assert files_identity(model_of("org/name", SHA)) == changed


def test_a_file_of_another_commit_in_its_place_makes_it_another_model(snapshot):
    """By its own name in the cache it is as it was downloaded."""
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("modeling_x.py")
    assert "@" not in files_identity(model_of(snapshot))
    assert "@" not in files_identity(model_of("org/name", SHA))


@pytest.mark.parametrize("name", COUNTED)
def test_a_folder_that_lacks_a_file_is_not_the_name(snapshot, name):
    """A default takes the place of a missing one there, and the name gets it from the Hub."""
    (snapshot / name).unlink()
    assert "@" not in files_identity(model_of(snapshot))
    assert files_identity(model_of("org/name", SHA)) == f"org/name@{SHA}"


def test_without_the_hubs_list_only_the_name_counts(snapshot):
    """An older huggingface_hub has written the cache."""
    shutil.rmtree(snapshot.parents[1] / "trees")
    assert files_identity(model_of("org/name", SHA)) == f"org/name@{SHA}"
    assert "@" not in files_identity(model_of(snapshot))


def test_code_in_a_subfolder_of_the_hubs_cache_is_as_the_hub_listed_it(tmp_path, monkeypatch):
    """Examples that nobody downloaded may be missing; what is there must not be changed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = cached(tmp_path, {**FILES, "code/layers.py": b"SCALE = 1", "examples/run.py": b""})
    (root / "examples" / "run.py").unlink()
    assert files_identity(model_of(root)) == f"org/name@{SHA}"
    (root / "code" / "layers.py").write_bytes(b"SCALE = 2")
    for model in (model_of(root), model_of("org/name", SHA)):
        assert "@" not in files_identity(model)


def test_code_of_a_moving_branch_is_refused():
    model = model_of("org/name", SHA)
    model.code_revision = "main"
    with pytest.raises(UnknownWeightsError, match="code_revision='main' may move"):
        files_identity(model)


def test_a_folder_that_a_snapshot_holds_is_none(snapshot):
    """As of a model in a subfolder, which vLLM takes by its path alone."""
    below = snapshot / "below"
    below.mkdir()
    (below / "config.json").write_bytes(b"{}")
    assert "@" not in files_identity(model_of(below))
    assert readable_name(str(below)) == "below"


def test_a_name_that_is_no_path_is_readable(tmp_path):
    (tmp_path / "round").symlink_to("round")
    assert readable_name(str(tmp_path / "round")) == "round"
    assert readable_name("a\0b") == "a\0b"
