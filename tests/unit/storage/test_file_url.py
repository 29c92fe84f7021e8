# SPDX-License-Identifier: Apache-2.0
"""``file:///``: everything that knows stores by their kind knows this one."""

import pytest
import torch
from vllm.config import KVTransferConfig

from lmcache_hybrid.config.stores import places, shared_folders
from lmcache_hybrid.core.errors import ConfigError, RecordError
from lmcache_hybrid.tools.doctor.backends import check_backends
from lmcache_hybrid.tools.doctor.capacity import check_disks
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Status
from lmcache_hybrid.tools.stored.opening import open_store

from ..helpers import payload_of
from ..lmcache_settings import assert_one_sentence, lmcache_config, refusal
from ..store_box import KEYS, SIZE, Box
from ..stored.commands import run_json

TRANSFER = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")


@pytest.fixture
def pair(tmp_path):
    """Two engines on one folder, by either URL."""
    boxes = [
        Box("fs", tmp_path, None, remote_url=url)
        for url in (f"file://{tmp_path}", f"fs://localhost:0{tmp_path}")
    ]
    yield boxes
    for box in boxes:
        box.close()


def test_engines_find_each_others_records_by_either_url(pair):
    one, other = pair
    one.write(KEYS[:2])
    other.write(KEYS[2:])
    for box in pair:
        for key, payload in zip(KEYS, box.read(), strict=True):
            assert torch.equal(payload, payload_of(key, SIZE))


def test_a_damaged_record_is_a_miss_and_is_removed(pair):
    one, other = pair
    one.write()
    path = one.path(KEYS[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError):
        one.read()
    assert not path.exists() and set(one.store.locate(KEYS)) == set(KEYS[1:])
    one.assert_pool_is_free()


def test_operators_commands_and_the_doctor_reach_it(pair, tmp_path):
    pair[0].write()
    url = f"file://{tmp_path}"
    (row,) = run_json("inspect", url)["rows"]
    assert row["records"] == len(KEYS)
    assert run_json("verify", url)["counts"] == {"good": len(KEYS)}
    config = lmcache_config(local_cpu=False, remote_url=url)
    context = Context(TRANSFER, config, None, None, ())
    (tried,) = check_backends(context)
    assert (tried.check, tried.status) == ("remote_url", Status.OK) and url in tried.message
    (space,) = check_disks(context)
    assert str(tmp_path) in space.message and "nothing is ever deleted there" in space.message
    (after,) = run_json("inspect", url)["rows"]
    assert after["records"] == len(KEYS), "the doctor's record is still there"


def test_its_folders_are_cleaned_and_named_as_those_of_fs(tmp_path):
    config = lmcache_config(remote_url=f"file://{tmp_path}/a,{tmp_path}/b")
    assert shared_folders(config) == [("remote_url", (f"{tmp_path}/a", f"{tmp_path}/b"))]
    (place,) = places(config)
    assert (place.backend, place.title) == ("RemoteBackend", "file://")


OTHER = [
    *("file://", "file:///", "file://host/srv", "file://srv", "file://[/a"),
    *("file:///a?b", "file:///a#b", "file:///a?", "file:///a#", "file:///a%20b"),
    *("file:///a\tb", "file:///a\x00"),
]
# Of their folders one is relative, or has no name.
PARTLY = ["file:///a,b", "file:///a,", "file:///a,file:///b", "fs://localhost:0/a,b"]


@pytest.mark.parametrize("url", OTHER)
def test_refuses_what_is_no_absolute_path_alone(url):
    """Or the commands, or another reader of URLs, would mean another folder than the engine."""
    message = refusal(remote_url=url)
    assert_one_sentence(message)
    assert f"remote_url={url!r}" in message and message.endswith("write file:///absolute/path.")


@pytest.mark.parametrize("url", PARTLY)
def test_refuses_a_folder_that_each_process_would_look_for_elsewhere(url):
    message = refusal(remote_url=url)
    assert_one_sentence(message)
    assert "has a folder" in message and "with a comma between them" in message


@pytest.mark.parametrize("url", [*OTHER, *PARTLY, "fs:///a", "fs://localhost/a"])
def test_operators_commands_refuse_what_the_engine_refuses(url):
    refusal(remote_url=url)
    with pytest.raises(ConfigError, match="STORE="):
        open_store(url)


def test_a_login_is_not_shown():
    url = "file://user:s3cret@host/srv"
    with pytest.raises(ConfigError) as error:
        open_store(url)
    assert "s3cret" not in refusal(remote_url=url) + str(error.value)
