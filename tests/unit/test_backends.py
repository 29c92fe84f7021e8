# SPDX-License-Identifier: Apache-2.0
"""Stores by the scheme of their URL: served, or refused with a reason."""

import pytest
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.utils.subclass_discovery import discover_subclasses

from lmcache_hybrid.config import stores
from lmcache_hybrid.config.lmcache_config import settle_lmcache_config
from lmcache_hybrid.config.redis_credentials import SEVERAL_HOSTS

from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, refusal


@pytest.mark.parametrize(
    "url, shown",
    [
        ("azure://user:secret@bucket", "azure://bucket"),
        ("lm://host:1", "lm://host:1"),
        ("infinistore://a:secret@b@host:1", "infinistore://host:1"),
        ("nothing", "nothing"),
        # LMCache has no connector for these, logs a warning and goes on without the store.
        ("REDIS://user:secret@host:1", "REDIS://host:1"),
        ("S3://records.local", "S3://records.local"),
        ("FS://localhost:0/srv", "FS://localhost:0/srv"),
        ("redis:/host:1", "redis:/host:1"),
        ("fs:/abs", "fs:/abs"),
        ("redis:user:secret@host:1", "host:1"),
    ],
)
def test_refuses_other_stores_without_telling_their_password(url, shown):
    message = refusal(remote_url=url)
    assert_one_sentence(message.replace("://", ""))
    assert f"remote_url={shown!r}" in message and "redis://" in message
    assert "secret" not in message


@pytest.mark.parametrize("scheme", stores.REASONS)
def test_refuses_other_stores_with_the_reason(scheme):
    message = refusal(remote_url=f"{scheme}://host:1")
    assert_one_sentence(message.replace("://", ""))
    assert f"hold states: {stores.REASONS[scheme]}; use one of fs://, redis://" in message


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
    # The adapter of redis serves rediss and unix; file is no scheme of LMCache's.
    served = {*stores.BY_SCHEME} - {"rediss", "unix", "file"}
    known, here = served | stores.REASONS.keys(), schemes_of_lmcache()
    assert here <= known and known - here <= NOT_IN_EACH


@pytest.mark.parametrize("hosts", ["one", "one:7000,two", "user:secret@one:7000,two", ":1", ""])
@pytest.mark.parametrize("scheme", SEVERAL_HOSTS)
def test_refuses_hosts_without_a_port(scheme, hosts):
    """LMCache logs a warning and goes on without the store."""
    message = refusal(remote_url=f"{scheme}://{hosts}")
    assert_one_sentence(message.replace("://", ""))
    assert "secret" not in message and f"write {scheme}://host:port,host:port" in message


@pytest.mark.parametrize(
    "rest, wrong",
    [
        ("host/abc", "its database is not a number; write one, as in redis://host:6379/0."),
        ("host:6379/3x", "its database is not a number"),
        ("user:secret@host:6379/records", "its database is not a number"),
        ("host:1,other:2", "it names several servers; write one, or those of a cluster or all"),
        ("u:secret@host:1,redis://other:2", "it names several servers"),
        ("host?db=abc", "in connection URL; correct it."),
        ("host:1?socket_timeout=x", "in connection URL; correct it."),
        ("host:1?timeout=5", "its setting 'timeout' is none of Redis' connections"),
        ("host:1?protocol=3", "its setting protocol is not for records; remove it"),
        ("host:1?decode_responses=true", "its setting decode_responses is not for records"),
        ("$(REDIS_HOST):6379", "has $(REDIS_HOST):6379 in it, which is taken as it is written"),
        (":${REDIS_PASSWORD}@host:6379", "has ${REDIS_PASSWORD} in it"),
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_refuses_what_redis_py_would_take_for_the_first_database(scheme, rest, wrong):
    message = refusal(remote_url=f"{scheme}://{rest}")
    assert_one_sentence(message.replace("://", ""))
    assert f"LMCache option remote_url='{scheme}://" in message and wrong in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "url",
    [
        *("redis://host", "redis://host/", "redis://host:6379/3", "rediss://me:p%2Fw@host/0"),
        *("redis://host/abc?db=2", "redis://[::1]:6379/1", "unix:///run/redis.sock?db=2"),
        *(
            "redis://me:p,w@host:6379",
            "redis-sentinel://me:pw@a:1,b:2",
            "redis-cluster://a:1",
            "redis-cluster://[fd00::1]:6379,[fd00::2]:6379",
            "rediss://:$ecret@host?ssl_cert_reqs=none&health_check_interval=2",
            "redis://host?protocol=2&decode_responses=false",
            "valkey://host:6379",
        ),
    ],
)
def test_serves_each_form_of_a_redis_url(url):
    settle_lmcache_config(lmcache_config(remote_url=url), BLOCK)


S3 = {"remote_url": "s3://records.s3.eu-west-1.amazonaws.com"}
OF_S3 = {"s3_region": "eu-west-1"}
OF_A_SESSION = {
    "aws_access_key_id": "A",
    "aws_secret_access_key": "b",
    "aws_session_token": "IQoJ",
}


@pytest.mark.parametrize("chunk_meta", [{}, {"save_chunk_meta": False}], ids=str)
@pytest.mark.parametrize(
    "url",
    [
        *(S3["remote_url"], "s3://127.0.0.1:9000", "s3://records.local", "s3://s3.local"),
        *("s3://kv.example.com", "s3://records.s3.dualstack.eu-west-1.amazonaws.com"),
    ],
)
def test_serves_a_bucket_with_lmcaches_options(url, chunk_meta):
    extra = {"s3_region": "eu-west-1", "s3_num_io_threads": "8", "s3_prefer_http2": False}
    settle_lmcache_config(lmcache_config(remote_url=url, extra_config=extra | chunk_meta), BLOCK)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3://user:secret@b.s3", "s3://b.s3/folder", "s3://b.s3/", "s3://b.s3?x=1"),
        *("s3://bucket", "s3://s3.eu-west-1.amazonaws.com", "s3://s3.amazonaws.com"),
    ],
)
def test_refuses_a_bucket_that_is_no_host_name(url):
    message = refusal(remote_url=url, extra_config={"s3_region": "eu-west-1"})
    assert_one_sentence(message.replace("://", ""))
    assert "remote_url='s3:" in message and "secret" not in message


@pytest.mark.parametrize(
    "server",
    [
        *("s3.amazonaws.com", "s3.eu-west-1.amazonaws.com", "s3-eu-west-1.amazonaws.com:443"),
        "s3.dualstack.eu-west-1.amazonaws.com",
    ],
)
def test_refuses_a_bucket_with_a_dot_which_no_certificate_of_aws_covers(server):
    url = f"s3://kv.example.com.{server}"
    message = refusal(remote_url=url, extra_config=OF_S3)
    assert_one_sentence(message.replace("://", ""))
    assert f"remote_url={url!r} names the bucket 'kv.example.com'" in message
    assert "use a bucket without a dot" in message
    plain = OF_S3 | {"disable_tls": True}
    settle_lmcache_config(lmcache_config(remote_url=url, extra_config=plain), BLOCK)


@pytest.mark.parametrize(
    "extra, setting",
    [
        ({}, "extra_config.s3_region is not set"),
        ({"s3_region": None}, "extra_config.s3_region is not set"),
        ({"s3_region": "us-east-1"}, "set it to eu-west-1"),
        (OF_S3 | OF_A_SESSION, "extra_config.aws_session_token is read by nobody"),
        (OF_S3 | {"save_chunk_meta": True}, "extra_config.save_chunk_meta=True"),
        (OF_S3 | {"s3_num_io_threads": "many"}, "s3_num_io_threads='many'"),
        (OF_S3 | {"s3_num_io_threads": 0}, "s3_num_io_threads=0"),
    ],
)
def test_refuses_options_with_which_lmcache_would_do_without_the_bucket(extra, setting):
    message = refusal(**S3, extra_config=extra)
    assert_one_sentence(message.replace("://", ""))
    assert setting in message and "IQoJ" not in message


@pytest.mark.parametrize(
    "host, tls_off, told",
    [
        ("records.s3.eu-west-1.amazonaws.com", False, False),
        ("records.ceph.internal:7480", True, True),
        ("10.0.0.1", True, True),
        ("127.0.0.1:9000", True, False),
        ("records.localhost", True, False),
    ],
)
def test_a_bucket_without_tls_is_told(host, tls_off, told):
    config = lmcache_config(remote_url=f"s3://{host}", extra_config={"disable_tls": tls_off})
    assert stores.in_the_clear(config) == [f"s3://{host}"] * told


def test_refuses_other_store_plugins():
    message = refusal(remote_storage_plugins=["fs", "mooncake.one"])
    assert_one_sentence(message)
    assert "remote_storage_plugins=['fs', 'mooncake.one']" in message and "fs, redis" in message


@pytest.mark.parametrize("plugins", [["fs", "fs"], [1], [None]], ids=str)
def test_refuses_plugins_that_lmcache_would_not_open(plugins):
    """Of two with one name it opens one and forgets it."""
    message = refusal(remote_storage_plugins=plugins)
    assert_one_sentence(message)
    assert f"remote_storage_plugins={plugins}" in message


@pytest.mark.parametrize(
    "url",
    [
        *("http://a:1", "h:6379", "REDIS://h:1", "bob:s3cret@h:1", "redis:/bob:s3cret@h:1", 6379),
        *("redis://[a", "redis://a:b", "redis-cluster://a"),
    ],
)
def test_refuses_urls_that_are_none_of_a_redis_plugins(url):
    """LMCache would go on without the store."""
    settings = {"remote_storage_plugins": ["redis"], "extra_config": {"redis_url": url}}
    message = refusal(**settings)
    assert_one_sentence(message)
    assert message.startswith("LMCache option extra_config.redis_url=") and "s3cret" not in message
    (place,) = stores.places(lmcache_config(**settings))
    assert "s3cret" not in place.title + place.shown


def test_a_redis_plugin_does_not_take_the_url_of_another_store():
    """LMCache's own falls back to it."""
    settings = {"remote_storage_plugins": ["redis"], "remote_url": "file:///srv"}
    assert "set extra_config.redis_url to redis://host:port" in refusal(**settings)


@pytest.mark.parametrize("url", ["fs:///abs/path", "fs://localhost/abs/path", "fs://:/a"])
def test_refuses_fs_without_host_and_port(url):
    """LMCache then fails without a word and calls itself unhealthy."""
    message = refusal(remote_url=url)
    assert f"remote_url={url!r}" in message
    assert message.endswith("write fs://localhost:0/absolute/path.")


def test_refuses_fs_with_a_port_that_is_no_number():
    assert "remote_url" in refusal(remote_url="fs://localhost:zero/abs")
