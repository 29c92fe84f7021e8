# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid version --repairs`` says what is replaced in vLLM and LMCache."""

from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

import vllm_patch
from lmcache_hybrid.tools import repairs
from lmcache_hybrid.tools.cli import app


def test_every_repair_is_listed_with_its_end():
    listed = {repair.name: repair for repair in repairs.repairs()}
    files = [
        *repairs.ROOT.glob("vllm_patch/*.py"),
        *repairs.ROOT.glob("lmcache_hybrid/[!t]*/**/*.py"),
    ]
    texts = "".join(file.read_text() for file in files)
    assert len(listed) == texts.count("Remove when:") - texts.count("No bug:") > 20
    kept = listed["vllm_patch.cpu.keep_cpu_block_size"]
    assert kept.remove_when == "vLLM >= 0.33 is the oldest supported version."
    assert all(repair.does.endswith(".") and repair.remove_when for repair in listed.values())


def test_what_stands_in_lmcaches_places_is_listed():
    """What replaces something without a bug, too."""
    listed = dict(repairs.stand_ins())
    parts = "eviction_order.ARC", "disk.backend.LocalDisk"
    assert {f"lmcache_hybrid.storage.{part}" for part in parts} < listed.keys()
    makers = "storage.remote.make_connector", "storage.disk.make_backend"
    for module in (*makers, "upstream.lmcache_home"):
        assert listed[f"lmcache_hybrid.{module}.install"].startswith(("Have ", "Let "))
    assert not listed.keys() & {repair.name for repair in repairs.repairs()}
    assert all("`" not in what for what in listed.values())


def test_every_module_that_replaces_something_is_named():
    folder = Path(vllm_patch.__file__).parent
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert {module for module, _ in repairs.places()} == modules


@pytest.mark.parametrize("columns", [80, 140])
def test_the_list_can_be_read(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["version", "--repairs"])
    assert result.exit_code == 0
    assert "vllm_patch.cpu.keep_cpu_block_size" in result.stdout
    assert "Remove when: vLLM >= 0.33 is the oldest supported version." in result.stdout
    assert (
        "A VLLM_PLUGINS that does not name lmcache_hybrid switches all of it off." in result.stdout
    )
    assert "lmcache_hybrid.storage.disk.backend.LocalDisk\n" in result.stdout
    listed = result.stdout.split("\n", 1)[1]
    assert max(map(len, listed.splitlines())) <= columns
    assert "--repairs" not in CliRunner().invoke(app, ["version"]).stdout


@pytest.mark.parametrize("admitted, loaded", [(None, True), ("lmcache_hybrid", True), ("", False)])
def test_nothing_is_replaced_where_the_plugin_is_left_out(admitted, loaded, monkeypatch):
    if admitted is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", admitted)
    assert ("lmcache_hybrid" in load_plugins_by_group(DEFAULT_PLUGINS_GROUP)) is loaded
