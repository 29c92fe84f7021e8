# SPDX-License-Identifier: Apache-2.0
"""Both homes of LMCache's in-process part: the installed release's, and small ones made here.

What imports do to a process is asked in processes of their own.
"""

import json
import os
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from lmcache_hybrid.upstream import lmcache_home
from tests.compat.names.resolver import Tree, imported

ROOT = Path(__file__).parents[2]
# LMCache moved its in-process part in this release; a pre-release of it has moved it, too.
MOVED = Version(Version(version("lmcache")).base_version) >= Version("0.5.7")
ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
INSTALL = "from lmcache_hybrid.upstream import lmcache_home; print(lmcache_home.install())\n"


def python(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh process that finds packages in ``path`` first."""
    folders = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=120
    )


def run(code: str, *path: Path, **environment: str) -> list[str]:
    """The lines that ``code`` prints."""
    done = python(code, *path, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with an ``lmcache`` that has moved some modules.

    ``v1.both`` is in both homes, ``v1.rpc`` is a package that moved as a whole.
    """
    files = {
        "__init__.py": "",
        "v1/__init__.py": "",
        "v1/both.py": "NAME, HERE = 'old', 1",
        "inprocess/__init__.py": "",
        "inprocess/v1/__init__.py": "",
        "inprocess/v1/both.py": "NAME, THERE = 'new', 2",
        "inprocess/v1/engine.py": "print('engine runs')\nclass Engine: ...",
        "inprocess/v1/broken.py": "import no_such_library",
        "inprocess/v1/rpc/__init__.py": "print('rpc runs')",
        "inprocess/v1/rpc/zmq.py": "print('zmq runs')\nfrom . import transport",
        "inprocess/v1/rpc/transport.py": "print('transport runs')",
    }
    for name, text in files.items():
        file = tmp_path / "lmcache" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


# The installed release


@pytest.mark.parametrize("name", lmcache_home.NAMES)
def test_the_installed_release_has_each_name_in_one_of_its_homes(name):
    taken = getattr(lmcache_home, name)
    home = lmcache_home.NEW if MOVED else lmcache_home.OLD
    assert taken.__module__ == f"{home}.{lmcache_home.NAMES[name]}"
    assert pickle.loads(pickle.dumps(taken)) is taken


def test_no_file_imports_the_in_process_part_from_either_home():
    """On the release that has the old home only, everything else would let it pass."""
    folders = ("lmcache_hybrid", "vllm_patch", "benchmarks", "examples", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    used = {module for module, _ in imported(files, ("lmcache",))}
    homes = {f"lmcache.{module}" for module in lmcache_home.NAMES.values()}
    assert not {module for module in used if module.startswith(lmcache_home.NEW)} | used & homes
    tree = Tree.installed("lmcache")
    assert [module for module in used if tree.module(module) is None] == []


@pytest.mark.slow
def test_vllms_connector_finds_lmcaches_adapter_with_the_plugin_only_where_it_moved():
    """What vLLM's class does for a dense model, with the plugin loaded as vLLM loads it."""
    code = (
        "import logging, sys, vllm.plugins\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "vllm.plugins.load_general_plugins()\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector "
        "import LMCacheConnectorV1\n"
        f"from {ADAPTER} import LMCacheConnectorV1Impl as adapter\n"
        "print('adapter', adapter.__module__)\n"
    )
    home = lmcache_home.NEW if MOVED else lmcache_home.OLD
    lines = run(code, VLLM_PLUGINS="lmcache_hybrid")
    assert f"adapter {home}.{ADAPTER.removeprefix('lmcache.')}" in lines
    told = [line for line in lines if "has moved" in line]
    assert len(told) == MOVED
    assert all(version("lmcache") in line and ADAPTER in line for line in told)
    # Without the plugin it is what it was before this package: on 0.5.7 an error.
    without = python(code, VLLM_PLUGINS="")
    assert (without.returncode != 0) == MOVED
    assert (f"No module named '{ADAPTER}'" in without.stderr) == MOVED


def test_registering_imports_nothing_of_lmcache():
    code = (
        INSTALL + "import sys\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('lmcache', 'vllm')])\n"
    )
    assert run(code) == [str(MOVED), "[]"]


# Small releases


def test_a_module_that_moved_is_one_object_under_both_names_and_runs_once(release):
    code = INSTALL + (
        "import lmcache.v1.engine, lmcache.inprocess.v1.engine as new, sys\n"
        "old = sys.modules['lmcache.v1.engine']\n"
        "print(old is new, lmcache.v1.engine is new, new.__name__, new.__spec__.name)\n"
        "print(old.Engine.__module__)\n"
    )
    name = "lmcache.inprocess.v1.engine"
    assert run(code, release) == ["True", "engine runs", f"True True {name} {name}", name]


def test_modules_of_a_package_that_moved_run_once(release):
    code = INSTALL + (
        "import lmcache.v1.rpc.zmq as old\n"
        "import lmcache.inprocess.v1.rpc.zmq as new, lmcache.v1.rpc.transport as transport\n"
        "print(old is new, old.transport is transport, transport.__name__)\n"
    )
    once = ["rpc runs", "zmq runs", "transport runs"]
    assert run(code, release) == [
        "True",
        *once,
        "True True lmcache.inprocess.v1.rpc.transport",
    ]


def test_what_the_old_home_has_is_not_mapped(release):
    code = INSTALL + (
        "import lmcache.v1.both as old, lmcache.inprocess.v1.both as new\n"
        "print(old.NAME, new.NAME)\n"
        "print(lmcache_home.take('v1.both', 'HERE'), lmcache_home.take('v1.both', 'THERE'))\n"
        "print(lmcache_home.take('v1.both', 'NAME'))\n"
    )
    assert run(code, release) == ["True", "old new", "1 2", "new"]


def test_what_is_nowhere_stays_missing(release):
    code = INSTALL + (
        "import importlib\n"
        "for name in ('lmcache.v1.gone', 'lmcache.gone.x', 'lmcache.v1.both.x',\n"
        "             'lmcache.v1.broken', 'lmcache.inprocess.gone', 'lmcache_x'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(name, '-', error.name)\n"
    )
    assert run(code, release) == [
        "True",
        "lmcache.v1.gone - lmcache.v1.gone",
        "lmcache.gone.x - lmcache.gone",
        "lmcache.v1.both.x - lmcache.v1.both.x",
        "lmcache.v1.broken - no_such_library",
        "lmcache.inprocess.gone - lmcache.inprocess.gone",
        "lmcache_x - lmcache_x",
    ]


def test_what_a_taken_module_lacks_is_told_apart_from_a_name_that_is_gone(release):
    code = INSTALL + (
        "for module, name in (('v1.engine', 'Gone'), ('v1.broken', 'X')):\n"
        "    try: lmcache_home.take(module, name)\n"
        "    except ImportError as error: print(error.name, error)\n"
    )
    *_, gone, broken = run(code, release)
    assert "has no Gone in lmcache.v1.engine or lmcache.inprocess.v1.engine" in gone
    assert broken == "no_such_library No module named 'no_such_library'"


def test_it_says_once_what_it_does(release):
    code = (
        "import logging\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')\n"
        + INSTALL
        + "lmcache_home.install()\n"
        "import lmcache.v1.both, lmcache.inprocess.v1.engine, sys\n"
        "print('quiet', file=sys.stderr)\n"
        "import lmcache.v1.engine, lmcache.v1.rpc.zmq\n"
    )
    done = python(code, release)
    quiet, told = done.stderr.splitlines()
    assert quiet == "quiet"
    assert told.startswith("vllm.lmcache_hybrid.upstream.lmcache_home LMCache ")
    assert version("lmcache") in told
    assert "has moved lmcache.v1.engine to lmcache.inprocess.v1.engine" in told


def test_the_plugin_maps_modules_whatever_else_it_cannot_do(release):
    """Where nothing can be patched, dense models still need LMCache's adapter."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import vllm_patch; vllm_patch.register()\n"
        "import lmcache.v1.engine as old, lmcache.inprocess.v1.engine as new\n"
        "print(old is new)\n"
    )
    assert run(code, release) == ["engine runs", "True"]


def test_nothing_is_installed_where_lmcache_has_one_home_or_none(tmp_path):
    code = INSTALL + "import sys; print([type(f).__name__ for f in sys.meta_path])\n"
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text("")
    installed, finders = run(code, tmp_path)
    assert installed == "False" and "_MovedFinder" not in finders
    missing = "import sys; sys.modules['lmcache'] = None\n" + code
    installed, finders = run(missing)
    assert installed == "False" and "_MovedFinder" not in finders


def test_modules_are_found_in_processes_that_multiprocessing_spawns(release, tmp_path):
    """A child gets the plugin of its own; what it unpickles by the new name needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n" + INSTALL + "def child(pipe, engine):\n"
        "    import lmcache.v1.engine\n"
        "    pipe.send(lmcache.v1.engine.Engine is engine)\n"
        "if __name__ == '__main__':\n"
        "    import lmcache.v1.engine\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    here, there = context.Pipe()\n"
        "    process = context.Process(target=child, args=(there, lmcache.v1.engine.Engine))\n"
        "    process.start()\n"
        "    print('same', here.recv())\n"
        "    process.join()\n"
    )
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert "same True" in run(code, release)


def test_names_in_sources_are_found_in_both_homes(release):
    """The lists of hooks name modules by the old home."""
    code = (
        "import json\n"
        "from pathlib import Path\n"
        "from tests.compat.names.resolver import Hook, Tree\n"
        f"tree = Tree(Path({str(release)!r}))\n"
        "hooks = [Hook('lmcache.v1.engine', 'Engine'), Hook('lmcache.v1.both', 'HERE'),\n"
        "         Hook('lmcache.v1.both', 'THERE'), Hook('lmcache.v1.both', 'GONE'),\n"
        "         Hook('lmcache.v1.gone', '')]\n"
        "print(json.dumps([hook.problem(tree) for hook in hooks]))\n"
    )
    assert json.loads(run(code)[-1]) == [
        None,
        None,
        None,
        "lmcache.v1.both.GONE is missing",
        "lmcache.v1.gone is missing",
    ]
