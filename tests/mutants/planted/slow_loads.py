# SPDX-License-Identifier: Apache-2.0
"""How a load that takes too long is given up."""

from tests.mutants.defect import always, each_of, gone, never

MISTAKES = {
    "lmcache_hybrid/core/late_loads.py": {
        "a load goes on after its deadline": (
            "        if self._deadline == math.inf:\n            return False\n",
            "        if self._deadline > 0:\n            return False\n",
        ),
        "a load is given up only when its time is over": (
            "                elif whole is not None and whole > limit:\n",
            "                elif time.monotonic() > self._deadline:\n",
        ),
        "a load is judged by its first bytes": ("FIRST_LOOK = 0.2", "FIRST_LOOK = 0.0"),
        "a load that waited for others counts as slow": (
            "                if limit <= 0:",
            "                if limit == math.inf:",
        ),
        "a read goes on after its load was given up": (
            "        self.pace.count(size)\n        self.pace.check()\n",
            "        self.pace.count(size)\n",
        ),
        "a read that is tried again counts twice": (
            "        size = min(size, self._left)  #",
            "        #",
        ),
        "records under way count as nothing where nobody hears of their bytes": (
            "        got = (self._got + self._unreported) / self._size\n",
            "        got = self._got / self._size\n",
        ),
        "the time to connect counts as time to read": (
            "        read = passed - self._connecting\n",
            "        read = passed\n",
        ),
        "a load that connects until its deadline goes on": (
            "        if read < FIRST_LOOK * limit and passed <= limit:\n",
            "        if read < FIRST_LOOK * limit:\n",
        ),
    },
    "lmcache_hybrid/storage/remote/redis.py": {
        "a server that sends nothing counts as one that has sent all": gone(
            "            part.report(time.monotonic() - begun)\n"
        ),
        "nobody knows how long a read took to connect": (
            "            part.report(time.monotonic() - begun)\n",
            "            part.report()\n",
        ),
        "a read that was given up counts as one of a broken store": always(
            "            if not part.pace.late or not (taken or reserve(1)):\n"
        ),
        "a read that was given up before its first byte counts as one of a broken store": (
            "not (taken or reserve(1)):\n",
            "not taken:\n",
        ),
        "a read without a byte goes on after its load": (
            "min(self._seconds, part.pace.seconds)",
            "self._seconds",
        ),
    },
    "lmcache_hybrid/storage/remote/sockets.py": {
        "bytes count once their record is whole": gone("        got(received)\n"),
    },
    "lmcache_hybrid/storage/remote/silent_reads.py": {
        "a read begins although its load was given up": (
            "            if self._silent >= promised or pace.late:\n                return None",
            "            if self._silent >= promised:\n                return None",
        ),
        "what was given up counts as a record that is gone": (
            "        late, silent = pace.late,",
            "        late, silent = False,",
        ),
        "the threads that read do not know their load": (
            "return here.copy().run(read, key)",
            "return here and read(key)",
        ),
        "one slow read holds up those behind it": (
            "return_when=FIRST_COMPLETED",
            "return_when='ALL_COMPLETED'",
        ),
        "reads go on after one that failed": never("            if len(running) == READERS:\n"),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a load that was given up counts as one that failed": (
            "        return ok, slow\n",
            "        return ok, None\n",
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "after new weights loads count as slow": gone(
            "        self.loads.failed = dict.fromkeys(results.finished_recving)\n"
        ),
    },
    "lmcache_hybrid/protocol/failed_loads.py": {
        "a load that failed on one rank counts as slow": (
            "None if mine is None or seconds is None else max(mine, seconds)",
            "max(mine or 0.0, seconds or 0.0)",
        ),
        "what one rank said of a load is forgotten": (
            "            known = known.aggregate(said)\n",
            "            known = said\n",
        ),
        "what ranks said of a load is said of the next one": (
            "{each: rest.pop(each, None) for each in",
            "{each: rest.get(each) for each in",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "what came too late is stored again": (
            "fail_load(slow=request_id in slow)",
            "fail_load(slow=False)",
        ),
    },
    "lmcache_hybrid/scheduler/load_policy.py": {
        "a load that was given up counts as long as it lasted": (
            "self._loaded([loads[request][1]], slow[request])",
            "self._loaded([loads[request][1]], seconds)",
        ),
        "a load that waited for others counts as one that took no time": (
            "                if slow[request]:\n",
            "                if slow[request] >= 0:\n",
        ),
        "a load beside one that was given up counts as long": (
            "            return\n        if failed & loads.keys():\n",
            "        if failed & loads.keys():\n",
        ),
        "a load that computing would just beat is given up": ("PATIENCE = 1.25", "PATIENCE = 1.0"),
    },
}
DEFECTS = each_of(MISTAKES)
