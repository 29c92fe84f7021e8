# SPDX-License-Identifier: Apache-2.0
"""A value that LMCache would read as another one ends the start with a sentence."""

import errno
import json
import os
import re
import traceback
from types import SimpleNamespace

import psutil
import pytest
import yaml
from lmcache.integration.vllm import utils as lmcache_utils
from lmcache.v1.config import _CONFIG_DEFINITIONS, LMCacheEngineConfig

from lmcache_hybrid.config import lmcache_config as lmcache_config_module
from lmcache_hybrid.config.check import checked_options
from lmcache_hybrid.config.lmcache_config import load_lmcache_config, settle_lmcache_config
from lmcache_hybrid.config.lmcache_file import options_in_file
from lmcache_hybrid.config.lmcache_values import misspelt, read_values
from lmcache_hybrid.config.no_hits import with_few_hits, without_hits
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.scheduler_side import _warn

from .helpers import OPTIONS, PLAN, vllm_config
from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, refusal, transfer


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch):
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


def load(monkeypatch, where: str, tmp_path, option: str, value) -> LMCacheEngineConfig:
    """Read LMCache's configuration with this value in a file, the environment or extra config."""
    extra = {}
    if where == "file":
        file = tmp_path / "lmcache.yaml"
        file.write_text(yaml.safe_dump({option: value}))
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    elif where == "extra":
        extra = {f"lmcache.{option}": value}
    else:
        monkeypatch.setenv(f"LMCACHE_{option.upper()}", "" if value is None else str(value))
    return load_lmcache_config(vllm_config(transfer(**extra)))


WRONG = [
    ("max_local_cpu_size", "2Gi", "is not a number of gigabytes (2^30 bytes); write 2."),
    ("max_local_disk_size", "10GB", "is not a number of gigabytes (2^30 bytes); write 9.313."),
    ("max_local_cpu_size", "512 MiB", "write 0.5."),
    ("max_local_cpu_size", "much", "is not a number of gigabytes (2^30 bytes); write one"),
    ("max_local_cpu_size", float("nan"), "is not a number"),
    ("chunk_size", "256k", "is not a number; write 262144."),
    ("chunk_size", 256.5, "is not a whole number; write one."),
    ("min_retrieve_tokens", "some", "is not a number; write one"),
    ("chunk_size", "256.0", "is not a whole number; write 256."),
    ("min_retrieve_tokens", "1e3", "is not a whole number; write 1000."),
    ("local_cpu", "yes", "counts as false in LMCache; write true or false."),
    ("local_cpu", "", "is empty; "),
    ("save_decode_cache", 2, "counts as false in LMCache"),
    ("max_local_disk_size", float("inf"), "is not a number of gigabytes"),
    ("chunk_size", None, "is empty; "),
    ("local_cpu", None, "is empty; "),
]


@pytest.mark.parametrize("where", ["file", "environment", "extra"])
@pytest.mark.parametrize("option, value, told", WRONG, ids=str)
def test_a_value_that_is_none_of_its_option(monkeypatch, tmp_path, where, option, value, told):
    with pytest.raises(ConfigError) as error:
        load(monkeypatch, where, tmp_path, option, value)
    message = str(error.value)
    name = {"environment": f"LMCACHE_{option.upper()}", "extra": f"lmcache.{option}"}
    assert message.startswith(name.get(where, option)) and told in message
    assert_one_sentence(message)


@pytest.mark.parametrize("where", ["file", "environment", "extra"])
@pytest.mark.parametrize(
    "option, value, read",
    [
        ("max_local_cpu_size", 2, 2.0),
        ("max_local_cpu_size", "2.5", 2.5),
        ("chunk_size", "768", 768),
        ("local_cpu", "FALSE", False),
        ("local_cpu", 1, True),
        ("save_decode_cache", "true", True),
        ("cache_policy", "lfu", "lfu"),
        ("save_decode_cache", "no", False),
        ("enable_blending", "off", False),
        ("priority_limit", "7", 7),
    ],
)
def test_a_value_of_its_option_is_read(monkeypatch, tmp_path, where, option, value, read):
    assert getattr(load(monkeypatch, where, tmp_path, option, value), option) == read


@pytest.mark.parametrize("where", ["file", "extra"])
@pytest.mark.parametrize("option", ["save_decode_cache", "priority_limit", "max_local_disk_size"])
def test_nothing_is_as_good_as_the_default_where_that_is_none(monkeypatch, tmp_path, where, option):
    assert not getattr(load(monkeypatch, where, tmp_path, option, None), option)


@pytest.mark.parametrize("where", ["file", "extra"])
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_not_a_folder(monkeypatch, tmp_path, where, value):
    with pytest.raises(ConfigError, match=f"local_disk={value} is not a folder; write its path"):
        load(monkeypatch, where, tmp_path, "local_disk", value)


EMPTY = ["extra_config", "local_disk", "remote_url", "save_decode_cache", "priority_limit"]


@pytest.mark.parametrize("option", EMPTY)
def test_an_empty_variable_by_which_nothing_changes_is_no_mistake(monkeypatch, tmp_path, option):
    """As compose files write them: ``${X:-}``."""
    assert not getattr(load(monkeypatch, "environment", tmp_path, option, ""), option)


@pytest.mark.parametrize("where", ["environment", "file", "extra"])
@pytest.mark.parametrize("option", ["remote_url", "gds_path"])
def test_an_empty_text_is_none(monkeypatch, tmp_path, where, option):
    """LMCache opens an empty URL, cannot, and then is off without a word."""
    assert getattr(load(monkeypatch, where, tmp_path, option, ""), option) is None


@pytest.mark.parametrize(
    "option, value, told",
    [
        ("max_local_cpu_size", 20, ""),
        ("priority_limit", 3, ""),
        ("local_cpu", False, ""),
        ("local_cpu", True, "LMCACHE_LOCAL_CPU is empty; "),
        ("save_decode_cache", True, "LMCACHE_SAVE_DECODE_CACHE is empty; "),
    ],
)
def test_an_empty_variable_beside_a_file(monkeypatch, tmp_path, option, value, told):
    """LMCache keeps the file's number, and takes a switch for off."""
    monkeypatch.setenv(f"LMCACHE_{option.upper()}", "")
    if told:
        with pytest.raises(ConfigError, match=told):
            load(monkeypatch, "file", tmp_path, option, value)
    else:
        assert getattr(load(monkeypatch, "file", tmp_path, option, value), option) == value


@pytest.mark.parametrize("text", ['{"a": 1}', '"{\\"a\\": 1}"', "'{\"a\": 1}'"])
def test_a_quoted_variable_is_read_as_lmcache_reads_it(monkeypatch, tmp_path, text):
    assert load(monkeypatch, "environment", tmp_path, "extra_config", text).extra_config == {"a": 1}


def test_old_names_that_lmcache_ignores_are_nobodys_mistake(monkeypatch, tmp_path):
    load(monkeypatch, "file", tmp_path, "lmcache_worker_port", "8788-8790")


def test_old_names_that_lmcache_knows_are_read(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="option storage_plugins="):
        settle_lmcache_config(load(monkeypatch, "file", tmp_path, "external_backends", "a"), BLOCK)


@pytest.mark.parametrize("line", ["redis_password: !Passw0rd", "redis_password: *Passw0rd"])
def test_a_password_that_is_no_yaml_is_not_shown(monkeypatch, tmp_path, line):
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"extra_config:\n  {line}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match="as YAML at line 2, column ") as error:
        load_lmcache_config(vllm_config(transfer()))
    assert "Passw0rd" not in "".join(traceback.format_exception(error.value))


def test_a_value_that_may_hold_a_password_is_not_shown(monkeypatch, tmp_path):
    with pytest.raises(ConfigError) as error:
        load(monkeypatch, "environment", tmp_path, "extra_config", '{"redis_password": "secret"')
    assert "secret" not in str(error.value)
    assert str(error.value).startswith("LMCACHE_EXTRA_CONFIG is no table; write JSON")


def test_all_defaults_written_out_are_taken(monkeypatch, tmp_path):
    """As in a file that somebody made of LMCache's own list."""
    file = tmp_path / "lmcache.yaml"
    written = {name: each["default"] for name, each in _CONFIG_DEFINITIONS.items()}
    file.write_text(json.dumps(written))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert load_lmcache_config(vllm_config(transfer())).chunk_size == 256


def test_the_environment_wins_over_the_file(monkeypatch, tmp_path):
    """So a value of the file that nobody reads is nobody's mistake."""
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "768")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "'true'")
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 512\nlocal_cpu: false\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    read = read_values(str(file), os.environ)
    assert read == {
        "chunk_size": ("LMCACHE_CHUNK_SIZE", "768"),
        "local_cpu": ("LMCACHE_LOCAL_CPU", "true"),
    }
    config = load_lmcache_config(vllm_config(transfer()))
    assert (config.chunk_size, config.local_cpu) == (768, True)


def test_all_wrong_values_come_in_one_message(monkeypatch):
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256k")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "on")
    extra = transfer(**{"lmcache.max_local_cpu_size": "2Gi"})
    with pytest.raises(ConfigError) as error:
        load_lmcache_config(vllm_config(extra))
    assert [part.split("=")[0] for part in str(error.value).split(". ")] == [
        "LMCACHE_CHUNK_SIZE",
        "LMCACHE_LOCAL_CPU",
        "lmcache.max_local_cpu_size",
    ]


def test_all_refused_options_come_in_one_message():
    message = refusal(enable_blending=True, save_unfull_chunk=True, max_local_cpu_size=0)
    for name in ("enable_blending", "save_unfull_chunk", "max_local_cpu_size"):
        assert f"LMCache option {name}=" in message


@pytest.mark.parametrize("option", ["enable_p2p", "enable_pd", "enable_controller"])
def test_what_is_refused_need_not_be_complete(monkeypatch, tmp_path, option):
    """LMCache asserts that others are set beside it, without a word."""
    with pytest.raises(ConfigError, match=f"LMCache option {option}=True does not work on a"):
        load(monkeypatch, "file", tmp_path, option, True)


PD = {"enable_pd": True, "pd_role": "sender", "pd_buffer_size": 1, "pd_buffer_device": "cpu"}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"enable_blending": True}, ["enable_blending"]),
        ({"enable_blending": True, "save_unfull_chunk": False}, ["enable_blending"]),
        (PD, ["enable_pd"]),
        (
            {"enable_blending": True, "save_unfull_chunk": True},
            ["enable_blending", "save_unfull_chunk"],
        ),
    ],
    ids=str,
)
def test_what_lmcache_sets_itself_is_nobodys_mistake(monkeypatch, tmp_path, settings, named):
    """Beside these it sets save_unfull_chunk."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError) as error:
        settle_lmcache_config(load_lmcache_config(vllm_config(transfer())), BLOCK)
    assert re.findall(r"LMCache option (\w+)=True does not work", str(error.value)) == named


@pytest.mark.parametrize("text", ["a: [", "- a\n- b", "just words"])
def test_a_file_without_options_is_named(monkeypatch, tmp_path, text):
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match=f"^{file} "):
        load_lmcache_config(vllm_config(transfer()))


def test_a_second_model_in_a_process_gets_settings_of_its_own():
    """LMCache has one configuration for a process, which settling changes."""
    first = load_lmcache_config(vllm_config(transfer(**{"lmcache.max_local_cpu_size": 1})))
    settle_lmcache_config(first, BLOCK)
    second = load_lmcache_config(vllm_config(transfer()))
    assert (first.chunk_size, first.max_local_cpu_size) == (BLOCK, 1)
    assert (second.chunk_size, second.max_local_cpu_size) == (256, 5)
    settle_lmcache_config(second, 3 * BLOCK // 2)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"remote_serde": None, "remote_url": "redis://h:1"}, "remote_serde=None opens no remote"),
        ({"cache_policy": "arc"}, "cache_policy='arc' is none of LRU, "),
        ({"store_location": "disk"}, "store_location='disk' names no backend that keeps records"),
        ({"store_location": "RemoteBackend"}, "use LocalCPUBackend, or remove it."),
        ({"retrieve_locations": ["y", "x"]}, "retrieve_locations=['y', 'x'] names no backend"),
    ],
    ids=str,
)
def test_a_store_that_can_never_open_or_be_read_is_refused(settings, told):
    message = refusal(**settings)
    assert told in message
    assert_one_sentence(message)


def test_a_location_that_is_not_there_does_no_harm_beside_others():
    """It is not asked."""
    for settings in ({}, {"local_cpu": False, "remote_url": "redis://h:1"}):
        locations = ["LocalCPUBackend", "RemoteBackend"]
        settle_lmcache_config(lmcache_config(retrieve_locations=locations, **settings), BLOCK)


@pytest.mark.parametrize(
    "settings, longest, finer, environment, told",
    [
        ({}, 4096, 64, None, []),
        ({}, 386, 64, None, []),
        ({}, 385, 64, None, ["so none ever does; add --prefix-match-unit 64, or raise"]),
        ({}, 384, 0, None, ["so none ever does; raise --max-model-len."]),
        ({}, 4096, 64, "0", ["LMCACHE_FORCE_SKIP_SAVE=0 lets this engine store nothing"]),
        ({"local_cpu": False}, 4096, 64, None, ["are all off, so nothing is kept; set local_cpu"]),
        ({"local_cpu": False, "remote_url": "redis://h:1"}, 4096, 64, None, []),
        (
            {"min_retrieve_tokens": 3841},
            4096,
            64,
            None,
            ["is above 3840, the longest hit of"],
        ),
        ({"min_retrieve_tokens": 3840, "priority_limit": 0}, 4096, 64, None, []),
        ({"priority_limit": -1}, 4096, 64, None, []),
    ],
    ids=str,
)
def test_settings_for_which_nothing_ever_hits(
    monkeypatch, settings, longest, finer, environment, told
):
    if environment is not None:
        monkeypatch.setenv("LMCACHE_FORCE_SKIP_SAVE", environment)
    said = list(without_hits(lmcache_config(**settings), "kv_both", longest, BLOCK, finer))
    assert len(said) == len(told)
    for sentence, part in zip(said, told, strict=True):
        assert part in sentence
        assert_one_sentence(sentence)


def test_a_prompt_to_pool_may_be_a_token_longer():
    config = lmcache_config()
    assert not list(without_hits(config, "kv_both", BLOCK + 1, BLOCK, 0, generates=False))
    assert list(without_hits(config, "kv_both", BLOCK, BLOCK, 0, generates=False))


def warned_of(hybrid_log, **settings) -> list[str]:
    """What an engine with these options of LMCache warns of at start."""
    config = SimpleNamespace(
        kv_transfer_config=transfer(),
        kv_events_config=None,
        model_config=SimpleNamespace(max_model_len=4096, runner_type="generate"),
        parallel_config=SimpleNamespace(
            local_world_size=1, use_ray=False, data_parallel_size_local=1, numa_bind=False
        ),
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0)),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=1 << 30),
    )
    config.aux_output_config = SimpleNamespace(enabled=False)
    _warn(config, PLAN, lmcache_config(**settings), OPTIONS)
    return [each.message for each in hybrid_log.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("limit, said", [(None, False), (0, False), (-1, True)])
def test_a_priority_limit_with_few_hits_is_not_called_one_without(hybrid_log, limit, said):
    """Requests that name a priority at or below it are stored."""
    warned = warned_of(hybrid_log, priority_limit=limit)
    assert len(warned) == said
    for sentence in warned:
        assert sentence.startswith("priority_limit=-1 is below 0, ")
        assert "so only requests that name -1 or less are stored; set it to 0" in sentence
        assert_one_sentence(sentence)


@pytest.mark.parametrize("disk, said", [(None, True), ("/srv", False)])
def test_a_size_of_a_disk_that_is_not_named_is_told(disk, said):
    told = list(with_few_hits(lmcache_config(max_local_disk_size=5.0, local_disk=disk)))
    assert len(told) == said
    for sentence in told:
        assert sentence.startswith("max_local_disk_size=5.0 does nothing without local_disk")
        assert_one_sentence(sentence)
    assert not list(with_few_hits(lmcache_config()))


@pytest.mark.parametrize("disk, said", [("cache", 1), ("/srv/a, b", 1), ("/srv", 0), (None, 0)])
def test_a_relative_folder_is_told(hybrid_log, monkeypatch, tmp_path, disk, said):
    monkeypatch.chdir(tmp_path)
    warned = warned_of(hybrid_log, local_disk=disk)
    assert len(warned) == said
    for sentence in warned:
        assert f"is relative, so an engine that starts in {tmp_path} keeps its records" in sentence
        assert sentence.endswith("; write the whole path.")
        assert_one_sentence(sentence)


@pytest.mark.parametrize("name", ["use_odirect", "fs_connector_use_odirect"])
def test_an_option_of_files_that_nothing_reads_is_told(name):
    (told,) = with_few_hits(lmcache_config(extra_config={name: True}))
    assert told.startswith(f"extra_config.{name}=True does nothing: ")
    assert_one_sentence(told)
    assert not list(with_few_hits(lmcache_config(extra_config={name: False})))


@pytest.mark.parametrize("option", ["blocking_timeout_secs", "pin_timeout_sec"])
def test_a_time_with_a_unit_gets_no_number_of_bytes(monkeypatch, tmp_path, option):
    with pytest.raises(ConfigError, match=f"{option}='1m' is not a number; write one, or remove"):
        load(monkeypatch, "file", tmp_path, option, "1m")


def test_another_size_in_gb_gets_its_number(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"2\^30 bytes\); write 2\."):
        load(monkeypatch, "file", tmp_path, "lazy_memory_safe_size", "2Gi")


def test_a_value_that_another_place_overrides_is_nobodys_mistake(monkeypatch):
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "yes")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2Gi")
    extra = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 2}
    config = load_lmcache_config(vllm_config(transfer(**extra)))
    assert (config.local_cpu, config.max_local_cpu_size) == (True, 2)


@pytest.mark.parametrize("option", ["max_local_disk_size", "reserve_local_cpu_size", "mp_port"])
def test_an_empty_number_is_the_default_where_that_does_no_harm(monkeypatch, tmp_path, option):
    config = load(monkeypatch, "environment", tmp_path, option, "")
    assert getattr(config, option) == LMCacheEngineConfig.from_defaults().__dict__[option]


@pytest.mark.parametrize("value", ["none", "null", "disabled", "0.0", "'false'"])
def test_what_means_off_is_off(monkeypatch, tmp_path, value):
    assert load(monkeypatch, "file", tmp_path, "local_cpu", value).local_cpu is False


@pytest.mark.parametrize("option", ["cache_policy", "local_disk_path_sharding"])
def test_an_empty_text_is_the_default(monkeypatch, tmp_path, option):
    default = LMCacheEngineConfig.from_defaults().__dict__[option]
    assert default and getattr(load(monkeypatch, "file", tmp_path, option, ""), option) == default


@pytest.mark.parametrize("text", ["[1]", "5", '"5"', "true"])
def test_extra_config_is_a_table(monkeypatch, tmp_path, text):
    with pytest.raises(ConfigError, match="EXTRA_CONFIG is no table; write JSON there, such as"):
        load(monkeypatch, "environment", tmp_path, "extra_config", text)


def test_a_negative_length_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="TOKENS='-1' is negative; write 0 or more"):
        load(monkeypatch, "environment", tmp_path, "min_retrieve_tokens", -1)


def test_where_lmcache_fails_on_a_value_it_is_one_sentence(monkeypatch, tmp_path):
    """Of the file, which the environment overrides; LMCache converts it all the same."""
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "384")
    with pytest.raises(ConfigError, match=r"LMCache fails on its configuration \(TypeError\)"):
        load(monkeypatch, "file", tmp_path, "chunk_size", [384])


def test_a_file_that_is_too_deep_is_one_sentence(monkeypatch, tmp_path):
    file = tmp_path / "lmcache.yaml"
    file.write_text("a: " + "[" * 3000 + "]" * 3000)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read as YAML; correct it"):
        load_lmcache_config(vllm_config(transfer()))


@pytest.mark.parametrize(
    "text, told",
    [
        ("local_cpu: true\n\nlocal_cpu: false\n", ["local_cpu in the lines 1 and 3; keep one"]),
        ("a: 1\nb: 1\na: 1\nb: 1\n", ["a in the lines 1 and 3", "b in the lines 2 and 4"]),
        ("extra_config:\n  a: 1\n  a: 2\n", ["a in the lines 2 and 3"]),
        ("a: {x: 1}\nb: {x: 1}\n", []),
        ("a: &a {x: 1}\nb: &b {y: 1}\nc:\n  <<: *a\n  <<: *b\n", []),
        ("a: {1: x, '1': y}\n", []),
    ],
)
def test_an_option_that_is_twice_in_a_file_is_refused(tmp_path, text, told):
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    if not told:
        options_in_file(str(file))
        return
    with pytest.raises(ConfigError) as error:
        options_in_file(str(file))
    assert len(error.value.args) == len(told)
    for sentence, each in zip(error.value.args, told):
        assert sentence.startswith(f"{file} has {each}")
        assert_one_sentence(sentence)


def test_what_lmcache_wants_more_for_is_refused_by_name(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="extra_config.enable_nixl_storage=True does not work"):
        load(monkeypatch, "file", tmp_path, "extra_config", {"enable_nixl_storage": True})


@pytest.mark.parametrize("value", [["/srv/a"], "false", "True"])
def test_a_folder_is_a_path(monkeypatch, tmp_path, value):
    with pytest.raises(ConfigError, match="is not a folder; write its path"):
        load(monkeypatch, "file", tmp_path, "local_disk", value)


def test_an_empty_variable_that_takes_a_store_away_is_said(monkeypatch, tmp_path, hybrid_log):
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "")
    assert (
        load(monkeypatch, "file", tmp_path, "remote_url", "redis://:s3cr3t@h:1").remote_url is None
    )
    assert "LMCACHE_REMOTE_URL is empty, and takes remote_url out of " in hybrid_log.text
    assert "s3cr3t" not in hybrid_log.text


@pytest.mark.parametrize(
    "option, value",
    [
        ("store_location", "redis://:s3cr3t@h:1"),
        ("remote_storage_plugins", ["redis://:s3cr3t@h:1"]),
        ("external_lookup_client", "mooncakestore://u:s3cr3t@h:1"),
        ("remote_url", "fs://u:s3cr3t@h/p"),
    ],
)
def test_a_password_in_the_wrong_place_is_not_shown(option, value):
    message = refusal(**{option: value})
    assert f"LMCache option {option}=" in message and "h" in message and "s3cr3t" not in message


def test_what_is_refused_is_not_what_to_write():
    config = lmcache_config(local_cpu=False, store_location="LocalCPUBackend")
    with pytest.raises(ConfigError, match="keeps records here; remove it"):
        settle_lmcache_config(config, BLOCK)


def test_what_is_stored_is_read():
    config = lmcache_config(remote_url="redis://h:1", store_location="RemoteBackend")
    assert list(without_hits(config, "kv_both", 4096, 16, 0)) == []
    config.retrieve_locations = ["LocalCPUBackend"]
    (sentence,) = without_hits(config, "kv_both", 4096, 16, 0)
    assert sentence.startswith("store_location='RemoteBackend' is none of retrieve_locations=")


@pytest.mark.parametrize("key", ["local_disk", "LMCACHE_LOCAL_DISK", "max_local_cpu_size"])
def test_an_option_without_its_prefix_is_not_ignored(key):
    option = key.lower().removeprefix("lmcache_")
    with pytest.raises(
        ConfigError, match=f"has {key}, which nobody reads; write lmcache.{option}."
    ):
        load_lmcache_config(vllm_config(transfer(**{key: "/srv"})))
    with pytest.raises(ConfigError, match="has a table 'lmcache'"):
        load_lmcache_config(vllm_config(transfer(lmcache={"local_cpu": True})))


@pytest.mark.parametrize("value", ["~/x", "$HOME/x", "/srv/a, ~/x", "${HOME}"])
def test_a_path_is_not_expanded(monkeypatch, tmp_path, value):
    with pytest.raises(ConfigError, match="local_disk is taken as it is written, without ~"):
        load(monkeypatch, "file", tmp_path, "local_disk", value)


@pytest.mark.parametrize("where", ["file", "extra"])
@pytest.mark.parametrize(
    "option", ["max_local_disk_size", "priority_limit", "mp_port", "extra_config"]
)
def test_a_blank_value_is_one_sentence(monkeypatch, tmp_path, where, option):
    """LMCache, which needs none of these, fails on it with a ValueError."""
    with pytest.raises(ConfigError, match=f"{option} is empty; write a value, or") as error:
        load(monkeypatch, where, tmp_path, option, " ")
    assert_one_sentence(str(error.value))
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    load(monkeypatch, "environment", tmp_path, option, " ")  # LMCache takes the space off


@pytest.mark.parametrize("where", ["file", "environment", "extra"])
@pytest.mark.parametrize("value", ["file:/srv", "file:srv", "file:///srv, file:/b"])
def test_a_url_with_one_slash_is_no_folder(monkeypatch, tmp_path, where, value):
    with pytest.raises(ConfigError, match="not a URL; write file:///path, or") as error:
        load(monkeypatch, where, tmp_path, "local_disk", value)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize("value", ["file:///srv", "/srv/file:/a", "file:///a,file:///b"])
def test_other_paths_with_file_are_folders(monkeypatch, tmp_path, value):
    found = load(monkeypatch, "file", tmp_path, "local_disk", value)
    assert found.local_disk == value.replace("file://", "")


def test_a_pool_that_no_machine_has_is_refused():
    message = refusal(max_local_cpu_size=1 << 20)
    assert " GB on each rank, more than the " in message and message.endswith("set it to less.")


@pytest.mark.parametrize(
    "ranks, executor, refused", [(2, "mp", False), (4, "mp", True), (4, "ray", False)]
)
def test_the_pools_of_all_ranks_must_fit_the_machine(monkeypatch, ranks, executor, refused):
    """Else the kernel kills one of them, without a word in the log."""
    monkeypatch.setattr(
        lmcache_config_module, "memory_of_the_machine", lambda limit: 10 * (1 << 30)
    )
    config = vllm_config(transfer())
    config.parallel_config = SimpleNamespace(
        local_world_size=ranks, use_ray=executor == "ray", data_parallel_size_local=1
    )
    found = lmcache_config(max_local_cpu_size=4.0)
    if not refused:
        checked_options(config, found)
        return
    with pytest.raises(ConfigError, match="on each of 4 ranks, more than the 10.7 GB") as error:
        checked_options(config, found)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    "name, meant",
    [
        ("LMCACHE_MAX_LOCAL_CPU_SICE", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("LMCACHE_MAX_CPU_SIZE", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("LMCACHE_LOCAL_DISK_PATH", "LMCACHE_LOCAL_DISK"),
        ("LMCACHE_REMOTE_URLS", "LMCACHE_REMOTE_URL"),
        ("LM_CACHE_LOCAL_DISK", "LMCACHE_LOCAL_DISK"),
        ("LM_CACHE_MAX_CPU_SIZE", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("lmcache_local_cpu", "LMCACHE_LOCAL_CPU"),
        ("max_local_cpu_size", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("LMCACHE_CONFIG_PATH", "LMCACHE_CONFIG_FILE"),
        ("LMCACHE_CONFIG", "LMCACHE_CONFIG_FILE"),
        ("lmcache_config_file", "LMCACHE_CONFIG_FILE"),
        ("LMCACHE_CONFIG_FILE", None),
        ("LM_CACHE_USE_EXPERIMENTAL", None),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", None),
        ("LMCACHE_RESP_HOST", None),  # read by a connector of LMCache
        ("LMCACHE_LOG_LEVEL", None),
        ("LMCACHE_HYBRID_LOAD_POLICI", None),  # ours, see own_options
        ("LMCACHE_CONTROLLER_PULL_PORT", None),  # of a service of Kubernetes
        ("MAX_LOCAL_CPU_SIZE", None),
        ("chunk", None),  # other programs' variables
        ("mp_host", None),
        ("LM_CACHE_DIR", None),
    ],
)
def test_a_variable_that_is_nearly_an_option_is_told(monkeypatch, hybrid_log, name, meant):
    said = list(misspelt({name: "1"}))
    assert said == ([f"{name} does nothing; did you mean {meant}?"] if meant else [])
    if meant:
        monkeypatch.setenv(name, "1")
        load_lmcache_config(vllm_config(transfer()))
        assert said[0] in hybrid_log.text


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many"), KeyError(b"MemTotal:")])
def test_an_engine_starts_where_the_system_does_not_say_its_memory(monkeypatch, error):
    """As with no file descriptor left, or without /proc."""

    def unread():
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", unread)
    settle_lmcache_config(lmcache_config(), BLOCK)


def test_a_consumer_needs_a_store_that_others_fill():
    config = lmcache_config()
    (sentence,) = without_hits(config, "kv_consumer", 4096, 16, 0)
    assert sentence.startswith("kv_role='kv_consumer' stores nothing")
    assert not list(without_hits(config, "kv_producer", 4096, 16, 0))
    config = lmcache_config(remote_url="redis://h:1")
    assert not list(without_hits(config, "kv_consumer", 4096, 16, 0))


def test_a_consumer_may_read_what_a_local_disk_has(tmp_path):
    config = lmcache_config(local_disk=str(tmp_path), max_local_disk_size=1)
    assert list(without_hits(config, "kv_consumer", 4096, 16, 0))
    (tmp_path / "record.pt").touch()
    assert not list(without_hits(config, "kv_consumer", 4096, 16, 0))
    config = lmcache_config(local_disk=str(tmp_path / "missing"), max_local_disk_size=1)
    assert list(without_hits(config, "kv_consumer", 4096, 16, 0))
