# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md is what its program makes, and vLLM and LMCache take what it says."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from lmcache.v1.config import LMCacheEngineConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.recipes import report
from lmcache_hybrid.config import lmcache_config
from lmcache_hybrid.config.lmcache_config import settle_lmcache_config
from lmcache_hybrid.tools.sizing import catalogue
from tests import ROOT

PAGE = (ROOT / "docs/recipes.md").read_text()


def test_the_page_is_what_the_program_makes() -> None:
    (made,) = re.findall(r"<!-- recipes:begin -->\n\n(.+)\n\n<!-- recipes:end -->", PAGE, re.S)
    assert made == report.recipes(), "run python -m benchmarks.recipes"


def test_there_are_eight_models_of_the_catalogue_with_their_pages() -> None:
    known = {model.name for model in catalogue.models()}
    assert len(report.RECIPES) == 8
    assert {recipe.name for recipe in report.RECIPES} <= known
    for recipe in report.RECIPES:
        page = (ROOT / f"docs/families/{recipe.page}.md").read_text()
        assert f"{recipe.name}: " in page  # its N


def test_the_first_lines_say_that_nothing_was_measured() -> None:
    opening = " ".join(PAGE.split("\n\n")[1].split())
    assert opening.startswith("**Computed, not measured: no GPU has run these models")


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of ``vllm serve``."""
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("recipe", report.RECIPES, ids=lambda recipe: recipe.name)
def test_the_command_and_the_file_are_taken(
    recipe: report.Recipe,
    parser: FlexibleArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = PAGE.split(f"## {recipe.name}\n")[1].partition("\n## ")[0]
    command, file = re.findall(r"```\w*\n(.+?)```", section, re.S)
    _, _, flags = command.replace("\\\n", "").partition("vllm serve ")
    parsed = parser.parse_args(shlex.split(flags))
    assert (parsed.model_tag, parsed.tensor_parallel_size) == (recipe.weights, recipe.tp)
    assert parsed.kv_transfer_config.kv_connector == "LMCacheConnectorV1"
    monkeypatch.chdir(tmp_path)
    # Of the machine that it is for.
    monkeypatch.setattr(lmcache_config, "memory_of_the_machine", lambda limit: 1 << 50)
    file = file.replace("/srv/", f"{tmp_path}/")  # the check makes the folder
    Path("lmcache.yaml").write_text(file)
    config = LMCacheEngineConfig.from_file("lmcache.yaml")
    said = yaml.safe_load(file)
    assert {name: getattr(config, name) for name in said} == said
    settle_lmcache_config(config, report.plan(recipe)["block_size"])
