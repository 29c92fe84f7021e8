# SPDX-License-Identifier: Apache-2.0
"""Folders of stores: who makes them, who may own them, and which are refused."""

import errno
import os
import shutil
import stat
from types import SimpleNamespace

import pytest

from lmcache_hybrid.config import folders
from lmcache_hybrid.config import lmcache_config as settled
from lmcache_hybrid.config.lmcache_config import refusals, settle_lmcache_config
from lmcache_hybrid.config.stores import shared_folders

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


@pytest.mark.parametrize(
    "option, kind, warned",
    [
        ("local_disk", "nfs4", True),
        ("local_disk", "fuse.juicefs", True),
        ("local_disk", "ext4", False),
        ("local_disk", "fuse.mergerfs", False),
        ("remote_url", "nfs4", False),
    ],
)
def test_a_disk_on_a_server_is_warned_of(option, kind, warned, tmp_path, monkeypatch, hybrid_log):
    """Of two file systems at one place the later one is seen."""
    mounts = [("/", "ext4"), (str(tmp_path), "xfs"), (str(tmp_path), kind), ("/elsewhere", "nfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=fstype) for place, fstype in mounts]
    monkeypatch.setattr(folders.psutil, "disk_partitions", lambda all: found)
    folders.check_folder(option, str(tmp_path / "records"))
    said = [each.getMessage() for each in hybrid_log.records]
    assert [f"on a network file system ({kind})" in each for each in said] == [True] * warned


@pytest.mark.parametrize(
    "kind, ranks, size, refused",
    [
        ("tmpfs", 1, 100.0, False),
        ("tmpfs", 2, 100.0, True),  # both may take all of it
        ("tmpfs", 2, 1.0, False),
        ("ramfs", 2, 0.0, True),  # grows without a limit
        ("ext4", 2, 100.0, False),
    ],
)
def test_a_disk_that_is_memory_counts_as_memory(
    kind, ranks, size, refused, tmp_path, monkeypatch, hybrid_log
):
    """As far as it may grow."""
    config = lmcache_config(
        local_disk=f" {tmp_path}/new/,{tmp_path}", max_local_cpu_size=1, max_local_disk_size=3
    )
    for name, value in (("memory_limit", 4.1), ("disk_usage", size)):
        owner = settled if name == "memory_limit" else settled.shutil
        found = value * (1 << 30)
        answer = found if name == "memory_limit" else SimpleNamespace(total=found)
        monkeypatch.setattr(owner, name, lambda *path, answer=answer: answer)
    monkeypatch.setattr(settled, "file_system_of", lambda path: kind)
    found = refusals(config, None, ranks)
    named = f"={f'{tmp_path}/new'!r} is memory ({kind})"
    assert [named in each for each in found] == [True] * refused


@pytest.mark.parametrize("path", ["/a\0", "relative"])
def test_a_file_system_that_is_unknown_is_no_error(path, monkeypatch):
    def broken(all):
        return [SimpleNamespace(mountpoint="none", fstype="swap")]

    monkeypatch.setattr(folders.psutil, "disk_partitions", broken)
    assert folders.file_system_of(path) == ""


def test_a_disk_that_is_smaller_than_what_ranks_may_take_is_warned_of(tmp_path, hybrid_log):
    size = shutil.disk_usage(tmp_path).total / (1 << 30)
    config = lmcache_config(local_disk=str(tmp_path), max_local_disk_size=size / 2)
    for ranks in (1, 3):
        assert refusals(config, None, ranks) == []
    (line,) = [each.getMessage() for each in hybrid_log.records]
    assert "(3 ranks), more than the" in line and "Set it to less" in line


def test_folders_above_are_not_made(tmp_path):
    """Where a disk is not mounted, its mount point or what is below it is not there."""
    message = refusal(local_disk=f"{tmp_path}/disk/records", max_local_disk_size=1.0)
    assert_one_sentence(message)
    assert f"mount what belongs at '{tmp_path}/disk'" in message and not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("free", [0, 5])
def test_a_full_disk_is_warned_of(tmp_path, monkeypatch, hybrid_log, free):
    """Its records are hit as before, and new ones take the place of old ones."""

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.tempfile, "NamedTemporaryFile", full)
    inodes = SimpleNamespace(f_files=60, f_favail=free)
    monkeypatch.setattr(folders.os, "statvfs", lambda path: inodes)
    folders.check_folder("local_disk", str(tmp_path / "records"))
    (line,) = [record.getMessage() for record in hybrid_log.records]
    why = "No space left on device" if free else "no inode is free"
    assert f"has no room for another file ({why})" in line and "make room there" in line


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


def plugin(base_path, name="fs"):
    return {
        "remote_storage_plugins": [name],
        "extra_config": {f"remote_storage_plugin.{name}.base_path": base_path},
    }


@pytest.mark.parametrize("name", ["fs", "fs.second"])
def test_a_plugins_folder_is_made_and_checked_as_that_of_a_url(tmp_path, monkeypatch, name):
    folder = tmp_path / "records"
    settle_lmcache_config(lmcache_config(**plugin(str(folder), name)), BLOCK)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    theirs = tmp_path if tmp_path.stat().st_uid else other_users(tmp_path / "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    message = refusal(**plugin(str(theirs), name))
    assert_one_sentence(message)
    option = f"extra_config.remote_storage_plugin.{name}.base_path"
    assert message.startswith(f"LMCache option {option}='{theirs}' belongs to user ")


def test_a_plugin_without_a_folder_is_refused():
    message = refusal(remote_storage_plugins=["fs.second"], extra_config={"fs": "/srv"})
    assert_one_sentence(message)
    option = "extra_config.remote_storage_plugin.fs.second.base_path"
    assert message.endswith(f"names 'fs.second' without a folder; set {option} to its path.")


@pytest.mark.parametrize("name", ["fs", "fs.second"])
def test_a_plugins_folder_is_not_one_that_each_process_would_look_for_elsewhere(name):
    message = refusal(**plugin("/srv/a,b", name))
    assert_one_sentence(message)
    assert message.startswith(f"LMCache option extra_config.remote_storage_plugin.{name}.base_path")
    assert "has a folder 'b'" in message


@pytest.mark.parametrize("url", ["fs://localhost:0/a\x00", "fs://localhost:0/tmp/a\x00"])
def test_a_path_that_cannot_be_is_refused(url):
    message = refusal(remote_url=url)
    assert_one_sentence(message)
    assert "cannot be written (embedded null byte)" in message


@pytest.mark.parametrize("folders", ["{0}/a,", ",{0}/a", "{0}/a,,{0}/b", "{0}/a, "])
def test_a_folder_without_a_name_is_refused(tmp_path, monkeypatch, folders):
    """It was taken for the working directory, and LMCache then went on without the store."""
    monkeypatch.chdir(tmp_path)
    folders = folders.format(tmp_path)
    for settings in (
        {"remote_url": f"fs://localhost:0{folders}"} if folders[0] == "/" else plugin(folders),
        plugin(folders),
        {"local_disk": folders, "max_local_disk_size": 1.0},
    ):
        message = refusal(**settings)
        assert_one_sentence(message)
        assert f"={folders!r} has a folder without a name" in message


@pytest.mark.parametrize("value", [5, ["/a"], ""])
def test_what_is_no_path_is_refused(value):
    assert "has a folder without a name" in refusal(**plugin(value))


def test_spaces_around_a_folder_do_not_count(tmp_path):
    """As in LMCache's connector: the check looked for '/working/directory/ /b'."""
    for settings in (
        {"remote_url": f"fs://localhost:0{tmp_path}/a , {tmp_path}/b"},
        plugin(f" {tmp_path}/a,{tmp_path}/b "),
    ):
        config = lmcache_config(**settings)
        settle_lmcache_config(config, BLOCK)
        ((_, folders),) = shared_folders(config)
        assert folders == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_url_and_plugins_have_folders_side_by_side():
    two = plugin("/srv/plugin")
    two["remote_storage_plugins"] = ["redis", "fs"]
    found = shared_folders(lmcache_config(remote_url="fs://localhost:0/srv/a;b", **two))
    assert found == [
        ("remote_url", ("/srv/a;b",)),
        ("extra_config.remote_storage_plugin.fs.base_path", ("/srv/plugin",)),
    ]
    assert shared_folders(lmcache_config(remote_url="redis://localhost:1")) == []
