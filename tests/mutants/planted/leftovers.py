# SPDX-License-Identifier: Apache-2.0
"""What a test session leaves on the machine."""

from tests.mutants.defect import one

FILE = "tests/leftovers.py"

DEFECTS = (
    one(
        "a session ends with its tests' processes still there",
        FILE,
        "        killed = _kill(folder, owner)\n",
        "        killed = []\n",
    ),
    one(
        "a killed session leaves processes",
        FILE,
        "    _kill(folder, owner)\n    remove",
        "    remove",
    ),
    one(
        "a fork of the session's own process outlives it",
        FILE,
        "            if target == folder or file.name",
        "            if file.name",
    ),
    one(
        "a server that overwrites its environment outlives the session",
        FILE,
        'file.name in ("1", "2") and target',
        "False and target",
    ),
    one(
        "who kills the session's group kills its guard",
        FILE,
        "            start_new_session=True,",
        "            start_new_session=False,",
    ),
    one(
        "shared memory outlives its users",
        FILE,
        "if not command or TRACKER in command or int",
        "if not command or int",
    ),
    one(
        "a folder that cannot be written stays",
        FILE,
        "                os.chmod(each, 0o700)",
        "                os.chmod(each, 0o500)",
    ),
    one(
        "the folder of a session stays",
        FILE,
        "    shutil.rmtree(folder, ignore_errors=True)\n",
        "",
    ),
    one(
        "LMCache's folder for Prometheus stays",
        FILE,
        "            os.rmdir(each)",
        "            os.stat(each)",
    ),
    one(
        "the guard cleans up after the session's end, and nobody waits for it",
        FILE,
        "            self._guard.communicate()\n",
        "            pass\n",
    ),
)
