# SPDX-License-Identifier: Apache-2.0
"""A folder that belongs to another user, whom ``lmcache.hybrid_trusted_folder_owner`` names.

Root in a folder of another user is what an engine meets on NFS with ``root_squash``.
"""

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_hybrid.config.folders import check_folder, settle_disk_folder
from lmcache_hybrid.config.lmcache_config import load_lmcache_config, settle_lmcache_config
from lmcache_hybrid.config.own_options import TRUSTED_OWNER_KEY, read_own_options
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.options import check_options
from lmcache_hybrid.tools.stored.opening import open_store

from . import store_box as stores
from .helpers import vllm_config
from .lmcache_settings import BLOCK, assert_one_sentence, options, transfer
from .other_users import ALICE, BOB, GROUP, as_user, needs_root, open_tmp
from .store_box import KEYS

box, valkey = stores.box, stores.valkey
__all__ = ["open_tmp"]

OPTIONS = ["local_disk", "remote_url", "plugin"]


@pytest.fixture
def bobs(open_tmp) -> Path:
    folder = open_tmp / "records"
    folder.mkdir(mode=0o700)
    os.chown(folder, BOB, GROUP)
    return folder


def settings(kind: str, folder: Path, **ours):
    """LMCache's configuration as an engine loads it from ``kv_connector_extra_config``."""
    extra = {
        "local_disk": {"lmcache.local_disk": str(folder), "lmcache.max_local_disk_size": 1},
        "remote_url": {"lmcache.remote_url": f"fs://localhost:0{folder}"},
        "plugin": {
            "lmcache.remote_storage_plugins": ["fs"],
            "lmcache.extra_config": {"remote_storage_plugin.fs.base_path": str(folder)},
        },
    }[kind]
    return load_lmcache_config(vllm_config(transfer(**extra, **ours)))


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    assert_one_sentence(str(error.value))
    return str(error.value)


@needs_root
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_folder_of_the_named_user_is_taken(bobs, no_lmcache_settings, kind):
    message = refusal(settle_lmcache_config, settings(kind, bobs), BLOCK)
    assert f"set {TRUSTED_OWNER_KEY} to {BOB}" in message
    settle_lmcache_config(settings(kind, bobs, **{TRUSTED_OWNER_KEY: BOB}), BLOCK)
    other = settings(kind, bobs, **{TRUSTED_OWNER_KEY: ALICE})
    assert f"belongs to user {BOB}" in refusal(settle_lmcache_config, other, BLOCK)


@needs_root
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777, 0o2770])
def test_nobody_else_may_write_there(bobs, mode):
    bobs.chmod(mode)
    message = refusal(check_folder, "local_disk", str(bobs), BOB)
    assert "chmod go-w" in message and f"{mode:04o}" in message
    bobs.chmod(0o755)
    check_folder("local_disk", str(bobs), BOB)


@needs_root
def test_another_user_takes_it_only_if_told_and_only_if_nobody_else_writes(open_tmp):
    """Alice's engine, in a folder of Bob's that their group may write to."""
    folder = open_tmp / "shared"
    folder.mkdir()
    os.chown(folder, BOB, GROUP)
    folder.chmod(0o2770)

    def told(trusted: int | None) -> str:
        return refusal(check_folder, "local_disk", str(folder), trusted)

    assert "set lmcache.hybrid_trusted" in as_user(ALICE, lambda: told(None))
    assert "chmod go-w" in as_user(ALICE, lambda: told(BOB))


@needs_root
def test_data_parallel_engines_take_it_too(bobs, no_lmcache_settings):
    (bobs / "dp1").mkdir(mode=0o700)
    os.chown(bobs / "dp1", BOB, GROUP)
    second = SimpleNamespace(data_parallel_index=1)
    settle_disk_folder(settings("local_disk", bobs, **{TRUSTED_OWNER_KEY: BOB}), second)
    refusal(settle_disk_folder, settings("local_disk", bobs), second)


@needs_root
def test_the_doctor_says_the_same(bobs, no_lmcache_settings):
    def found(**ours) -> str:
        config = settings("local_disk", bobs, **ours)
        context = Context(transfer(**ours), config, None, None, ())
        return " ".join(finding.message for finding in check_options(context))

    assert f"belongs to user {BOB}" in found()
    assert "belongs to" not in found(**{TRUSTED_OWNER_KEY: str(BOB)})


@needs_root
@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_records_that_belong_to_that_user_are_found_read_and_deleted(box, tmp_path, kind):
    one = box(kind).write()
    one.close()
    folder = tmp_path / "records"
    for path in (folder, *folder.iterdir()):
        os.chown(path, BOB, GROUP)
    one = box(kind)
    one.read()
    one.close()
    # inspect, verify and purge ask nobody whose the folder is.
    store = open_store(str(folder))
    entries = list(store.entries())
    assert len(entries) == len(KEYS)
    assert store.delete(entry.where for entry in entries) == len(KEYS)
    store.close()


@pytest.mark.parametrize("value", ["nobody-here", "", " ", True, -1, 1.5, "x\0", [0]])
def test_who_is_no_user_is_refused(value, no_lmcache_settings):
    call = vllm_config(transfer(**{TRUSTED_OWNER_KEY: value}))
    assert refusal(load_lmcache_config, call).startswith(f"{TRUSTED_OWNER_KEY}={value!r} names no")


def test_a_name_and_a_number_are_one_user():
    root = pwd.getpwuid(0).pw_name
    values = [root, "0", 0, 65534, "65534", None]
    found = [read_own_options({TRUSTED_OWNER_KEY: value})[TRUSTED_OWNER_KEY] for value in values]
    assert found == [0, 0, 0, 65534, 65534, None]
    assert options(**{TRUSTED_OWNER_KEY: 65534})  # a setting that is known
