# SPDX-License-Identifier: Apache-2.0
"""A script ends although a library has threads that nobody ends."""

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from lmcache_hybrid.core.threads import before_the_process_ends

go_on = threading.Event()
threading.Thread(target=go_on.wait).start()
before_the_process_ends({close})
{end}
"""


@pytest.mark.parametrize("end, code", [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_what_python_waits_for_is_closed_when_the_script_has_ended(end, code):
    script = SCRIPT.format(close="go_on.set", end=end)
    assert subprocess.run([sys.executable, "-c", script], timeout=60, stderr=-3).returncode == code


@pytest.mark.parametrize("end", ["", "child.join()"])
def test_a_process_that_is_forked_off_closes_nothing_of_its_parent(end, tmp_path):
    """It has a copy, of locks on files too."""
    closed = tmp_path / "closed"
    close = f"lambda: (open({str(closed)!r}, 'a').write(f'{{os.getpid()}}\\n'), go_on.set())"
    fork = (
        "import multiprocessing, os\n"
        "child = multiprocessing.get_context('fork').Process(target=int)\nchild.start()\n"
        "print(os.getpid(), flush=True)\n"
    )
    script = SCRIPT.format(close=close, end=fork + end)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, stdout=-1, text=True)
    assert done.returncode == 0 and closed.read_text() == done.stdout


@pytest.mark.slow
def test_without_that_such_a_script_does_not_end():
    """Else the test above would prove nothing."""
    script = SCRIPT.format(close="lambda: None", end="")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", script], timeout=5)
