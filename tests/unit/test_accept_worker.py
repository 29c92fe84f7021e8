# SPDX-License-Identifier: Apache-2.0
"""What the acceptance test does on a rank."""

import dataclasses
import json
import re
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.accept import worker
from lmcache_hybrid.tools.accept.child import check_ranks
from lmcache_hybrid.tools.accept.report import as_json
from lmcache_hybrid.tools.accept.tiers import missing_of, refusals, tiers_of

from . import store_box as stores
from .accept_engine import run

box, valkey = stores.box, stores.valkey


def test_the_last_block_of_a_lost_group_is_zeroed_until_it_ends() -> None:
    class Loads:
        def _restore(self, load, claim, after) -> int:
            return 7

    class Worker:
        def __init__(self) -> None:
            self.plan = SimpleNamespace(
                states=(1, 3), attention=(0,), windows=(SimpleNamespace(group=2),)
            )
            self.content = {
                (group, block): torch.ones(4) for group in range(4) for block in range(9)
            }
            self.pages = {
                group: SimpleNamespace(
                    block_bytes=16,
                    pieces=lambda block, data, group=group: [
                        (self.content[group, block].view(torch.uint8), data)
                    ],
                )
                for group in range(4)
            }

            self.loads = Loads()

    load = SimpleNamespace(state_blocks=(1, 2), attention_blocks=((3, 4),), window_blocks=((5, 6),))
    for group, block in ((1, 1), (3, 2), (0, 4), (2, 6)):
        lossy = Worker()
        worker.lose(lossy, group)
        assert lossy.loads._restore(load, None, None) == 7
        zeroed = {where for where, content in lossy.content.items() if not content.any()}
        assert zeroed == {(group, block)}
        worker.lose(lossy, None)
        lossy.content[group, block].fill_(1)
        lossy.loads._restore(load, None, None)
        assert lossy.content[group, block].all()


@pytest.mark.parametrize("state_bytes", [1 << 20, 1 << 30])
def test_blocks_of_every_group_are_copied_and_compared(state_bytes: int) -> None:
    sizes = {0: 8 << 20, 1: state_bytes, 2: 8 << 20, 3: 1 << 20}
    pages = {
        group: SimpleNamespace(block_bytes=size, num_blocks=100, count=1)
        for group, size in sizes.items()
    }
    plan = SimpleNamespace(
        attention=(0, 2), states=(1,), windows=(SimpleNamespace(group=3),), block_size=16
    )
    store = SimpleNamespace(reserve=lambda size: SimpleNamespace(release=lambda: None))
    items, targets = worker._items(SimpleNamespace(plan=plan, pages=pages, store=store))
    copied = Counter(item.key.group for item in items)
    assert copied.keys() == {0, 1, 2, 3} and copied[1] == 1
    assert abs(copied[0] - copied[2]) <= 1 and abs(copied[0] - copied[3]) <= 1
    blocks = list(chain.from_iterable([*(item.block for item in items), *targets]))
    assert len(set(blocks)) == len(blocks) and 0 < min(blocks) <= max(blocks) < 100


def options(**given) -> Options:
    made = Options(True, None, min_retrieve_tokens=0, max_tokens_per_load=0)
    return dataclasses.replace(made, **given)


def store_of(backends=("LocalCPUBackend", "LocalDiskBackend"), **given) -> SimpleNamespace:
    """A store with RAM above a local disk, or what else LMCache has opened."""
    settings = {"local_cpu": True, "local_disk": "d", "remote_url": None, **given}
    nowhere = {"retrieve_locations": None, "store_location": None, "remote_storage_plugins": None}
    config = {**nowhere, **settings}
    return SimpleNamespace(
        _engine=SimpleNamespace(config=SimpleNamespace(**config)),
        manager=SimpleNamespace(storage_backends=dict.fromkeys(backends)),
    )


@pytest.mark.parametrize(
    "given, settings, says",
    [
        ({"save": False}, {}, "LMCACHE_FORCE_SKIP_SAVE is set"),
        ({"max_tokens_per_load": 64}, {}, "lmcache.max_tokens_per_load=64 lets a load bring less"),
        ({"min_retrieve_tokens": 17}, {}, "min_retrieve_tokens=17 leaves hits of 16 tokens out"),
        ({"load_policy": "faster"}, {}, "hybrid_load_policy=faster computes hits"),
        (
            {},
            {"store_location": "LocalDiskBackend"},
            "store_location='LocalDiskBackend' is not the nearest backend that is read, "
            "LocalCPUBackend",
        ),
    ],
)
def test_settings_that_leave_hits_out_are_refused(given: dict, settings: dict, says: str) -> None:
    (sentence,) = refusals(options(**given), store_of(**settings), 16)
    assert says in sentence and sentence.endswith(".") and "for this test" in sentence
    ranks = [{"served": True, "refusals": [sentence]}]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_ranks(ranks)


@pytest.mark.parametrize(
    "settings, tiers",
    [
        ({}, ["RAM", "local disk"]),
        ({"local_cpu": False}, ["local disk"]),
        ({"local_cpu": False, "store_location": "LocalDiskBackend"}, ["local disk"]),
        ({"store_location": "LocalCPUBackend"}, ["RAM"]),
        ({"retrieve_locations": ["LocalDiskBackend"]}, ["local disk"]),
    ],
)
def test_tiers_are_those_that_are_written_and_read(settings: dict, tiers: list[str]) -> None:
    store = store_of(**settings)
    assert [tier["title"] for tier in tiers_of(store)] == tiers
    assert refusals(options(min_retrieve_tokens=16), store, 16) == []


def test_stores_are_named_without_host_user_password_or_path() -> None:
    secrets = {"local_disk": "/home/me/disk", "remote_url": "redis://me:secret@store.example:6379"}
    store = store_of(("LocalCPUBackend", "RemoteBackend"), **secrets)
    tiers, missing = tiers_of(store), missing_of(store)
    assert [(tier["title"], tier["survives"]) for tier in tiers] == [
        ("RAM", False),
        ("redis://", True),
    ]
    assert missing == ["LocalDiskBackend"]
    told = json.dumps([tiers, missing, as_json(run(tiers=tiers, missing_tiers=missing))])
    assert not [word for word in ("me:", "secret", "example", "/home") if word in told]


def test_plugins_are_tiers_by_the_names_of_their_backends(box, tmp_path) -> None:
    """``accept`` chooses one by its name, and a restart keeps what is there."""
    folder = {"remote_storage_plugin.fs.second.base_path": str(tmp_path / "second")}
    one = box("fs", local_cpu=True, remote_storage_plugins=["fs.second"], extra_config=folder)
    tiers = {tier["name"]: (tier["title"], tier["survives"]) for tier in tiers_of(one.store)}
    assert tiers == {
        "LocalCPUBackend": ("RAM", False),
        "RemoteBackend-fs.second": ("fs:// (plugin fs.second)", True),
        "RemoteBackend": ("fs://", True),
    }
    assert set(tiers) == set(one.manager.storage_backends) and missing_of(one.store) == []
    backend = one.manager.storage_backends.pop("RemoteBackend-fs.second")
    assert missing_of(one.store) == ["RemoteBackend-fs.second"]
    one.manager.storage_backends["RemoteBackend-fs.second"] = backend


@pytest.mark.parametrize("served", [(False, True), (True, False)])
def test_every_rank_must_be_served(served: tuple[bool, bool]) -> None:
    with pytest.raises(ConfigError, match=f"on rank {served.index(False)}"):
        check_ranks([{"served": each, "refusals": []} for each in served])
