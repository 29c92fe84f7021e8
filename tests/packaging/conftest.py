# SPDX-License-Identifier: Apache-2.0
"""What ``python -m build`` makes of this checkout, once for all tests of it."""

from pathlib import Path

import pytest

from tests.packaging.building import build, copy_sources


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_sources(tmp_path_factory.mktemp("build") / "source"))


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (sdist,) = dist.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="session")
def wheel(dist: Path, sdist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    assert sdist.name.removesuffix(".tar.gz") == wheel.name.split("-py3")[0]
    return wheel
