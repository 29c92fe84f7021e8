# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid accept`` as a user runs it: on both runners, and with a planted fault."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import v2
from tests.e2e.blocks import block_size

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = ("--max-num-batched-tokens", "1024", "--enforce-eager", "--max-num-seqs", "4")
# A vLLM plugin, so that it is there in the process that loads.
LOSE_STATES = """
from lmcache_hybrid.core.keys import STATE
from lmcache_hybrid.worker.loads import LoadQueue

targets = LoadQueue._targets

def plant():
    LoadQueue._targets = lambda self, load: [
        (key, block) for key, block in targets(self, load) if key.kind != STATE
    ]
"""
LESS_WORK = """
import sys

from tests.e2e import v2

def plant():
    v2.run_fewer_programs()
    # Each decode step costs what a prefill does.
    sys.modules["__main__"].ANSWER_TOKENS = 3
"""


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("qwen3_next", model_dir / "qwen3_next")


def plugin(folder: Path, code: str) -> Path:
    """A folder for PYTHONPATH with a vLLM plugin that calls ``plant()`` of ``code``."""
    info = folder / "planted-1.dist-info"
    info.mkdir(parents=True)
    (folder / "planted.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:plant\n")
    return folder


def accept(
    model: Path, folder: Path, config: dict, *options: str, path: str = "", **env: str
) -> tuple[int, str, dict]:
    """Exit code, output (standard error first) and report of the command."""
    lmcache, report = folder / "lmcache.yaml", folder / "report.json"
    lmcache.write_text(yaml.safe_dump({"max_local_cpu_size": 0.5, **config}))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    paths = [*filter(None, [path, os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": str(worker % (os.cpu_count() or 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TMPDIR": str(folder),
        # Sockets have names of at most 107 characters.
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
        "COLUMNS": "100",
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        **env,
    }
    command = [sys.executable, "-c", "from lmcache_hybrid.tools.cli import app; app()", "accept"]
    done = subprocess.run(
        [*command, str(model), f"--lmcache-config={lmcache}", f"--out={report}", *options],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    found = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, done.stderr + done.stdout, found


def check_restored(report: dict, places: set[str], branch: int = 0) -> None:
    """Every place brought tokens, and nothing differs from vLLM's own hit by a bit.

    Args:
        branch: where the first prompt hits that leaves another one in its middle; vLLM's own
            cache has no state there.
    """
    assert {check["where"] for check in report["checks"]} == places
    for place in places:
        found = [check for check in report["checks"] if check["where"] == place]
        assert place.endswith(", while saving") or any(each["external"] for each in found), place
    for check in report["checks"]:
        first = (check["case"], check["step"]) == ("branch", 1)
        hit = branch if first else check["boundary"]
        assert check["external"] == check["cached"] == hit, check
        if "at once" not in check["where"]:
            assert check["same"] and check["difference"] == 0, check
    assert report["noise"]["own"] == report["noise"]["restart"] == 0 < report["noise"]["wrong"]
    # One block of every group was lost on purpose, and seen.
    assert set(report["noise"]["lost"]) == {
        f"{kind} of group {group}" for group, kind in report["facts"]["group_kinds"]
    }
    assert report["facts"]["groups"]["state"] > 0 < report["facts"]["groups"]["attention"]
    assert min(report["noise"]["lost"].values()) > 0.01, report["noise"]
    assert all(rank["bytes"] > 0 == rank["wrong"] for rank in report["copies"])
    for place, counts in report["metrics"].items():
        assert counts["loaded_bytes"] > 0 < counts["load_seconds_sum"], place
        assert not [name for name in counts if name.startswith(("failed", "skipped_saves"))]


def test_ram_disk_and_a_folder_are_accepted(model_dir: Path, tmp_path: Path) -> None:
    """Granite 4 has smaller blocks than Qwen3-Next, which is accepted below."""
    model = make_model("granite4", model_dir / "granite4")
    config = {
        "local_cpu": True,
        "local_disk": str(tmp_path / "disk"),
        "max_local_disk_size": 1,
        "remote_url": f"fs://localhost:0{tmp_path}/fs",
    }
    # --port is the server's: a command line of vllm serve can be taken as it is.
    flags = ("--max-model-len", "4096", "--port", "8123", *FLAGS)
    # A chunk of the prompt that others leave ends before they do.
    size = block_size(model)
    flags += ("--max-num-batched-tokens", str(2 * size + size // 2))
    options = ("--longest", "1500", "--", *flags)
    code, output, report = accept(model, tmp_path, config, *options)
    assert code == 0, output
    assert report["verdict"] == "PASS" and not report["problems"] and not report["left_out"]
    restarted = [f"{tier} after a restart" for tier in ("local disk", "fs://")]
    places = {f"{place}{how}" for place in ("RAM", *restarted) for how in ("", ", one by one")}
    check_restored(report, places | {"RAM, at once", "RAM, while saving"}, branch=2 * size)
    assert report["facts"]["runner"] == "V1"
    assert {prompt["case"] for prompt in report["prompts"]} == {
        *("N", "N+1", "2N-1", "2N", "2N+1", "extended", "branch", "chat", "batch", "longest")
    }
    # A branch is restored where no prompt ended, a chat at each of its turns.
    hits = {prompt["case"]: prompt["own_hits"] for prompt in report["prompts"]}
    assert size == report["facts"]["block_size"]
    assert hits["branch"] == [0, 0, 2 * size, 3 * size]
    assert hits["chat"] == [0, size, 2 * size, 2 * size]
    screen = output[output.index("GraniteMoeHybridForCausalLM") :].splitlines()
    assert len(screen) <= 40 and all(len(line) <= 100 for line in screen), output
    # Nothing tells where, by whom or with which paths it was made.
    text = json.dumps(report)
    for private in (str(tmp_path), str(model), os.uname().nodename, str(Path.home()) + "/"):
        assert private not in text
    # A verdict that passed leaves no log behind, and nothing is left running.
    assert not list(tmp_path.glob("*.log"))


def test_states_that_are_not_restored_fail_and_the_prompts_are_named(
    model: Path, tmp_path: Path
) -> None:
    planted = plugin(tmp_path / "plugin", LOSE_STATES)
    code, output, report = accept(
        model,
        tmp_path,
        {"local_cpu": True},
        *("--quick", "--", *FLAGS),
        path=str(planted),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert code == 1, output
    assert report["verdict"] == "FAIL" and not report["problems"]
    size = block_size(model)
    for check in report["checks"]:
        if check["where"] == "RAM, while saving":
            assert check["outcome"] == "equal"
            continue
        # The hit is there and the answer is wrong.
        assert check["external"] == check["cached"] == check["boundary"] == size
        assert check["outcome"] == "differs" and check["difference"] > 0.01
    last = output[output.index("FAIL, wrong answers:") :]
    assert "N+1 (RAM)" in last and "2N (RAM)" in last
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_the_v2_runner_is_accepted(model: Path, tmp_path: Path) -> None:
    path = f"{plugin(tmp_path / 'triton', LESS_WORK)}{os.pathsep}{v2.OF_RANKS['PYTHONPATH']}"
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "64", *FLAGS)
    code, output, report = accept(
        model,
        tmp_path,
        {"local_cpu": True},
        *("--quick", "--", *flags),
        path=path,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert code == 0, output
    assert report["facts"]["runner"] == "V2" and report["verdict"] == "PASS"
    check_restored(report, {"RAM", "RAM, while saving"})
