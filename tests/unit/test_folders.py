# SPDX-License-Identifier: Apache-2.0
"""Folders of stores: who makes them, who may own them, and which are refused."""

import os
import stat

import pytest

from lmcache_hybrid.config import folders
from lmcache_hybrid.config.options import settle_lmcache_config

from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, refusal


def test_fs_creates_its_folders(tmp_path):
    url = f"fs://localhost:0{tmp_path}/a,{tmp_path}/b"
    settle_lmcache_config(lmcache_config(remote_url=url), BLOCK)
    assert (tmp_path / "a").is_dir() and (tmp_path / "b").is_dir()
    assert not list(tmp_path.glob("*/*"))  # the probe is gone


@pytest.mark.parametrize("option", ["local_disk", "remote_url"])
def test_refuses_a_folder_that_cannot_be_written(option, tmp_path):
    """Below a file nobody can make a folder, not even root."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    path = f"{file}/below"
    url = f"fs://localhost:0{path}"
    value = url if option == "remote_url" else path
    message = refusal(**{option: value}, max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"{option}='{path}' cannot be written (Not a directory)" in message


def test_folders_above_are_not_made(tmp_path):
    """Where a disk is not mounted, its mount point or what is below it is not there."""
    message = refusal(local_disk=f"{tmp_path}/disk/records", max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"mount what belongs at '{tmp_path}/disk'" in message and not list(tmp_path.iterdir())


def test_a_disk_that_is_not_mounted_is_refused(tmp_path, monkeypatch):
    """Its mount point is there, an empty folder of the disk below."""
    point, table = tmp_path / "disk", tmp_path / "fstab"
    point.mkdir()
    table.write_text(
        f"# disks\n/dev/x {point} ext4 defaults 0 0\nproc /proc proc\nswap none swap\n"
    )
    monkeypatch.setattr(folders, "FSTAB", str(table))
    for path in (point, point / "records"):
        message = refusal(local_disk=str(path), max_local_disk_size=1.0)
        assert_one_sentence(message)
        assert f"is on '{point}'" in message
    assert not list(point.iterdir())
    folders.check_folder("local_disk", str(tmp_path / "disk2"))


def test_a_new_folder_is_for_this_user_alone(tmp_path):
    folders.check_folder("local_disk", str(tmp_path / "records"))
    assert stat.S_IMODE((tmp_path / "records").stat().st_mode) == 0o700


def test_ranks_that_make_one_folder_at_once_all_start(tmp_path, monkeypatch):
    path, make = str(tmp_path / "records"), os.mkdir

    def after_another_rank(name, mode=0o777):
        make(name, mode)
        return make(name, mode)

    monkeypatch.setattr(os, "mkdir", after_another_rank)
    folders.check_folder("local_disk", path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    message = refusal(local_disk=f"{tmp_path}/file", max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert "cannot be written (Not a directory)" in message


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    theirs = tmp_path if tmp_path.stat().st_uid else other_users(tmp_path / "theirs")
    message = refusal(local_disk=str(theirs), max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"belongs to user {theirs.stat().st_uid}" in message


def other_users(folder):
    folder.mkdir()
    os.chown(folder, 4321, 4321)
    return folder


def test_a_folder_of_root_is_taken_and_one_of_everybody_told(tmp_path, hybrid_log):
    folders.check_folder("local_disk", str(tmp_path))
    assert not hybrid_log.records
    tmp_path.chmod(0o1777)
    folders.check_folder("local_disk", str(tmp_path))
    assert "chmod o-w" in hybrid_log.records[0].getMessage()


def test_refuses_one_bad_folder_of_several(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "file" in refusal(
        local_disk=f"{tmp_path}/good, {tmp_path}/file", max_local_disk_size=1.0
    )


def test_the_write_probe_leaves_nothing_and_shares_its_name_with_nobody(tmp_path):
    """Engines in two containers have the same process ID."""
    (tmp_path / f".lmcache-hybrid-{os.getpid()}.tmp").mkdir()
    settle_lmcache_config(lmcache_config(local_disk=str(tmp_path), max_local_disk_size=1), 384)
    assert [p.is_dir() for p in tmp_path.iterdir()] == [True]
