# SPDX-License-Identifier: Apache-2.0
"""Faults of a bucket under a running engine: the answer is the computed one, the engine lives."""

import pytest

from tests.e2e import records
from tests.e2e.broken_store import Site
from tests.e2e.engine import Answer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("opened", ["s3"], indirect=True, scope="module"),
]
AWAY = "is gone from|failed|did not answer|does not say where"


@pytest.mark.parametrize(
    "damage, label, reason",
    [
        (records.flipped, "%s0-", "^checksum"),
        (records.flipped_in_header, "%a2-", "^header"),
        (records.truncated, "%s0-", "^length"),
        (records.emptied, "%s0-", "cannot be read from RemoteBackend"),
    ],
    ids=["state", "header", "cut", "empty"],
)
def test_a_damaged_object_is_rejected_and_computed_instead(
    site: Site, damage, label: str, reason: str
) -> None:
    prompt = site.store()
    site.damage(prompt, damage, label)
    site.fails(lambda: site.engine.ask(prompt.ids), prompt, reason)
    site.serves(prompt)


def test_an_object_that_a_lifecycle_rule_deleted_is_a_miss(site: Site) -> None:
    prompt = site.store()
    site.shelf.remove(prompt.record())
    site.misses(prompt)
    site.serves(prompt)


def test_objects_deleted_between_lookup_and_load_fail_the_load(site: Site) -> None:
    prompt = site.store()
    site.fails(
        lambda: site.engine.ask_held(prompt.ids, lambda: site.lose(prompt)), prompt, "is gone from"
    )
    site.serves(prompt)


def test_without_memory_to_load_into_the_prompt_is_computed(site: Site) -> None:
    prompt = site.store()

    def ask() -> Answer:
        try:
            return site.engine.ask_held(prompt.ids, lambda: site.inside("fill_pool"))
        finally:
            site.inside("free_pool")

    site.fails(ask, prompt, "no room to read into .max_local_cpu_size")
    site.serves(prompt)


@pytest.mark.slow
def test_a_server_that_dies_within_an_object_fails_the_load(site: Site) -> None:
    prompt = site.store()
    size = len(site.shelf.read(prompt.record()))
    try:
        site.fails(
            lambda: site.engine.ask_held(prompt.ids, lambda: site.proxy.cut_after(size // 2)),
            prompt,
            AWAY,
        )
    finally:
        site.proxy.restore()
    site.recovers(prompt, site.good, seconds=30)


@pytest.mark.slow
def test_a_server_restarted_empty_is_a_miss(site: Site) -> None:
    prompt = site.store()
    try:
        site.fails(lambda: site.engine.ask_held(prompt.ids, site.server.kill), prompt, AWAY)
    finally:
        site.server.start()
    assert site.shelf.names() == set()
    site.recovers(prompt, site.good, seconds=30)


def test_a_server_paused_in_a_load_fails_it(site: Site) -> None:
    prompt = site.store()

    def ask() -> Answer:
        try:
            return site.engine.ask_held(prompt.ids, site.proxy.pause)
        finally:
            site.proxy.resume()

    site.fails(ask, prompt, AWAY)
    site.recovers(prompt, site.good, seconds=30)


def test_a_server_paused_in_a_lookup_is_left_alone_for_a_while(site: Site) -> None:
    prompt = site.store()

    def ask() -> Answer:
        site.proxy.pause()
        try:
            return site.engine.ask(prompt.ids)
        finally:
            site.proxy.resume()

    try:
        # The answer may still come, to nobody.
        seen = site.watch(ask, prompt, but="claims")
        assert seen.log.count("RemoteBackend did not answer a cache lookup in time") == 1
        assert seen.warnings == [] and seen.worker["failed_loads"] == 0
    finally:
        site.recovers(prompt, site.good, seconds=30)


@pytest.mark.slow
def test_a_bucket_that_was_deleted_takes_nothing_and_misses(site: Site) -> None:
    prompt = site.store()
    site.server.drop()
    try:
        _, failed_writes = site.compute()
        assert failed_writes > 0
        site.misses(prompt)
    finally:
        site.server.make()
    site.recovers(prompt, site.good, seconds=30)
