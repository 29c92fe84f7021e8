# SPDX-License-Identifier: Apache-2.0
"""What a test session leaves on the machine."""

from tests.mutants.defect import each_of, gone, passes

MISTAKES = {
    "tests/leftovers.py": {
        "a session ends with its tests' processes still there": (
            "        killed = _kill(folder, owner)\n",
            "        killed = []\n",
        ),
        "a killed session leaves processes": ("    _kill(folder, owner)\n    remove", "    remove"),
        "a fork of the session's own process outlives it": (
            "            if target == folder or file.name",
            "            if file.name",
        ),
        "a server that overwrites its environment outlives the session": (
            'file.name in ("1", "2") and target',
            "False and target",
        ),
        "who kills the session's group kills its guard": (
            "            start_new_session=True,",
            "            start_new_session=False,",
        ),
        "shared memory outlives its users": (
            "if not command or TRACKER in command or int",
            "if not command or int",
        ),
        "a folder that cannot be written stays": (
            "                os.chmod(each, 0o700)",
            "                os.chmod(each, 0o500)",
        ),
        "the folder of a session stays": gone("    shutil.rmtree(folder, ignore_errors=True)\n"),
        "LMCache's folder for Prometheus stays": (
            "            os.rmdir(each)",
            "            os.stat(each)",
        ),
        "the guard cleans up after the session's end, and nobody waits for it": passes(
            "            self._guard.communicate()\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
