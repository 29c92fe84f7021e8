# SPDX-License-Identifier: Apache-2.0
"""What a request asks of LMCache keeps its meaning, or is one line in the log."""

import logging

import pytest

from lmcache_hybrid.scheduler.request_options import (
    MOST_NAMES,
    NONE,
    SHOWN,
    RequestOptionsReader,
)

from .helpers import N, make_request
from .scheduler_rig import Rig, all_offers


def said(log) -> list[str]:
    return [each.getMessage() for each in log.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("value", [True, 1, "true", "True", " TRUE ", "1"])
def test_what_says_yes_is_not_stored(value, hybrid_log):
    assert RequestOptionsReader().read(make_request(params={"lmcache.skip_save": value})).skip_save
    assert not said(hybrid_log)


@pytest.mark.parametrize("value", [False, 0, "false", "False", "FALSE", "0", None])
def test_what_says_no_is_stored(value, hybrid_log):
    rig, request = Rig(), make_request(params={"lmcache.skip_save": value})
    rig.match(request)
    assert rig.forward(request, 3 * N + 1, all_offers(3)) is not None
    assert not said(hybrid_log)


@pytest.mark.parametrize("value", ["maybe", "yes", "", 2, 1.0, [True], {}])
def test_what_is_neither_is_not_stored_and_said_once(value, hybrid_log):
    rig = Rig()
    for name in ("one", "two"):
        request = make_request(name, params={"lmcache.skip_save": value})
        rig.match(request)
        assert rig.forward(request, 3 * N + 1, all_offers(3)) is None
    assert said(hybrid_log) == [
        f"lmcache.skip_save={value!r} of a request is neither true nor false; write one of them. "
        "Requests with such a value are not stored."
    ]


def test_a_value_that_is_no_tag_is_said_once_for_each_name(hybrid_log):
    rig = Rig()
    for number, (name, value) in enumerate([("user", 7.5), ("user", True), ("te\nam", "a")]):
        request = make_request(str(number), params={f"lmcache.tag.{name}": value})
        assert rig.match(request) == (0, False)
    assert said(hybrid_log) == [
        f"{shown} of a request is not a tag that LMCache takes; write a printable string "
        "without '@' and '%', or a whole number. Requests with such a tag are not cached."
        for shown in ("lmcache.tag.user=7.5", "lmcache.tag.te\\nam='a'")
    ]


@pytest.mark.parametrize(
    "name, instead",
    [
        ("lmcache.skipsave", "did you mean lmcache.skip_save?"),
        ("lmcache.SKIP_SAVE", "did you mean lmcache.skip_save?"),
        ("lmcache.tags.user", "did you mean lmcache.tag.NAME?"),
        ("lmcache.tag", "did you mean lmcache.tag.NAME?"),
        ("lmcache.dorp", "did you mean lmcache.drop?"),
        ("lmcache_skip_save", "did you mean lmcache.skip_save?"),
        ("LMCache.drop", "did you mean lmcache.drop?"),
        (
            "lmcache",
            "those of a request are lmcache.skip_save, lmcache.tag.NAME, lmcache.drop, "
            "lmcache.drop_from, lmcache.prefetch, lmcache.keep and lmcache.keep_to.",
        ),
        (
            "lmcache.q",
            "those of a request are lmcache.skip_save, lmcache.tag.NAME, lmcache.drop, "
            "lmcache.drop_from, lmcache.prefetch, lmcache.keep and lmcache.keep_to.",
        ),
    ],
)
def test_an_unknown_name_is_ignored_and_said_once(name, instead, hybrid_log):
    reader, request = RequestOptionsReader(), make_request(params={name: True, "other": 1})
    for _ in range(2):
        configs = reader.read(request)
        assert configs.tags == () and not configs.skip_save
    assert said(hybrid_log) == [
        f"{name} of a request is not a setting that LMCache knows, and is ignored; {instead}"
    ]


@pytest.mark.parametrize("params", ["lmcache", ["lmcache_drop"], {7: 1}, {"lm": 1}, None, {}])
def test_what_is_no_table_of_settings_is_left_alone(params, hybrid_log):
    request = make_request()
    request.kv_transfer_params = params
    assert RequestOptionsReader().read(request) == NONE
    assert not said(hybrid_log)


def test_what_only_another_connector_of_lmcaches_reads_is_said_once(hybrid_log):
    reader = RequestOptionsReader()
    for number in range(2):
        reader.read(make_request(params={"lmcache.max_offload_tokens": number}))
    (line,) = said(hybrid_log)
    assert "lmcache.max_offload_tokens of a request does nothing here" in line


def test_lmcache_reads_no_other_setting_of_a_request():
    """In its package: who finds a new one decides what it means here."""
    import ast
    import inspect

    from lmcache.integration.vllm import lmcache_mp_metadata, vllm_v1_adapter

    found = set()
    for module in (vllm_v1_adapter, lmcache_mp_metadata):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and "request_configs" in ast.unparse(node.func):
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and a.value}
    assert found == {"lmcache.skip_save", "lmcache.max_offload_tokens"}


@pytest.mark.parametrize("prefix", ["lmcache.", "lmcache.tag."])
def test_a_hostile_client_fills_neither_log_nor_memory(prefix, hybrid_log):
    reader = RequestOptionsReader()
    for number in range(5 * MOST_NAMES):
        reader.read(make_request(params={f"{prefix}{number}" + "x" * 10_000: "@" * 10_000}))
    lines = said(hybrid_log)
    assert len(lines) == MOST_NAMES + 1
    assert lines[-1] == "Requests name more wrong settings of LMCache than are logged here."
    assert all(len(line) < 6 * SHOWN for line in lines)
    assert all(len(name) <= SHOWN for names in reader._warned.values() for name in names)


def test_wrong_names_do_not_hide_a_wrong_value(hybrid_log):
    reader = RequestOptionsReader()
    for number in range(2 * MOST_NAMES):
        reader.read(make_request(params={f"lmcache.{number}": 1}))
    hybrid_log.clear()
    reader.read(make_request(params={"lmcache.skip_save": "no"}))
    reader.read(make_request(params={"lmcache.tag.user": "@"}))
    assert len(said(hybrid_log)) == 2
