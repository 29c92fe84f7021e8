# SPDX-License-Identifier: Apache-2.0
"""This connector's own settings: how they are read, and which values are refused."""

import pytest

from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.config.options import (
    Options,
    log_remarks,
    log_sharing,
    read_options,
)
from lmcache_hybrid.config.parallel import check_prefix_cache
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import BESIDE_KEY

from .helpers import engine_config, vllm_config
from .lmcache_settings import assert_one_sentence, lmcache_config, options, transfer

pytestmark = pytest.mark.usefixtures("no_lmcache_settings")


def test_default_options():
    assert options() == Options(
        save=True,
        priority_limit=None,
        min_retrieve_tokens=0,
        max_tokens_per_load=0,
        chunk_ends=True,
    )


def test_options_come_from_extra_config_and_from_lmcache():
    found = options(
        lmcache=lmcache_config(priority_limit=3, min_retrieve_tokens=512),
        **{"lmcache.max_tokens_per_load": "4096"},
    )
    assert found == Options(True, 3, 512, 4096, chunk_ends=True)


@pytest.mark.parametrize(
    "role, save", [("kv_both", True), ("kv_producer", True), ("kv_consumer", False)]
)
def test_a_consumer_saves_nothing(role, save):
    assert options(role).save is save


def test_saving_can_be_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("LMCACHE_FORCE_SKIP_SAVE", "1")
    assert options().save is False


@pytest.mark.parametrize("value", ["three", "", [1], 1.5])
def test_refuses_what_is_no_whole_number(value):
    key = "lmcache.max_tokens_per_load"
    with pytest.raises(ConfigError) as error:
        options(**{key: value})
    assert str(error.value) == f"{key}={value!r} is not a whole number; write one."


def test_a_setting_of_earlier_versions_is_ignored_with_a_warning(hybrid_log):
    assert options(**{"lmcache.hybrid_attention_group": 3}) == options()
    log_remarks(vllm_config(transfer(**{"lmcache.hybrid_attention_group": 3})))
    assert "lmcache.hybrid_attention_group is not a setting any more" in hybrid_log.text


def test_the_load_policy_is_one_of_two():
    assert options().load_policy == "always"
    assert options(**{"lmcache.hybrid_load_policy": "faster"}).load_policy == "faster"
    with pytest.raises(
        ConfigError, match="^lmcache.hybrid_load_policy='fast' is not a policy; write"
    ):
        options(**{"lmcache.hybrid_load_policy": "fast"})


def test_loads_that_are_given_up_must_not_end_their_requests():
    settings = {
        "lmcache.hybrid_load_policy": "faster",
        "lmcache.hybrid_load_failure_policy": "fail",
    }
    with pytest.raises(
        ConfigError, match="'fail' would end their requests with an error; set"
    ) as e:
        options(**settings)
    assert_one_sentence(str(e.value))


def test_sharing_prefills_is_on_or_off():
    assert options().share_prefills is True
    assert options(**{"lmcache.hybrid_share_prefills": False}).share_prefills is False
    assert options(**{BESIDE_KEY: True}).share_prefills is False
    with pytest.raises(
        ConfigError, match="^lmcache.hybrid_share_prefills='no' is neither true nor"
    ):
        options(**{"lmcache.hybrid_share_prefills": "no"})


@pytest.mark.parametrize("share", [None, False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_sharing_that_is_asked_for_in_vain_is_said(share, beside, hybrid_log):
    extra = {"lmcache.hybrid_share_prefills": share, BESIDE_KEY: beside}
    config = vllm_config(
        transfer(**{key: value for key, value in extra.items() if value is not None})
    )
    log_sharing(config, read_options(config, lmcache_config()))
    said = [each.message for each in hybrid_log.records if each.levelname == "WARNING"]
    assert bool(said) is (share is True and beside)
    assert all("lmcache.hybrid_share_prefills=true does nothing beside" in each for each in said)


def test_refuses_unknown_settings_of_ours():
    with pytest.raises(ConfigError, match="^lmcache.hybrid_atention_group is not a setting; the"):
        options(**{"lmcache.hybrid_atention_group": 1})


def test_the_load_failure_policy_is_a_known_setting():
    options(**{"lmcache.hybrid_load_failure_policy": "fail", "lmcache_rpc_port": 3})


@pytest.mark.parametrize("tokens, nearest", [(100, 384), (600, 768), (-384, 384), (1, 384)])
def test_checkpoints_off_the_block_grid_are_refused(tokens, nearest):
    with pytest.raises(ConfigError) as error:
        options(block_size=384, **{"lmcache.hybrid_checkpoint_tokens": tokens})
    assert_one_sentence(str(error.value))
    assert str(error.value).startswith(f"lmcache.hybrid_checkpoint_tokens={tokens} is not a multip")
    assert f"set it to {nearest}, to 0 for no checkpoints, or remove it" in str(error.value)


@pytest.mark.parametrize("tokens", [0, 384, 1152])
def test_checkpoints_on_the_block_grid(tokens):
    chosen = options(block_size=384, **{"lmcache.hybrid_checkpoint_tokens": tokens})
    assert (chosen.checkpoint_tokens, chosen.chunk_ends) == (tokens, False)


def test_what_is_no_number_of_tokens_gets_the_words_to_write():
    with pytest.raises(ConfigError, match="='chunks' is not a whole number; write one, or 'chunk'"):
        options(**{"lmcache.hybrid_checkpoint_tokens": "chunks"})


@pytest.mark.parametrize(
    "chosen", [{}, *({"lmcache.hybrid_checkpoint_tokens": value} for value in ("chunk", None))]
)
def test_states_at_chunk_ends_are_on_by_default(chosen):
    found = options(block_size=384, **chosen)
    assert (found.checkpoint_tokens, found.chunk_ends) == (0, True)


def test_generated_tokens_are_off_by_default():
    assert not options().save_decode
    assert options(lmcache=lmcache_config(save_decode_cache=True)).save_decode


@pytest.mark.parametrize("tokens", [1, 383])
def test_a_load_limit_below_one_block_is_refused(tokens):
    """It would switch loading off without a word."""
    with pytest.raises(ConfigError, match="384 or more, or to 0") as error:
        options(block_size=384, **{"lmcache.max_tokens_per_load": tokens})
    assert_one_sentence(str(error.value))
    for allowed in (0, 384, 10_000):
        options(block_size=384, **{"lmcache.max_tokens_per_load": allowed})


def test_a_negative_length_is_refused():
    with pytest.raises(ConfigError, match="max_tokens_per_load=-1 is not a number") as error:
        options(**{"lmcache.max_tokens_per_load": -1})
    assert_one_sentence(str(error.value))
    with pytest.raises(ConfigError, match="min_retrieve_tokens=-5 is not a number"):
        options(lmcache=lmcache_config(min_retrieve_tokens=-5))


@pytest.mark.parametrize("value", ["inf", float("inf"), float("nan"), "1e999"])
def test_a_length_that_is_no_number_of_tokens_is_refused(value):
    with pytest.raises(ConfigError, match="is not a whole number"):
        options(**{"lmcache.max_tokens_per_load": value})


FS = "fs://localhost:0/srv/records"
SIZE, AGE = "lmcache.hybrid_fs_max_size_gb", "lmcache.hybrid_fs_max_age_hours"


def test_limits_of_folders():
    assert not options().folder_limits
    found = options(lmcache=lmcache_config(remote_url=FS), **{SIZE: 1.5, AGE: "36"})
    assert found.folder_limits == FolderLimits(3 << 29, 36 * 3600.0)
    only = options(lmcache=lmcache_config(remote_url=FS), **{AGE: 0.5}).folder_limits
    assert only == FolderLimits(None, 1800.0) and only


def test_limits_hold_in_a_plugins_folders():
    extra = {"remote_storage_plugin.fs.base_path": "/srv/records"}
    lmcache = lmcache_config(remote_storage_plugins=["fs"], extra_config=extra)
    assert options(lmcache=lmcache, **{AGE: 1}).folder_limits == FolderLimits(None, 3600.0)


@pytest.mark.parametrize("key", [SIZE, AGE])
@pytest.mark.parametrize("value", [0, -1, "", "much", "nan", float("inf"), True, [1], "1GB"])
def test_refuses_what_is_no_limit(key, value):
    with pytest.raises(ConfigError) as error:
        options(lmcache=lmcache_config(remote_url=FS), **{key: value})
    assert str(error.value).startswith(f"{key}={value!r} is not a limit; write a number of ")
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize("url", [None, "redis://user:secret@cache:6379"])
def test_refuses_limits_where_there_is_no_folder(url):
    """Otherwise an operator would wait for a Redis to be cleaned."""
    for key in SIZE, AGE:
        with pytest.raises(ConfigError) as error:
            options(lmcache=lmcache_config(remote_url=url), **{key: 5})
        message = str(error.value)
        assert (
            message.startswith(f"{key}=5 limits folders of fs:// and file:/// only")
            and "remove it" in message
        )
        assert "secret" not in message
        assert_one_sentence(message)


def test_a_prefix_cache_that_was_turned_off_later_ends_the_start():
    """Some attention backends do so when the layers are built, after vLLM's configuration."""
    config = engine_config("lfm2")
    check_prefix_cache(config)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="enable_prefix_caching=False, .*; choose another"):
        check_prefix_cache(config)
