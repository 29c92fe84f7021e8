# SPDX-License-Identifier: Apache-2.0
"""The look-up of functions, and their parameters, in a release on which no test ran."""

import subprocess
import sys
from types import ModuleType

import pytest

from lmcache_hybrid.upstream import lmcache_home, signatures
from lmcache_hybrid.upstream.signatures import problems


class Engine:
    def __init__(self, config, role=None): ...
    async def step(self, request, *, now=0): ...
    def stop(self, reason, /, *rest, now, **more): ...
    @classmethod
    def check(cls, config): ...


@pytest.fixture(autouse=True)
def release(monkeypatch):
    """A module of vLLM's, and one that a release cannot import."""
    module = ModuleType("vllm.engines")
    module.Engine, module.step = Engine, Engine(None).step
    monkeypatch.setitem(sys.modules, "vllm.engines", module)
    monkeypatch.setitem(sys.modules, "vllm.left_out", None)


@pytest.mark.parametrize(
    "line, problem",
    [
        ("Engine.__init__(config)", None),
        ("Engine.__init__(config, role)", None),
        ("Engine.check(config)", None),
        ("Engine.step(request)", None),
        ("step(request)", None),
        ("Engine.stop(...)", None),
        ("Engine.gone(...)", "is missing"),
        ("gone()", "is missing"),
        ("Engine.check.gone()", "is missing"),
        ("Engine.step()", "takes (request) instead of ()"),
        ("Engine.step(other)", "takes (request) instead of (other)"),
        ("Engine.step(request, more)", "takes (request) instead of (request, more)"),
        ("Engine.__init__(role, config)", "takes (config, role) instead of (role, config)"),
        ("Engine.__init__(role)", "takes (config, role) instead of (role)"),
        ("Engine.stop(reason)", "takes (reason, now) instead of (reason)"),
    ],
)
def test_what_a_release_has_otherwise_is_said(line, problem):
    name = line.partition("(")[0]
    said = [f"vllm.engines.{name} {problem}"] if problem else []
    assert problems({"vllm.engines": line}, ("vllm",)) == said


def test_all_that_is_otherwise_is_said_in_order():
    lines = {"vllm.engines": "\n  Engine.a()\n  Engine.check(config)\n  b()", "lmcache.gone": "c()"}
    of_vllm = ["vllm.engines.Engine.a is missing", "vllm.engines.b is missing"]
    assert problems(lines, ("vllm",)) == of_vllm
    (last,) = problems(lines, ("lmcache",))
    assert last == (
        "lmcache.gone cannot be imported (ModuleNotFoundError: No module named 'lmcache.gone')"
    )
    assert problems(lines, ()) == []


def test_a_module_that_cannot_be_imported_is_named():
    (said,) = problems({"vllm.left_out": "a()"}, ("vllm",))
    assert said.startswith("vllm.left_out cannot be imported (ModuleNotFoundError: ")


def test_a_class_of_lmcaches_in_process_part_is_found_in_its_home(monkeypatch):
    monkeypatch.setattr(lmcache_home, "take", lambda module, name: Engine)
    assert problems({"lmcache.v1.gone": "LMCacheEngine.check(config)"}, ("lmcache",)) == []


def test_the_releases_here_have_all_functions():
    assert problems(signatures.ALL, ("vllm", "lmcache")) == []


@pytest.mark.slow
def test_the_look_up_at_start_imports_nothing_more_than_the_plugin():
    """What else is imported may start CUDA, and vLLM forks some of these processes later."""
    code = (
        "import sys, vllm_patch\n"
        "from lmcache_hybrid.upstream import versions\n"
        "versions.found = lambda: tuple(sys.argv[1:])\n"
        "vllm_patch.register()\n"
        "print('patched', 'vllm_patch.connector' in sys.modules)\n"
        "print(*(name for name in sys.modules if name.startswith(('vllm.', 'lmcache'))))\n"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *pair], stdout=pipe, text=True)
        for pair in (("0.32.0", "0.5.6"), ("0.32.1", "0.5.6.post1"))
    ]
    tested, fix = (process.communicate()[0].splitlines()[-2:] for process in processes)
    assert tested[0] == fix[0] == "patched True"
    assert set(fix[1].split()) == set(tested[1].split()) and "vllm.renderers.base" in fix[1]
