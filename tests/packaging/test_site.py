# SPDX-License-Identifier: Apache-2.0
"""What docs/hooks.py does to links: those of the repository become those of the site."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

import lmcache_hybrid

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(hooks: ModuleType, source: str, link: str) -> str:
    """What becomes of a link on a page."""
    uri = source.removeprefix("docs/")
    file = SimpleNamespace(abs_src_path=str(ROOT / source), src_uri=uri)
    return hooks.on_page_markdown(link, SimpleNamespace(file=file))


@pytest.mark.parametrize(
    "source, link, expected",
    [
        ("docs/a.md", "[`x`](../examples/lmcache-fs.yaml)", "[`x`](examples/lmcache-fs.yaml)"),
        ("docs/a/b.md", "[x](../../examples/offline.py)", "[x](../examples/offline.py)"),
        ("docs/a.md", "[x](../examples/README.md#for-you)", "[x](examples/README.md#for-you)"),
        ("docs/a.md", "[x](../CHANGELOG.md)", "[x](CHANGELOG.md)"),
        ("docs/a.md", "[x](b.md#c)", "[x](b.md#c)"),
        ("docs/a.md", "[x](https://a.b/c)", "[x](https://a.b/c)"),
        ("docs/a.md", "[`test_docs.py`](../tests/packaging/test_docs.py)",
         "`tests/packaging/test_docs.py`"),
        ("docs/a.md", "[the test](../tests/sim)", "the test (`tests/sim`)"),
        ("examples/README.md", "[x](../docs/events.md#a)", "[x](../events.md#a)"),
        ("examples/README.md", "[x](offline.py)", "[x](offline.py)"),
        ("examples/README.md", "[`grafana/`](docker/grafana)",
         "`examples/docker/grafana` ([dashboards.yaml](docker/grafana/dashboards.yaml), "
         "[datasource.yaml](docker/grafana/datasource.yaml))"),
        ("CHANGELOG.md", "[x](docs/gpu.md)", "[x](gpu.md)"),
    ],
)  # fmt: skip
def test_a_link_leads_to_the_file_in_the_site_or_names_it(
    hooks: ModuleType, source: str, link: str, expected: str
) -> None:
    assert shown(hooks, source, link) == expected


def test_a_link_to_nothing_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(PluginError, match="gone.yaml, which does not exist"):
        shown(hooks, "docs/a.md", "[x](../examples/gone.yaml)")


def test_every_example_is_in_the_site(hooks: ModuleType) -> None:
    copied = {str(path.relative_to(ROOT / "examples")) for path in hooks.copied()[1:]}
    assert {"README.md", "offline.py", "lmcache-s3.yaml", "docker/Dockerfile"} < copied
    assert {"observability/dashboard.json", "docker/prometheus.yml"} < copied
    assert not [name for name in copied if "__pycache__" in name]


def test_the_footer_has_the_version(hooks: ModuleType) -> None:
    config = hooks.on_config(SimpleNamespace(site_name="lmcache-hybrid"))
    assert lmcache_hybrid.__version__ in config.copyright
