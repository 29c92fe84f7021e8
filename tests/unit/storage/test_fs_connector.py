# SPDX-License-Identifier: Apache-2.0
"""The connector to folders: LMCache's own files, several engines, what others plant there."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

from lmcache_hybrid.core.errors import ConfigError, LoadError
from lmcache_hybrid.storage.folder import record_io
from lmcache_hybrid.storage.folder.record_files import TEMPORARY, WRAPPER_BYTES
from lmcache_hybrid.storage.remote import fs, make_connector
from lmcache_hybrid.storage.remote.record_connector import unwrapped

from ..helpers import payload_of, put
from ..store_box import KEYS, SIZE, Box, until


def connector_of(box: Box) -> fs.HybridFSConnector:
    connector = unwrapped(box.backend.connection)
    assert isinstance(connector, fs.HybridFSConnector)
    return connector


def lmcaches(box: Box, *folders: Path) -> FSConnector:
    """LMCache's own connector to the same folders."""
    paths = ",".join(map(str, folders or (box.folder,)))
    cpu = box.manager.local_cpu_backend
    return FSConnector(box.manager.loop, cpu, box.manager.config, base_paths_str=paths)


def run(box: Box, job):
    return asyncio.run_coroutine_threadsafe(job, box.manager.loop).result(20)


def settled(*boxes: Box) -> None:
    for box in boxes:
        until(lambda box=box: box.used() == box.start, "writes keep their buffers")


def assert_whole(box: Box, keys=KEYS) -> None:
    for key, payload in zip(keys, box.read(keys), strict=True):
        assert torch.equal(payload, payload_of(key, SIZE))


# LMCache's files


def test_what_lmcaches_own_connector_wrote_is_hit(box):
    """Earlier releases used it."""
    box = box("fs").write()
    theirs = lmcaches(box)
    for key in KEYS:
        memory = run(box, connector_of(box).get(box.store.engine_key(key)))
        ours = box.path(key).read_bytes()
        box.path(key).unlink()
        run(box, theirs.put(box.store.engine_key(key), memory))
        memory.ref_count_down()
        assert box.path(key).read_bytes() == ours
    assert_whole(box)


def test_lmcaches_own_connector_reads_what_is_written(box):
    box = box("fs").write()
    theirs = lmcaches(box)
    for key in KEYS:
        memory = run(box, theirs.get(box.store.engine_key(key)))
        assert bytes(memory.byte_array) == box.raw(key)
        memory.ref_count_down()


@pytest.mark.parametrize("names", ["one", "one,two,three", "one , two"])
def test_a_record_lies_where_lmcache_looks_for_it(box, tmp_path, names):
    paths = ",".join(f"{tmp_path}/{name}" for name in names.split(","))
    box = box("fs", remote_url=f"fs://localhost:0{paths}").write()
    theirs = lmcaches(box, *map(Path, paths.split(",")))
    for key in KEYS:
        engine_key = box.store.engine_key(key)
        path = theirs._get_file_path(engine_key)
        assert str(path) == connector_of(box).path(engine_key) and path.is_file()
    assert_whole(box)


def test_a_plugin_says_its_folder_as_in_lmcache(box, tmp_path):
    box = box("fs")
    for extra, name in (
        ({"fs_base_path": f"{tmp_path}/plain"}, "plain"),
        ({"remote_storage_plugin.fs.a.base_path": f"{tmp_path}/a", "fs_base_path": "/no"}, "a"),
    ):
        config = SimpleNamespace(**vars(box.manager.config) | {"extra_config": extra})
        config.use_layerwise, config.blocking_timeout_secs = False, 5
        made = make_connector.create_connector(
            "plugin://fs.a",
            box.manager.loop,
            box.manager.local_cpu_backend,
            config,
            box.engine.metadata,
            "fs.a",
        )
        connector = unwrapped(made)
        assert isinstance(connector, fs.HybridFSConnector)
        assert connector._folders == (f"{tmp_path}/{name}",) and (tmp_path / name).is_dir()
        run(box, connector.close())
    config.extra_config = {}
    with pytest.raises(ConfigError, match="'fs' without a folder; set "):
        make_connector.create_connector("plugin://fs", None, None, config, None, "fs")


@pytest.mark.parametrize("step", [1, 7, WRAPPER_BYTES, 1 << 22])
def test_a_record_may_be_read_and_written_in_parts(box, monkeypatch, step):
    """The system may take less than it was given."""
    writev = os.writev
    monkeypatch.setattr(record_io, "STEP_BYTES", step)
    monkeypatch.setattr(os, "writev", lambda number, parts: writev(number, [parts[0][:step]]))
    assert_whole(box("fs").write())


# Writing


def test_a_killed_write_leaves_no_record(box, monkeypatch):
    """What is there under the record's name is whole at any time."""
    box, seen = box("fs"), []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append(paths), replace(*paths)))
    box.write()
    for temporary, path in seen:
        assert temporary != path and temporary.endswith(TEMPORARY)
        assert not os.path.exists(temporary)
    assert len({temporary for temporary, _ in seen}) == len(KEYS)


def test_two_engines_may_store_one_prompt_at_the_same_time(box):
    """1,000 times; a third one loads it meanwhile."""
    engines, reader = [box("fs"), box("fs")], box("fs").write()

    def store(one: Box) -> None:
        for _ in range(1000):
            until(lambda: connector_of(one).writing < 200, "writes do not end")
            put(one.store, KEYS, SIZE)

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(store, one) for one in engines]
        while not all(job.done() for job in jobs):
            assert_whole(reader)
    settled(*engines)
    for one in (*engines, reader):
        until(lambda one=one: not connector_of(one).writing, "writes do not end")
        assert not one.store.failed_writes
        assert_whole(one)
    assert len(list(reader.folder.iterdir())) == len(KEYS)


# What others planted


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "victim"
    file.write_bytes(b"precious")
    return file


@pytest.mark.parametrize("planted", [1, fs.TRIES])
def test_links_under_temporary_names_are_not_followed(box, victim, planted):
    """Even where somebody guesses the names."""
    box = box("fs")
    connector = connector_of(box)
    first = next(connector._numbers) + 1
    for number in range(first, first + planted):
        Path(box.folder, f"{connector._prefix}{number}{TEMPORARY}").symlink_to(victim)
    put(box.store, KEYS[:1], SIZE)
    if planted < fs.TRIES:
        until(lambda: box.path(KEYS[0]).exists(), "it was not written under another name")
        assert_whole(box, KEYS[:1])
    else:
        until(lambda: box.store.failed_writes["RemoteBackend"] == 1, "it was not counted")
        assert box.store.locate(KEYS[:1]) == {}
    settled(box)
    assert victim.read_bytes() == b"precious"


def a_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def a_dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("not there"))


def a_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [a_link, a_dangling_link, a_pipe])
def test_what_is_no_file_is_no_record_and_is_replaced(box, victim, plant):
    box = box("fs").write()
    victim.write_bytes(box.path(KEYS[1]).read_bytes())
    whole = victim.read_bytes()
    claim = box.store.claim(box.store.locate(KEYS))
    box.path(KEYS[1]).unlink()
    plant(box.path(KEYS[1]), victim)
    with pytest.raises(LoadError) as failed:
        box.fetch(claim, KEYS)
    assert failed.value.reason == "gone"
    assert list(box.store.locate(KEYS)) == [key for key in KEYS if key != KEYS[1]]
    box.write([KEYS[1]])
    assert_whole(box)
    assert box.path(KEYS[1]).is_file() and not box.path(KEYS[1]).is_symlink()
    assert victim.read_bytes() == whole and not victim.with_name("not there").exists()


def test_a_folder_under_a_records_name_fails_its_writes(box, hybrid_log):
    box = box("fs")
    box.path(KEYS[0]).mkdir()
    for _ in range(2):
        put(box.store, KEYS[:1], SIZE)
    until(lambda: box.store.failed_writes["RemoteBackend"] == 2, "it was not counted")
    assert box.store.locate(KEYS[:1]) == {}
    assert [path.name for path in box.folder.iterdir()] == [box.path(KEYS[0]).name]
    assert len([r for r in hybrid_log.records if "cannot be written" in r.getMessage()]) == 1
    settled(box)


# What LMCache asks


def test_lmcaches_own_questions_are_answered(box):
    box = box("fs").write(KEYS[:1])
    there, not_there = map(box.store.engine_key, KEYS[:2])
    connector = connector_of(box)
    assert box.backend.contains(there) and not box.backend.contains(not_there)
    assert connector.exists_sync(there) and not connector.exists_sync(not_there)
    assert box.backend.get_blocking(not_there) is None
    assert box.backend.remove(there) and not box.backend.remove(there)
    assert not box.path(KEYS[0]).exists()
    box.assert_pool_is_free()


def test_closing_waits_for_queued_writes(box, monkeypatch):
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda *paths: (until(lambda: closing, "no end"), replace(*paths))
    )
    box, closing = box("fs"), []
    put(box.store, KEYS, SIZE)
    until(lambda: connector_of(box).writing == len(KEYS), "nothing is written")
    closing.append(1)
    box.close()
    assert len(list(box.folder.iterdir())) == len(KEYS)
