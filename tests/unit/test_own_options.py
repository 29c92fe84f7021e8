# SPDX-License-Identifier: Apache-2.0
"""This package's options: where a user may write them, and what is said of mistakes."""

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from torch import nn
from vllm.config import KVTransferConfig

from lmcache_hybrid.config.check import checked_options
from lmcache_hybrid.config.lmcache_config import load_lmcache_config
from lmcache_hybrid.config.own_options import (
    CHECKPOINT_KEY,
    KEEP_SHARE_KEY,
    LOAD_LIMIT_KEY,
    MAX_SIZE_KEY,
    OWN_OPTIONS,
    POLICY_KEY,
    SHARE_KEY,
    TRUSTED_OWNER_KEY,
    load_failure_policy,
    read_own_options,
    remarks,
)
from lmcache_hybrid.core.errors import ConfigError
from vllm_patch import loaders

from .helpers import engine_config, vllm_config
from .lmcache_settings import assert_one_sentence, lmcache_config, transfer

# A value of each that is not the default, and what is read of it.
VALUES: dict[str, tuple[Any, Any]] = {
    CHECKPOINT_KEY: (768, 768),
    POLICY_KEY: ("faster", "faster"),
    SHARE_KEY: (False, False),
    "lmcache.hybrid_load_failure_policy": ("fail", "fail"),
    "lmcache.hybrid_key_file": ("/run/key", "/run/key"),
    MAX_SIZE_KEY: (2.5, 2.5),
    "lmcache.hybrid_fs_max_age_hours": (24, 24.0),
    TRUSTED_OWNER_KEY: (1000, 1000),
    KEEP_SHARE_KEY: (0.1, 0.1),
    LOAD_LIMIT_KEY: (4096, 4096),
}


def in_extra(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    extra[key] = value


def in_environment(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    environment[OWN_OPTIONS[key].variable] = str(value)


def in_file(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    file[key.removeprefix("lmcache.")] = value


def in_file_with_prefix(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    file[key] = value


def in_files_extra(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    file.setdefault("extra_config", {})[key.removeprefix("lmcache.")] = value


def in_extra_as_json(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    others = json.loads(environment.get("LMCACHE_EXTRA_CONFIG", "{}"))
    environment["LMCACHE_EXTRA_CONFIG"] = json.dumps({**others, key: value})


def in_extras_extra(key: str, value: Any, extra: dict, file: dict, environment: dict) -> None:
    extra.setdefault("lmcache.extra_config", {})[key] = value


Place = Callable[[str, Any, dict, dict, dict], None]
PLACES: list[Place] = [
    in_extra,
    in_environment,
    in_file,
    in_file_with_prefix,
    in_files_extra,
    in_extra_as_json,
    in_extras_extra,
]


class Written:
    """What a user wrote in each place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._monkeypatch = folder / "lmcache.yaml", monkeypatch
        self.extra: dict[str, Any] = {}
        self._file: dict[str, Any] = {}
        self.environment: dict[str, str] = {}

    def add(self, place: Place, key: str, value: Any) -> None:
        place(key, value, self.extra, self._file, self.environment)
        self._path.write_text(yaml.safe_dump(self._file))
        for name, text in self.environment.items():
            self._monkeypatch.setenv(name, text)
        self._monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(self._path))

    def refusal(self) -> str:
        with pytest.raises(ConfigError) as error:
            load_lmcache_config(vllm_config(transfer(**self.extra)))
        return str(error.value)


def test_an_extra_config_that_loses_another_ones_options_is_refused(written):
    """LMCache reads the nearest alone, and this package's options in each."""
    written.add(in_files_extra, "s3_region", "eu-west-1")
    written.add(in_files_extra, POLICY_KEY, "faster")
    written.add(in_extra_as_json, "use_odirect", False)
    assert written.refusal().endswith(
        "LMCACHE_EXTRA_CONFIG takes the place of extra_config in LMCache's file, and lacks "
        "s3_region; write all of it in one of the two."
    )
    written.add(in_extra_as_json, "s3_region", "us-east-1")
    load_lmcache_config(vllm_config(transfer()))
    written.add(in_extras_extra, "s3_region", "us-east-1")
    assert "lmcache.extra_config takes the place of LMCACHE_EXTRA_CONFIG" in written.refusal()
    written.add(in_extras_extra, "use_odirect", False)  # that is all of it
    load_lmcache_config(vllm_config(transfer(**written.extra)))


@pytest.fixture
def written(no_lmcache_settings, tmp_path, monkeypatch) -> Written:
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    return Written(tmp_path, monkeypatch)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("key", OWN_OPTIONS)
def test_each_option_is_read_from_each_place(written, key, place):
    wrote, read = VALUES[key]
    assert read != OWN_OPTIONS[key].default == read_own_options(written.extra)[key]
    written.add(place, key, wrote)
    assert read_own_options(written.extra)[key] == read


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_lmcache_says_nothing_of_them(written, place, caplog):
    """It would warn of a key that it does not know."""
    theirs = logging.getLogger("lmcache.v1.config_base")
    written.add(place, MAX_SIZE_KEY, 2)
    written.add(in_file, "max_local_cpu_sice", 1)
    theirs.addHandler(caplog.handler)
    try:
        load_lmcache_config(vllm_config(transfer(**written.extra)))
    finally:
        theirs.removeHandler(caplog.handler)
    warned = [record.getMessage() for record in caplog.records if record.name == theirs.name]
    assert [said for said in warned if "max_local_cpu_sice" in said]
    assert not [said for said in warned if "hybrid" in said]


@pytest.mark.parametrize(
    "nearer, farther", zip(PLACES, PLACES[1:]), ids=lambda place: place.__name__
)
def test_the_nearer_place_wins(written, nearer, farther):
    if {nearer, farther} in ({in_file, in_file_with_prefix}, {in_extra_as_json, in_extras_extra}):
        pytest.skip("one place, two spellings")
    if {nearer, farther} == {in_files_extra, in_extra_as_json}:
        nearer, farther = farther, nearer  # the environment wins over the file
    written.add(farther, LOAD_LIMIT_KEY, 1)
    written.add(nearer, LOAD_LIMIT_KEY, 2)
    assert read_own_options(written.extra)[LOAD_LIMIT_KEY] == 2


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize(
    "key, value, told",
    [
        (CHECKPOINT_KEY, "chunks", "is not a whole number; write one, or 'chunk'."),
        (LOAD_LIMIT_KEY, "4k", "is not a whole number; write one."),
        (LOAD_LIMIT_KEY, True, "is not a whole number; write one."),
        (LOAD_LIMIT_KEY, -1, "is not a number of tokens; write one, or 0."),
        (POLICY_KEY, "fast", "is not a policy; write one of ('always', 'faster')."),
        (SHARE_KEY, "maybe", "is neither true nor false; write one of them."),
        (MAX_SIZE_KEY, "2TB", "is not a limit; write a number of GB above 0, or remove it."),
        (
            KEEP_SHARE_KEY,
            0.6,
            "is not a share; write a number from 0, which keeps nothing, to 0.5.",
        ),
        (TRUSTED_OWNER_KEY, "nobody-here", "names no user of this machine; write a user's name"),
        ("lmcache.hybrid_load_failure_policy", "retry", "is not a policy; write one of"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_that_the_user_wrote(written, place, key, value, told):
    written.add(place, key, value)
    message = written.refusal()
    assert_one_sentence(message)
    name, shown = key.removeprefix("lmcache."), repr(value)
    if place is in_environment:
        name, shown = OWN_OPTIONS[key].variable, repr(str(value))
    assert f"{name}={shown} {told}" in message


@pytest.mark.parametrize(
    "place", [p for p in PLACES if p is not in_environment], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("name", ["hybrid_checkpoints", "hybrid_beside_others"])
def test_an_option_that_does_not_exist_is_refused(written, place, name):
    written.add(place, f"lmcache.{name}", True)
    message = written.refusal()
    assert f"{name} is not a setting; the settings are " in message
    assert_one_sentence(message)


def test_a_key_without_its_prefix_is_refused(written):
    written.extra["hybrid_share_prefills"] = False
    assert written.refusal() == (
        "kv_connector_extra_config has hybrid_share_prefills, which nobody reads; write "
        f"{SHARE_KEY}."
    )


@pytest.mark.parametrize(
    "place, key, told",
    [
        ("extra", "LMCACHE_HYBRID_KEY_FILE", "write lmcache.hybrid_key_file."),
        ("extra", "lmcache.hybrid-key-file", "write lmcache.hybrid_key_file."),
        ("extra", "hybrid_keyfile", "write lmcache.hybrid_keyfile."),
        ("extra", "max_tokens_per_load", "write lmcache.max_tokens_per_load."),
        ("file", "HYBRID_KEY_FILE", "LMCache's file has HYBRID_KEY_FILE, which nobody reads"),
        ("file", "hybrid-key-file", "write hybrid_key_file."),
        ("extra_config", "Hybrid_Key_File", "LMCache's extra_config has Hybrid_Key_File"),
        ("extra_config", "lmcache", "LMCache's extra_config has a table 'lmcache'"),
    ],
)
def test_another_spelling_is_refused(written, place, key, told):
    """Else records whose key file is named so would not be sealed."""
    value = {"hybrid_key_file": "/run/key"} if key == "lmcache" else "/run/key"
    if place == "extra":
        written.extra[key] = value
    elif place == "file":
        written.add(in_file, key, value)
    else:
        written.extra["lmcache.extra_config"] = {key: value}
    message = written.refusal()
    assert told in message
    assert_one_sentence(message)


@pytest.mark.parametrize("values", [(384, 768), (384, 384), (None, 384)], ids=str)
@pytest.mark.parametrize("where", ["LMCache's file", "LMCache's extra_config"])
def test_both_spellings_in_one_place_are_refused(written, where, values):
    """One of them would win without a word."""
    both = dict(zip(("hybrid_checkpoint_tokens", CHECKPOINT_KEY), values, strict=True))
    if where == "LMCache's file":
        for name, value in both.items():
            written.add(in_file_with_prefix, name, value)
    else:
        written.extra["lmcache.extra_config"] = both
    told = f"{where} has both hybrid_checkpoint_tokens and {CHECKPOINT_KEY}; remove one of them."
    assert told in written.refusal()


@pytest.mark.parametrize("quotes", ["'{}'", '"{}"', " {} ", "{!r}"])
def test_quotes_around_a_variable_are_left_out_as_lmcache_does(written, monkeypatch, quotes):
    """``docker --env-file`` keeps them."""
    text = json.dumps({"hybrid_load_policy": "faster"})
    shown = quotes.format(text)
    if quotes.startswith('"'):
        shown = json.dumps(text)
    assert read_own_options({}, {"LMCACHE_EXTRA_CONFIG": shown})[POLICY_KEY] == "faster"
    assert read_own_options({}, {"LMCACHE_HYBRID_LOAD_POLICY": quotes.format("faster")}) == {
        **read_own_options({}, {}),
        POLICY_KEY: "faster",
    }


def test_an_extra_config_that_another_one_replaces_is_read_for_our_options(written):
    """LMCache reads the nearest table alone, and records would not be sealed."""
    written.add(in_files_extra, "lmcache.hybrid_key_file", "/run/key")
    written.add(in_extra_as_json, POLICY_KEY, "faster")
    written.extra["lmcache.extra_config"] = {}
    found = read_own_options(written.extra)
    assert (found["lmcache.hybrid_key_file"], found[POLICY_KEY]) == ("/run/key", "faster")


def test_null_is_as_good_as_nothing_but_for_a_key_file(written):
    written.add(in_environment, POLICY_KEY, "faster")
    written.extra[POLICY_KEY] = None
    assert read_own_options(written.extra)[POLICY_KEY] == "faster"
    written.extra["lmcache.hybrid_key_file"] = None
    assert written.refusal() == "lmcache.hybrid_key_file is empty; write a value, or remove it."
    written.extra["lmcache.hybrid_key_file"] = "/run/key"
    written.add(in_files_extra, "lmcache.hybrid_fs_max_size_gb", None)
    assert written.refusal().startswith("extra_config.hybrid_fs_max_size_gb is empty; ")


@pytest.mark.parametrize(
    "key, value, told",
    [
        (MAX_SIZE_KEY, 1e308, "is not a limit"),
        ("lmcache.hybrid_fs_max_age_hours", 1e306, "is not a limit"),
        ("lmcache.hybrid_key_file", "a\0b", "is not a path"),
        (CHECKPOINT_KEY, [10**5000], "=a number of thousands of digits is not a whole number"),
    ],
)
def test_values_that_python_stumbles_over(written, key, value, told):
    written.extra[key] = value
    assert told in written.refusal()


def test_a_file_that_may_not_be_read_is_not_called_malformed(written, monkeypatch):
    written.add(in_file, POLICY_KEY, "faster")

    def closed(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lmcache_hybrid.config.lmcache_file.open", closed, raising=False)
    assert "cannot be read (Permission denied); let the user" in written.refusal()


def test_an_unknown_variable_is_named_and_refuses_nothing(written):
    """Kubernetes makes LMCACHE_HYBRID_SERVICE_HOST for a service of that name."""
    names = {"LMCACHE_HYBRID_LOAD_POLICI": "faster", "LMCACHE_HYBRID_SOME_VALVE": "1"}
    names |= dict.fromkeys(("LMCACHE_HYBRID_SERVICE_HOST", "LMCACHE_HYBRID_PORT_80_TCP"), "10")
    assert read_own_options({}, names)[POLICY_KEY] == "always"
    said = list(remarks({}, {**names, "LMCACHE_HYBRID_REDIS_PASSWORD": "x"}))
    assert said[0].endswith("did you mean LMCACHE_HYBRID_LOAD_POLICY?")
    assert len(said) == 2 and said[1] == "LMCACHE_HYBRID_SOME_VALVE does nothing; unset it."


def test_an_empty_variable_is_not_set(written):
    """As compose files write them: ``${X:-}``."""
    assert read_own_options({}, {"LMCACHE_HYBRID_SHARE_PREFILLS": ""})[SHARE_KEY] is True


def test_a_key_file_that_is_empty_leaves_nothing_unsealed(written):
    key = "lmcache.hybrid_key_file"
    with pytest.raises(ConfigError, match="LMCACHE_HYBRID_KEY_FILE='' is not a path; write one"):
        read_own_options({}, {"LMCACHE_HYBRID_KEY_FILE": ""})
    written.add(in_file, key, None)
    assert written.refusal() == "hybrid_key_file is empty; write a value, or remove it."
    written.add(in_file, key, True)
    assert "hybrid_key_file=True is not a path" in written.refusal()


@pytest.mark.parametrize(
    "key",
    [
        "c2VjcmV0IGtleSBvZiAzMiBieXRlcyBvciBtb3Jl",
        "/c2VjcmV0IGtleQ==",
        "/c2VjcmV0IGtleSBvZiAzMiBieXRlcyBvciBtb3Jl",
        "/c2Vjc/V0IGtleSBvZiAzMiBieXRlcyBvciBtb3Jl",
        "./c2Vjc/V0IGtleSBvZiAzMiBieXRlcyBvciBtb3Jl",
    ],
)
def test_a_key_in_place_of_its_file_is_not_shown(written, key):
    written.extra["lmcache.hybrid_key_file"] = key
    with pytest.raises(ConfigError, match="names no file that can be read") as error:
        checked_options(vllm_config(transfer(**written.extra)))
    assert_one_sentence(str(error.value))
    assert "c2Vjc" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "text, read", [("true", True), ("False", False), ("0", False), ("1", True)]
)
def test_a_switch_of_the_environment_is_a_word(written, text, read):
    assert read_own_options({}, {"LMCACHE_HYBRID_SHARE_PREFILLS": text})[SHARE_KEY] is read


def test_all_mistakes_come_in_one_message(written):
    """LMCache's and ours, in every place, and options that are refused whatever their value."""
    written.add(in_file, "lmcache.max_local_cpu_size", "2Gi")
    written.add(in_file, "lmcache.enable_p2p", True)
    written.add(in_environment, POLICY_KEY, "fast")
    written.add(in_extra, SHARE_KEY, "no way")
    message = written.refusal()
    assert message.count(". ") == 3
    for part in ("max_local_cpu_size='2Gi'", "enable_p2p=True", "LOAD_POLICY='fast'", "'no way'"):
        assert part in message


def test_a_mistake_of_ours_does_not_hide_a_refused_option(written):
    written.add(in_file, "lmcache.enable_p2p", True)
    written.add(in_extra, POLICY_KEY, "fast")
    message = written.refusal()
    assert "enable_p2p=True does not work" in message and "hybrid_load_policy='fast'" in message


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_an_option_does_not_fit_is_told_by_the_name_that_the_user_wrote(written, place):
    """With the other mistakes, in one message: N, the store and the key file are all looked at."""
    values = {
        CHECKPOINT_KEY: 1000,
        LOAD_LIMIT_KEY: 5,
        MAX_SIZE_KEY: 2,
        "lmcache.hybrid_fs_max_age_hours": 3,
        "lmcache.hybrid_key_file": "/usr/no-such-key",
    }
    for key, value in values.items():
        written.add(place, key, value)
    with pytest.raises(ConfigError) as error:
        checked_options(
            vllm_config(transfer(**written.extra)), lmcache_config(enable_p2p=True), 384
        )
    refused, *told = error.value.args
    assert refused.startswith("LMCache option enable_p2p=True")
    assert str(error.value) == " ".join((refused, *told))
    wanted = {f"{_written_as(place, key)}={value!r}" for key, value in values.items()}
    assert {sentence.partition(" ")[0] for sentence in told} == wanted
    for sentence in told:
        assert_one_sentence(sentence)


def _written_as(place: Place, key: str) -> str:
    """What messages call an option, by the place where it stands."""
    if place is in_environment:
        return OWN_OPTIONS[key].variable
    inside = place in (in_files_extra, in_extra_as_json, in_extras_extra)
    name = key.removeprefix("lmcache.") if place in (in_file, in_files_extra) else key
    return f"extra_config.{name}" if inside else name


def test_a_bad_value_does_not_hide_an_unusable_key_file(written):
    written.add(in_file, "lmcache.max_local_cpu_size", "2Gi")
    written.add(in_file, "lmcache.hybrid_key_file", "/usr/no-such-key")
    message = written.refusal()
    assert "max_local_cpu_size='2Gi' is not" in message
    assert " hybrid_key_file='/usr/no-such-key' cannot be read" in message


def test_a_malformed_value_hides_no_other_mistake(written, tmp_path):
    """Not what is found only in the values of all options together."""
    written.add(in_file, "lmcache.max_local_cpu_size", "2Gi")
    written.add(in_file, "lmcache.local_disk", str(tmp_path / "disk"))  # and no size
    written.add(in_file, "lmcache.cache_policy", "best")
    written.add(in_environment, POLICY_KEY, "fast")
    written.add(in_extra, MAX_SIZE_KEY, 5)  # and no fs://
    told = told_of_all(written)
    assert [sentence.split("=")[0] for sentence in told] == [
        "max_local_cpu_size",
        "LMCACHE_HYBRID_LOAD_POLICY",
        "LMCache option max_local_disk_size",
        "LMCache option cache_policy",
        MAX_SIZE_KEY,
    ]
    for sentence in told:
        assert_one_sentence(sentence)


def told_of_all(written: Written) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        checked_options(vllm_config(transfer(**written.extra)))
    assert len(set(error.value.args)) == len(error.value.args)
    return error.value.args


@pytest.mark.parametrize(
    "add, key, value",
    [
        (in_file, "lmcache.max_local_disk_size", "10GB"),
        (in_extra, "max_local_disk_size", 10),  # without its prefix
    ],
    ids=["malformed", "without prefix"],
)
def test_the_default_in_place_of_a_mistake_is_not_blamed(written, tmp_path, add, key, value):
    """It would turn local_disk off."""
    written.add(in_file, "lmcache.local_disk", str(tmp_path / "disk"))
    written.add(add, key, value)
    (told,) = told_of_all(written)
    assert "max_local_disk_size" in told and "turns local_disk off" not in told


def test_a_store_that_cannot_be_read_is_not_one_that_is_missing(written):
    written.add(in_file, "lmcache.local_disk", "$HOME/disk")
    written.add(in_file, "lmcache.store_location", "LocalDiskBackend")
    (told,) = told_of_all(written)
    assert told.startswith("local_disk is taken as it is written")


def test_the_failure_policy_is_known_before_lmcache_is_imported(written):
    assert load_failure_policy({}) == "recompute"
    written.add(in_file, "lmcache.hybrid_load_failure_policy", "fail")
    assert load_failure_policy({}) == "fail"
    written.add(in_extra, "lmcache.hybrid_load_failure_policy", "retry")
    assert load_failure_policy(written.extra) == "recompute"  # refused with all others


# Before the weights are loaded


def test_options_are_checked_before_the_weights_are_loaded(written):
    """A model of 80 billion parameters is minutes of loading."""
    written.add(in_file, "lmcache.remote_serde", "cachegen")
    written.add(in_extra, MAX_SIZE_KEY, 5)  # without fs://, which shows only in the end
    config = vllm_config(transfer(**written.extra))
    with pytest.raises(ConfigError, match="remote_serde='cachegen' does.* limits folders of fs://"):
        checked_options(config)


def test_the_check_before_the_weights_leaves_warnings_to_the_connector(
    written, hybrid_log, monkeypatch
):
    written.add(in_file, "lmcache.remote_url", "redis://host:1")
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "")
    checked_options(vllm_config(transfer()))
    assert "LMCACHE_REMOTE_URL is empty" not in hybrid_log.text
    load_lmcache_config(vllm_config(transfer()))
    assert hybrid_log.text.count("LMCACHE_REMOTE_URL is empty") == 1


@pytest.mark.parametrize(
    "name, off, checked",
    [
        ("LMCacheConnectorV1", False, True),
        ("LMCacheConnectorV1", True, False),
        ("MultiConnector", False, True),
    ],
)
def test_who_is_served_is_checked_by_the_loader(written, monkeypatch, name, off, checked):
    """Not a dense model, which LMCache's own adapter serves."""
    monkeypatch.setattr(
        "lmcache_hybrid.config.check.checked_options", lambda config: asked.append(config)
    )
    asked: list[Any] = []
    children = [
        {"kv_connector": each, "kv_role": "kv_both"}
        for each in ("OffloadingConnector", "LMCacheConnectorV1")
    ]
    extra = {"connectors": children} if name == "MultiConnector" else {}
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=off),
        model_config=object(),
    )

    class Loader:
        def load_weights(self) -> None: ...

    def load(**kwargs: Any) -> object:
        return model

    loader, model = Loader(), nn.Module()
    monkeypatch.setattr(loaders, "_count_reloads", lambda: None)
    monkeypatch.setattr(loaders.LOADED, "note", lambda *args: None)
    monkeypatch.setattr(loaders.LOADED, "of", lambda config: 1)
    assert model is loaders._load_model(loader, load, config, config.model_config)
    loaders._load_model(loader, load, config, object())  # a drafter
    read = [each.kv_transfer_config for each in asked]
    assert [each.kv_connector for each in read] == ["LMCacheConnectorV1"] * checked
    assert config.kv_transfer_config.kv_connector == name


def test_options_beside_other_connectors_are_checked_before_the_weights(written):
    """Of our connector alone."""
    ours = {"lmcache.max_local_cpu_size": "2Gi", CHECKPOINT_KEY: "often"}
    config = engine_config(
        "qwen3_next",
        {
            "connectors": [
                {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                {
                    "kv_connector": "LMCacheConnectorV1",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": ours,
                },
            ]
        },
        connector="MultiConnector",
    )
    with pytest.raises(ConfigError) as error:
        loaders._check_settings(config)
    assert "max_local_cpu_size='2Gi' is not a number" in str(error.value)
    assert "hybrid_checkpoint_tokens='often' is not a whole number" in str(error.value)
