# SPDX-License-Identifier: Apache-2.0
"""How a load that takes too long is given up."""

from tests.mutants.defect import Defect, one

PACE = "lmcache_hybrid/core/pace.py"
POLICY = "lmcache_hybrid/scheduler/load_policy.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
REDIS = "lmcache_hybrid/storage/remote/redis.py"
READER = "lmcache_hybrid/storage/remote/reader.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a load goes on after its deadline",
        PACE,
        "        if self._deadline == math.inf:\n            return False\n",
        "        if self._deadline > 0:\n            return False\n",
    ),
    one(
        "a load is given up only when its time is over",
        PACE,
        "                elif whole is not None and whole > limit:\n",
        "                elif time.monotonic() > self._deadline:\n",
    ),
    one(
        "a load is judged by its first bytes",
        PACE,
        "FIRST_LOOK = 0.2",
        "FIRST_LOOK = 0.0",
    ),
    one(
        "a load that waited for others counts as slow",
        PACE,
        "                if limit <= 0:",
        "                if limit == math.inf:",
    ),
    one(
        "a read goes on after its load was given up",
        PACE,
        "        self.pace.count(size)\n        self.pace.check()\n",
        "        self.pace.count(size)\n",
    ),
    one(
        "a read that is tried again counts twice",
        PACE,
        "        size = min(size, self._left)  #",
        "        #",
    ),
    one(
        "records under way count as nothing where nobody hears of their bytes",
        PACE,
        "        got = (self._got + self._unreported) / self._size\n",
        "        got = self._got / self._size\n",
    ),
    one(
        "a server that sends nothing counts as one that has sent all",
        REDIS,
        "            part.report(time.monotonic() - begun)\n",
        "",
    ),
    one(
        "nobody knows how long a read took to connect",
        REDIS,
        "            part.report(time.monotonic() - begun)\n",
        "            part.report()\n",
    ),
    one(
        "the time to connect counts as time to read",
        PACE,
        "        read = passed - self._connecting\n",
        "        read = passed\n",
    ),
    one(
        "a load that connects until its deadline goes on",
        PACE,
        "        if read < FIRST_LOOK * limit and passed <= limit:\n",
        "        if read < FIRST_LOOK * limit:\n",
    ),
    one(
        "bytes count once their record is whole",
        "lmcache_hybrid/storage/remote/sockets.py",
        "        got(received)\n",
        "",
    ),
    one(
        "a read that was given up counts as one of a broken store",
        REDIS,
        "            if not part.pace.late or not (taken or reserve(1)):\n",
        "            if True:\n",
    ),
    one(
        "a read that was given up before its first byte counts as one of a broken store",
        REDIS,
        "not (taken or reserve(1)):\n",
        "not taken:\n",
    ),
    one(
        "a read begins although its load was given up",
        "lmcache_hybrid/storage/remote/reader.py",
        "            if self._silent >= promised or pace.late:\n                return None",
        "            if self._silent >= promised:\n                return None",
    ),
    one(
        "a read without a byte goes on after its load",
        REDIS,
        "min(self._seconds, part.pace.seconds)",
        "self._seconds",
    ),
    one(
        "what was given up counts as a record that is gone",
        READER,
        "        late, silent = pace.late,",
        "        late, silent = False,",
    ),
    one(
        "the threads that read do not know their load",
        READER,
        "return here.copy().run(read, key)",
        "return here and read(key)",
    ),
    one(
        "one slow read holds up those behind it",
        READER,
        "return_when=FIRST_COMPLETED",
        "return_when='ALL_COMPLETED'",
    ),
    one(
        "reads go on after one that failed",
        READER,
        "            if len(running) == READERS:\n",
        "            if False:\n",
    ),
    one(
        "a load that was given up counts as one that failed",
        "lmcache_hybrid/worker/loads.py",
        "        return result.ok, result.slow\n",
        "        return result.ok, None\n",
    ),
    one(
        "after new weights loads count as slow",
        "lmcache_hybrid/worker/worker.py",
        "        self.loads.failed = dict.fromkeys(results.finished_recving)\n",
        "",
    ),
    one(
        "a load that failed on one rank counts as slow",
        "lmcache_hybrid/protocol/slow_loads.py",
        "None if mine is None or seconds is None else max(mine, seconds)",
        "max(mine or 0.0, seconds or 0.0)",
    ),
    one(
        "what one rank said of a load is forgotten",
        "lmcache_hybrid/protocol/slow_loads.py",
        "            known = known.aggregate(said)\n",
        "            known = said\n",
    ),
    one(
        "what ranks said of a load is said of the next one",
        "lmcache_hybrid/protocol/slow_loads.py",
        "{each: rest.pop(each, None) for each in",
        "{each: rest.get(each) for each in",
    ),
    one(
        "what came too late is stored again",
        SCHEDULER,
        "fail_load(slow=request_id in slow)",
        "fail_load(slow=False)",
    ),
    one(
        "a load that was given up counts as long as it lasted",
        POLICY,
        "self._loaded([loads[request][1]], slow[request])",
        "self._loaded([loads[request][1]], seconds)",
    ),
    one(
        "a load that waited for others counts as one that took no time",
        POLICY,
        "                if slow[request]:\n",
        "                if slow[request] >= 0:\n",
    ),
    one(
        "a load beside one that was given up counts as long",
        POLICY,
        "            return\n        if failed & loads.keys():\n",
        "        if failed & loads.keys():\n",
    ),
    one(
        "a load that computing would just beat is given up",
        POLICY,
        "PATIENCE = 1.25",
        "PATIENCE = 1.0",
    ),
)
