# SPDX-License-Identifier: Apache-2.0
"""Stores by the scheme of their URL: served, or refused with a reason."""

import pytest
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.utils.subclass_discovery import discover_subclasses

from lmcache_hybrid.config import backends

from .lmcache_settings import assert_one_sentence, refusal


@pytest.mark.parametrize(
    "url, shown",
    [
        ("s3://user:secret@bucket", "s3://bucket"),
        ("lm://host:1", "lm://host:1"),
        ("infinistore://a:secret@b@host:1", "infinistore://host:1"),
        ("valkey://host:1", "valkey://host:1"),
        ("nothing", "nothing"),
    ],
)
def test_refuses_other_stores_without_telling_their_password(url, shown):
    message = refusal(remote_url=url)
    assert_one_sentence(message.replace("://", ""))
    assert f"remote_url={shown!r}" in message and "redis://" in message
    assert "secret" not in message


@pytest.mark.parametrize("scheme", backends.REASONS)
def test_refuses_other_stores_with_the_reason(scheme):
    message = refusal(remote_url=f"{scheme}://host:1")
    assert_one_sentence(message.replace("://", ""))
    assert f"hold states: {backends.REASONS[scheme]}; use one of fs://, redis://" in message


def schemes_of_lmcache() -> set[str]:
    """Every scheme and plugin type that an adapter of this LMCache answers to."""
    found = set()
    for cls in discover_subclasses(
        "lmcache.v1.storage_backend.connector",
        ConnectorAdapter,
        module_filter=lambda name: name.endswith("_adapter"),
        require_defined_in_module=False,
    ):
        # "plugin://" alone is Hugging Face's, which knows itself by the plugin's name.
        schema = cls().schema.removeprefix("plugin://").removesuffix("://") or "hfbucket"
        found.add(schema)
    return found


# Stores that one supported LMCache has and another one not, which says so itself.
NOT_IN_EACH = {"lm"}  # gone in 0.5.7


def test_every_store_of_this_lmcache_is_served_or_refused_with_a_reason():
    served = {*backends.REMOTE_SCHEMES} - {"rediss", "unix"}  # the adapter of redis
    known, here = served | backends.REASONS.keys(), schemes_of_lmcache()
    assert here <= known and known - here <= NOT_IN_EACH


@pytest.mark.parametrize("hosts", ["one", "one:7000,two", "user:secret@one:7000,two", ":1", ""])
@pytest.mark.parametrize("scheme", backends.SEVERAL_HOSTS)
def test_refuses_hosts_without_a_port(scheme, hosts):
    """LMCache logs a warning and goes on without the store."""
    message = refusal(remote_url=f"{scheme}://{hosts}")
    assert_one_sentence(message.replace("://", ""))
    assert "secret" not in message and f"write {scheme}://host:port,host:port" in message


def test_refuses_other_store_plugins():
    message = refusal(remote_storage_plugins=["fs", "mooncake.one"])
    assert_one_sentence(message)
    assert "remote_storage_plugins=['fs', 'mooncake.one']" in message and "fs, redis" in message


@pytest.mark.parametrize(
    "url", ["fs:///abs/path", "fs://localhost/abs/path", "fs:/abs", "fs://:/a"]
)
def test_refuses_fs_without_host_and_port(url):
    """LMCache then fails without a word and calls itself unhealthy."""
    message = refusal(remote_url=url)
    assert f"remote_url={url!r}" in message
    assert message.endswith("write fs://localhost:0/absolute/path.")


def test_refuses_fs_with_a_port_that_is_no_number():
    assert "remote_url" in refusal(remote_url="fs://localhost:zero/abs")
