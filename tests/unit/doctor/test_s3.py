# SPDX-License-Identifier: Apache-2.0
"""A test record through a bucket, and what is told of one that is missing or away."""

import pytest

from lmcache_hybrid.tools.doctor import backends
from lmcache_hybrid.tools.doctor.backends import check_backends
from tests.bucket import EXTRA

from .findings import ERROR, MODEL, OK, assert_sentences, only


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(backends, "WAIT_SECONDS", 5.0)


def test_a_bucket_takes_a_record_and_is_left_as_it_was(context, bucket):
    bucket.empty()
    found = context(local_cpu=False, remote_url=bucket.url, extra_config=EXTRA, model=MODEL)
    told = only(assert_sentences(check_backends(found)))
    assert (told.check, told.status) == ("remote_url", OK)
    assert bucket.names() == []


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_told(context, bucket):
    found = context(local_cpu=False, remote_url=bucket.url, extra_config=EXTRA)
    bucket.drop()
    try:
        told = only(assert_sentences(check_backends(found)))
    finally:
        bucket.make()
    assert told.status == ERROR and "S3 answered 404 NoSuchBucket" in told.message


@pytest.mark.slow
def test_a_server_that_is_away_is_told(context):
    found = context(local_cpu=False, remote_url="s3://127.0.0.1:1", extra_config=EXTRA)
    told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR and "s3://127.0.0.1:1 cannot be used: " in told.message
