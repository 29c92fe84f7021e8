# SPDX-License-Identifier: Apache-2.0
"""Which remote stores lookups leave out, as they did not answer, and how often a failure is said.

Loads and writes tell silence by themselves: ``storage/remote/silent_reads.py`` and
``storage/remote/redis.py``.
"""

import math

from lmcache_hybrid.core.backoff import Backoff, LessOften

# The first and the longest pause for a store that did not answer.
FIRST_PAUSE_SECONDS = 1.0
PAUSE_SECONDS = 10.0
# A store given less than this share of the longest time so far is not taken as silent.
FAIR_PART = 0.25


class SilentStores:
    """Remote stores that did not answer in time, and are not asked for a while.

    Otherwise every request would wait for a store that is down. A store that fails at once is still
    asked: it costs no time, and may be back. Used by the lookup thread only.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, Backoff] = {}  # by store
        self._said: dict[tuple[str, str], LessOften] = {}  # by store and kind of failure
        self._longest = 0.0  # seconds

    def __contains__(self, name: str) -> bool:
        return name in self._pauses and self._pauses[name].lasts

    def add(self, name: str) -> float:
        """Pause a store, longer each time; returns the seconds."""
        new = Backoff(FIRST_PAUSE_SECONDS, PAUSE_SECONDS)
        return self._pauses.setdefault(name, new).fail()

    def is_fair(self, seconds: float) -> bool:
        """Whether ``seconds`` is long enough to call a store silent that does not answer."""
        if seconds < math.inf:
            self._longest = max(self._longest, seconds)
        return seconds > 0 and seconds >= FAIR_PART * self._longest

    def is_news(self, name: str, kind: str) -> bool:
        """Whether to log that a store failed or is silent, see :class:`.LessOften`."""
        return self._said.setdefault((name, kind), LessOften()).is_news()

    def answered(self, name: str) -> None:
        self._pauses.pop(name, None)
