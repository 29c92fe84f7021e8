# SPDX-License-Identifier: Apache-2.0
"""Folders that do not exist yet, belong to others, or depend on where an engine starts."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_hybrid.config.folders import TRUSTED_OWNER_KEY
from lmcache_hybrid.storage.folder.folder_use import FolderUse, in_use
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks
from lmcache_hybrid.tools.doctor.folders import check_folders, stand_ins
from lmcache_hybrid.tools.doctor.options import check_options

from ..other_users import ALICE, BOB, GROUP, as_user, needs_root, open_tmp
from ..storage.test_folder_use import nfs
from .findings import (
    ERROR,
    MODEL,
    OK,
    SKIPPED,
    TRANSFER,
    WARNING,
    assert_sentences,
    of_status,
    only,
)

__all__ = ["nfs", "open_tmp"]

CHECKS = (check_options, check_folders, check_disks, check_backends)


def settings(kind: str, *folders: Path) -> dict:
    named = ",".join(map(str, folders))
    plugin = {"remote_storage_plugin.fs.base_path": named}
    return {"local_cpu": False} | {
        "local_disk": {"local_disk": named, "max_local_disk_size": 0.1},
        "fs": {"remote_url": f"fs://localhost:0{named}"},
        "file": {"remote_url": f"file://{named}"},
        "plugin": {"remote_storage_plugins": ["fs"], "extra_config": plugin},
    }[kind]


KINDS = ["local_disk", "fs", "file", "plugin"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_folder_is_created(context, tmp_path, kind):
    """One of the doctor's user would be closed to the engine's."""
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    found = context(model=MODEL, **settings(kind, there, missing))
    told = [finding for check in CHECKS for finding in assert_sentences(check(found))]
    assert not of_status(told, ERROR)
    folder = only(finding for finding in told if finding.check == "folder")
    assert folder.status == OK and f"{missing} does not exist yet: the engine" in folder.message
    assert ("as the engine's user" in folder.fix) is (os.geteuid() == 0)
    assert not any(".lmcache-hybrid-doctor" in f"{each.message}{each.fix}" for each in told)
    assert sorted(os.listdir(tmp_path)) == ["lmcache.yaml", "there"]
    assert not list(there.iterdir())


def test_a_folder_in_no_folder_is_told_in_the_engines_words(context, tmp_path):
    found = context(model=MODEL, **settings("local_disk", tmp_path / "a" / "b"))
    assert "is in no folder that exists" in only(of_status(check_options(found), ERROR)).message
    assert list(check_folders(found)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["/proc/none", "/proc/self/none"])
def test_a_folder_that_only_the_kernel_has_cannot_be_written(context, kind, folder):
    """It is neither made by the engine nor full."""
    found = context(model=MODEL, **settings(kind, Path(folder)))
    told = [finding for check in CHECKS for finding in assert_sentences(check(found))]
    refused = only(finding for finding in told if finding.status != SKIPPED)
    assert refused.status == ERROR and f"{folder!r} cannot be written (" in refused.message
    assert [finding.check for finding in told if finding is not refused] == [
        "disk space",
        "backends",
    ]


def test_what_fails_in_the_folders_place_names_the_folder(context, tmp_path):
    missing = tmp_path / "missing"
    with stand_ins(context(**settings("local_disk", missing)).config) as made:
        temporary = made.config.local_disk
        assert Path(temporary).is_dir() and Path(temporary).parent == tmp_path
        assert made.sentence(f"{temporary!r} is full.") == f"{str(missing)!r} is full."
    assert not Path(temporary).exists()


@needs_root
def test_a_folder_that_this_user_may_not_create(open_tmp, context):
    found = context(**settings("local_disk", open_tmp / "missing"))

    def told():
        return [*check_options(found), *check_folders(found)]

    refused, _, folder = as_user(ALICE, told)  # ALICE cannot read the file of options, too
    assert refused.status == ERROR and "Permission denied" in refused.message
    assert folder.status == WARNING and f"and user {ALICE}, as whom doctor" in folder.message
    assert "Run doctor as the engine's user, or" in folder.fix


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_another_user(context, tmp_path, kind):
    """Its owner's engine uses it, which chown would end."""
    folder = tmp_path / "bobs"
    folder.mkdir(mode=0o700)
    os.chown(folder, BOB, GROUP)
    told = only(assert_sentences(check_folders(context(**settings(kind, folder)))))
    assert told.status == WARNING and f"{folder} belongs to user {BOB}" in told.message
    assert told.fix.startswith(f"Run doctor as the engine's user: sudo -u '#{BOB}'")
    transfer = TRANSFER | {"kv_connector_extra_config": {TRUSTED_OWNER_KEY: BOB}}
    assert list(check_folders(context(transfer=transfer, **settings(kind, folder)))) == []


@needs_root
def test_a_folder_of_roots_that_a_group_shares(open_tmp, context):
    folder = open_tmp / "shared"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    found = context(**settings("fs", folder))
    assert as_user(ALICE, lambda: list(check_folders(found))) == []
    folder.chmod(0o700)
    assert (
        "belongs to root (user 0)"
        in only(as_user(ALICE, lambda: list(check_folders(found)))).message
    )


def test_a_relative_folder_is_told_in_full(context, tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    monkeypatch.chdir(tmp_path)
    found = context(**settings("local_disk", Path("records")))
    told = only(assert_sentences(check_folders(found)))
    assert told.status == WARNING and told.fix == f"Write {tmp_path}/records."
    words = f"local_disk='records' is relative, so an engine that starts in {tmp_path}"
    assert words in told.message
    assert list(check_folders(replace(found, config=None, written=None))) == []


def test_a_folder_that_an_engine_uses_now(context, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    made = context(**settings("local_disk", folder))
    assert list(check_folders(made)) == []
    engine = FolderUse(str(folder))
    assert engine.hold()
    (found,) = check_folders(made)
    assert found.status == OK and f"An engine uses {folder} now" in found.message
    engine.release()
    assert list(check_folders(made)) == [] == list(folder.iterdir())


def test_on_nfs_no_lock_is_created(context, tmp_path, nfs):  # noqa: F811
    """One of root's would be closed to the engine's user."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = context(**settings("local_disk", folder))
    told = [finding for check in CHECKS for finding in check(made)]
    assert not of_status(told, ERROR) and list(folder.iterdir()) == []
    engine = FolderUse(str(folder))
    assert engine.hold()
    before = [each.stat() for each in folder.iterdir()]
    (found,) = check_folders(made)
    assert found.status == OK and f"An engine uses {folder} now" in found.message
    assert [each.stat() for each in folder.iterdir()] == before
    engine.release()
    assert list(check_folders(made)) == []


def test_the_doctors_record_takes_no_engines_folder(context, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    list(check_backends(context(**settings("local_disk", folder))))
    assert not in_use(str(folder))
