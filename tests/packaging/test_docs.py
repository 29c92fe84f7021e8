# SPDX-License-Identifier: Apache-2.0
"""What pages say beside the code that knows better."""

import ast
import inspect
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import vllm
import yaml
from lmcache.v1.config import _CONFIG_DEFINITIONS
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core_client import EngineCoreClient

from benchmarks.peers import report as peers_report
from benchmarks.user_bench import __main__ as user_bench
from benchmarks.weights import report as weights_report
from lmcache_hybrid.config import stores
from lmcache_hybrid.config.lmcache_options import EXTRA_OPTIONS, OPTIONS
from lmcache_hybrid.config.own_options import OWN_OPTIONS
from lmcache_hybrid.tools.sizing import catalogue
from lmcache_hybrid.tools.sizing.blocks import PLATFORMS, compute
from lmcache_hybrid.tools.tiny_families import FAMILIES
from tests import ROOT
from tests.sim import report as sim_report
from tests.soak import report as soak_report

DOCS = ROOT / "docs"


def pages() -> dict[str, str]:
    """Text of every page by its path, README and the like among them."""
    files = [*ROOT.glob("*.md"), ROOT / "examples/README.md", *DOCS.rglob("*.md")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


class RecordedLLM:
    """``vllm.LLM`` without an engine: takes what the real one takes."""

    started: list[KVTransferConfig] = []
    init = vllm.LLM.__init__

    def __init__(self, model: str, **options: Any) -> None:
        inspect.signature(RecordedLLM.init).bind(self, model, **options)
        assert options.keys() <= {field.name for field in fields(EngineArgs)}
        self.started.append(KVTransferConfig(**options["kv_transfer_config"]))
        self.llm_engine = SimpleNamespace(engine_core=create_autospec(EngineCoreClient))

    def generate(self, prompts: list[str], params: vllm.SamplingParams) -> list[Any]:
        assert isinstance(params, vllm.SamplingParams)
        texts = [vllm.CompletionOutput(0, "text", [1], None, None)]
        return [vllm.RequestOutput("1", p, [1], None, texts, True) for p in prompts]


def test_python_of_the_pages_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the engine; examples/offline.py, which runs, takes the same connector."""
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "")
    monkeypatch.setattr(vllm, "LLM", RecordedLLM)
    texts = pages().values()
    blocks = [b for text in texts for b in re.findall(r"```python\n(.+?)```", text, re.S)]
    assert blocks
    for block in blocks:
        RecordedLLM.started.clear()
        exec(compile(block, "page", "exec"), {"__name__": "__main__"})
        (transfer,) = RecordedLLM.started
        written = {"kv_connector": transfer.kv_connector, "kv_role": transfer.kv_role}
        assert json.dumps(written) in block
        assert json.dumps(written) in (ROOT / "examples/common.py").read_text()
        assert (ROOT / os.environ["LMCACHE_CONFIG_FILE"]).is_file()


def test_supported_pairs_are_written_once() -> None:
    """So that a new one is one line, which tests/unit/test_compat_matrix.py compares."""
    pairs = re.compile(r"\*\*vLLM \d\S* with LMCache|>=\s*\d+\.\d+")
    assert [name for name, text in pages().items() if pairs.search(text)] == ["docs/compat.md"]


def test_tested_versions_are_those_of_the_makefile() -> None:
    defaults = dict(re.findall(r"^(\w+) \?= (.+)$", (ROOT / "Makefile").read_text(), re.M))
    vllm, lmcache = (defaults[name] for name in ("VLLM", "LMCACHE"))
    torch = defaults["TORCH_VERSION"]
    said = f"vLLM {vllm} (CPU build), LMCache {lmcache}, torch {torch}, Python 3.11"
    for name in ("README.md", "docs/families/index.md"):
        assert said in pages()[name], name


def test_n_of_published_models_is_what_plan_says() -> None:
    text = "\n".join((DOCS / "families").joinpath(p).read_text() for p in families())
    (*lines,) = re.findall(r"^\| N on one GPU, .*?\| (.*) \|$", text, re.M)
    said = dict(re.findall(r"(\S+): ([\d,]+)(?:, |$)", ", ".join(lines)))
    assert said == {
        known.name: f"{compute(known.shape, PLATFORMS['gpu']).block_size:,}"
        for known in catalogue.models()
    }


def families() -> list[str]:
    return sorted(page.name for page in (DOCS / "families").glob("*.md"))


def test_no_mark_was_left_to_be_filled_in() -> None:
    assert not [name for name, text in pages().items() if re.search(r"@@|TODO|FIXME", text)]


def test_every_refused_option_is_on_the_options_page() -> None:
    text = (DOCS / "options.md").read_text()
    refused = [name for name, option in (OPTIONS | EXTRA_OPTIONS).items() if option.refused]
    for name in (*refused, *OWN_OPTIONS):
        assert f"{name}`" in text or f"{name}:" in text, name
    for scheme in stores.BY_SCHEME:
        assert f"`{scheme}://" in text


def test_the_options_page_has_the_defaults() -> None:
    """LMCache's, and which settings of ours there are."""
    text = (DOCS / "options.md").read_text()
    rows = re.findall(r'^\| <a id="(\w+)"></a>(.+?) \| (.*?) \| (.*?) \| ', text, re.M)
    ours = {f"lmcache.{anchor}" for anchor, name, *_ in rows if name.startswith("`lmcache.")}
    assert ours == {*OWN_OPTIONS}
    spelt = {"none": None, "`true`": True, "`false`": False}
    compared = 0
    for _, name, _, defaults in rows:
        for option, default in zip(re.findall(r"`(\w+)`", name), defaults.split("; ")):
            if option in _CONFIG_DEFINITIONS and re.fullmatch(r"none|\d+|`\w+`", default):
                value = spelt.get(default, default.strip("`"))
                real = _CONFIG_DEFINITIONS[option]["default"]
                assert value == real or float(value) == real, option
                compared += 1
    assert compared > 14


def test_every_setting_of_the_tuning_page_is_on_the_options_page() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", (DOCS / "tuning.md").read_text(), re.M)
    named = re.findall(r"`(lmcache\.hybrid_\w+|--[a-z-]+|[a-z]+_\w+)", " ".join(rows))
    options = (DOCS / "options.md").read_text()
    assert len(named) > 12
    assert not [name for name in named if f"`{name}" not in options]


def test_tested_families_have_a_page() -> None:
    """Each tiny model's class in ``transformers`` is named on a page, as vLLM names it."""
    pages = "".join(page.read_text() for page in (DOCS / "families").glob("*.md"))
    for name, family in FAMILIES.items():
        if name not in ("llama", "gemma3"):  # no recurrent layers
            assert f"`{family.model_class}`" in pages


def test_links_of_the_readme() -> None:
    for file in ("README.md", "CONTRIBUTING.md", "examples/README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
            assert (ROOT / file).parent.joinpath(target).exists(), f"{file}: {target}"


def test_every_test_that_is_named_exists() -> None:
    """In the docs, in the table of planted defects, and where programs run single tests."""
    files = [DOCS / "generated/mutants.json", ROOT / "Makefile", ROOT / ".ci/run"]
    texts = [file.read_text() for file in (*files, *ROOT.glob("tests/compat/*.py"))]
    # Its table quotes tests of the day it was made.
    texts += [text for name, text in pages().items() if name != "docs/compat.md"]
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", "\n".join(texts))
    for file, test in set(named):
        assert (ROOT / file).is_file(), f"{file} is gone"
        nodes = ast.walk(ast.parse((ROOT / file).read_text())) if test else ()
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert not test or test in names, f"{file} holds no {test}"


def test_drawings_are_in_their_pages_and_fetch_nothing() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    drawings = sorted((DOCS / "img").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        assert f"(img/{drawing.name})" in pages
        assert not re.search(r'(href|src)="(?!#)|@import|url\((?!#)', drawing.read_text())


def test_generated_files_are_named_with_their_command() -> None:
    """And nothing that a program writes lies among the pages."""
    lines = (DOCS / "generated/README.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\S+)`", row[1])]
    assert sorted(named) == sorted(
        p.name for p in (DOCS / "generated").iterdir() if p.suffix != ".md"
    )
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for row in rows:
        command = row[2].strip(" `").split()
        assert command[0] != "make" or command[1] in rules, command
    assert not [*DOCS.glob("*.json"), *DOCS.glob("*.svg")]


def rows_of(page: str, marker: str) -> set[str]:
    """Lines of the table that a program writes between its marks."""
    (text,) = re.findall(rf"<!-- {marker}:begin -->(.+)<!-- {marker}:end -->", page, re.S)
    return {line for line in text.splitlines() if line}


def test_tables_of_the_reliability_page_are_those_of_the_figures() -> None:
    """A row that a report has learned since comes with its next run."""
    page = pages()["docs/reliability.md"]
    weights, simulated, soaked = (
        json.loads((DOCS / f"generated/{name}.json").read_text())
        for name in ("weights", "simulation", "soak")
    )
    assert rows_of(page, "weights") <= {*weights_report.table(weights).splitlines()}
    assert rows_of(page, "simulation") <= {*sim_report.table(simulated["parts"]).splitlines()}
    assert rows_of(page, "soak") <= {*soak_report.table(soaked).splitlines()}
    for marker in ("weights", "simulation", "soak"):
        assert len(rows_of(page, marker)) > 6


def test_the_tables_of_connectors_are_those_of_the_figures(tmp_path: Path) -> None:
    figures = json.loads((DOCS / "generated/peers.json").read_text())
    text = pages()["docs/connectors.md"]
    page = tmp_path / "connectors.md"
    page.write_text(re.sub(r"(<!-- peers:begin -->).+(?=<!-- peers:end)", r"\1", text, flags=re.S))
    peers_report.fill(page, figures)
    assert page.read_text() == text, "run python -m benchmarks.peers --render-only"
    assert len(rows_of(text, "peers")) > 14


def test_the_page_shows_what_bench_prints() -> None:
    figures = json.loads((DOCS / "generated/bench.json").read_text())
    shown = user_bench.screen(figures).splitlines()
    assert len(shown) > 15
    assert rows_of(pages()["docs/performance.md"], "bench") == set(shown)
    assert figures["flags"] == [*user_bench.FLAGS] and figures["model"] == user_bench.MODEL
    words = ("bench", user_bench.MODEL, "--out", "bench.json", "--", *user_bench.FLAGS)
    assert " ".join(words) in pages()["docs/performance.md"]


def test_site_fetches_nothing() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert "extra_javascript" not in site
    for sheet in site["extra_css"]:
        assert not re.search(r"@import|url\(", (DOCS / sheet).read_text())


def test_the_design_notes_name_files_and_functions_that_exist() -> None:
    table = re.findall(r"^\| [^|]+\? \| ([^|]+) \|", pages()["docs/design.md"], re.M)
    assert len(table) > 10
    for answer in table:
        for file, names in re.findall(r"`([\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", answer):
            path = next(
                (p for p in (ROOT / file, ROOT / "lmcache_hybrid" / file) if p.exists()), None
            )
            assert path is not None, f"{file} is in no room"
            for name in re.findall(r"\w+", names):
                assert re.search(rf"(def|class) {name}\b", path.read_text()), (
                    f"{name} is not in {file}"
                )


def _lowest_and_highest(page: str, table: str) -> tuple[float, float]:
    """How many times as fast as cold a hit in a store is, in a table of docs/performance.md."""
    (rows,) = re.findall(rf"<!-- {table}:begin -->(.+?)<!-- {table}:end -->", page, re.S)
    gains = re.findall(r"^\| (?:ram|disk|redis) (?:\|[^|]+){3}\| ([\d.]+) \|", rows, re.M)
    return min(map(float, gains)), max(map(float, gains))


def test_figures_of_the_readme_are_those_of_the_pages() -> None:
    shown = " ".join((ROOT / "README.md").read_text().split())
    found = pages()
    gain = " ".join(found["docs/performance.md"].split())
    (times,) = re.findall(r"asked before is answered (\d+ to \d+) times as fast", gain)
    (new,) = re.findall(r"new prompt's first token takes ([\d.]+ to [\d.]+) times", gain)
    (token,) = re.findall(r"nothing to load or store, takes ([\d.]+ to [\d.]+) times", gain)
    (beside,) = re.findall(r"loads for other requests, an answer takes ([\d.]+ to [\d.]+) ", gain)
    assert f"[{times} times as fast](docs/performance.md) in the best case" in shown
    assert f"A new prompt takes {new} times the time" in shown
    assert f"a token of a running answer {token} times" in shown
    assert f"an answer beside loads of others {beside} times" in shown
    whole = _lowest_and_highest(found["docs/performance.md"], "whole_blocks")
    short = _lowest_and_highest(found["docs/performance.md"], "short_prompts")
    of_whole = " to ".join(dict.fromkeys(f"{each:.0f}" for each in whole))
    assert f"It is {of_whole} times where a whole block is left" in shown
    assert [round(gain) for gain in short] == [5, 5] and "5 times for a prompt of 500" in shown
    rows = re.findall(
        r"^\| \[([\w.-]+)\]\S+ \| \d+ \| [\d,]+ \| \d+ \| ([\d.]+) \|",
        found["docs/recipes.md"],
        re.M,
    )
    sizes = dict(rows)
    assert f"[{sizes['Qwen3-Next-80B-A3B']} GiB](docs/recipes.md) with Qwen3-Next-80B-A3B" in shown
    assert f"{sizes['Qwen3.6-27B']} GiB with Qwen3.6-27B" in shown


def test_the_template_asks_for_what_the_page_says() -> None:
    template = (ROOT / ".github/ISSUE_TEMPLATE/accept.md").read_text()
    (title,) = re.findall(r'^title: "(.+)"$', template, re.M)
    body = template.split("---\n")[2].strip()
    assert f"```\nTitle: {title}\n\n{body}\n```" in pages()["docs/accept.md"]
