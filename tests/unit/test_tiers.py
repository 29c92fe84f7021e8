# SPDX-License-Identifier: Apache-2.0
"""Where the start-up line says that records are kept."""

import dataclasses

import pytest

from lmcache_hybrid.config.folders import FolderLimits
from lmcache_hybrid.config.tiers import Tier, described, prompt_bytes, tiers
from lmcache_hybrid.core.sizes import GIB, in_gib

from .helpers import OPTIONS
from .lmcache_settings import lmcache_config

FS_PLUGIN = {"remote_storage_plugins": ["fs"], "extra_config": {"fs_base_path": "/f"}}


@pytest.mark.parametrize(
    "settings, limits, said",
    [
        ({}, {}, "RAM (about 2.0 prompts of max_model_len=1,200)"),
        ({"local_cpu": False}, {}, "no place"),
        (
            {"local_disk": "/d", "max_local_disk_size": 40.0, "remote_url": "redis://u:p@h:1"},
            {},
            "RAM (about 2.0 prompts of max_model_len=1,200) and local_disk (about 20 prompts of "
            "max_model_len=1,200) and redis://",
        ),
        (
            {"local_cpu": False, "remote_url": "fs://h:0/f"},
            {"max_bytes": 8 * GIB},
            "fs:// (about 2.0 prompts of max_model_len=1,200)",
        ),
        (
            {"local_cpu": False, "remote_url": "file:///f"},
            {"max_bytes": 8 * GIB},
            "file:// (about 2.0 prompts of max_model_len=1,200)",
        ),
        (
            {"local_cpu": False, "remote_storage_plugins": ["redis.a"]},
            {},
            "redis:// (plugin redis.a)",
        ),
        (
            {"local_cpu": False, "remote_url": "redis://h:1", **FS_PLUGIN},
            {"max_bytes": 8 * GIB},
            "fs:// (plugin fs) (about 2.0 prompts of max_model_len=1,200) and redis://",
        ),
    ],
    ids=str,
)
def test_each_tier_is_named_with_what_it_holds(settings, limits, said):
    """Of two ranks, which share a folder. A prompt takes 2 GiB on each."""
    config = lmcache_config(**{"max_local_cpu_size": 4.0} | settings)
    options = dataclasses.replace(OPTIONS, folder_limits=FolderLimits(**limits))
    assert described(tiers(config, options), 2 * GIB, 1200, 2) == said


@pytest.mark.parametrize(
    "limit, held", [(2000, "2,000"), (9.94, "9.9"), (0.1, "0.1"), (0.02, "0.02"), (1e-3, "0.001")]
)
def test_a_small_part_of_a_prompt_is_not_0(limit, held):
    assert Tier("RAM", limit=limit).holds(1) == held


@pytest.mark.parametrize(
    "size, text", [(0, "0.0"), (1500 * GIB, "1500.0"), (GIB / 2, "0.50"), (2 << 20, "0.0020")]
)
def test_a_size_to_write_has_digits_that_are_not_0(size, text):
    """As the number that options take."""
    assert in_gib(size) == text


def test_what_is_not_known_is_not_said():
    assert described(tiers(lmcache_config(), OPTIONS), 0, 1200, 1) == "RAM"


@pytest.mark.parametrize(
    "options, states", [({"chunk_ends": True}, 4), ({"checkpoint_tokens": 0}, 1)], ids=str
)
def test_a_prompt_takes_its_pages_and_the_states_on_its_way(options, states):
    made = dataclasses.replace(OPTIONS, **{"chunk_ends": False} | options)
    assert prompt_bytes(made, 1200, 300, 100, 0, 10, 1000) == 12 * 10 + states * 1000
    # The last multiple of U has a page of its own.
    inside = prompt_bytes(made, 1251, 300, 100, 50, 10, 1000)
    assert inside == 13 * 10 + (states + 1) * 1000
