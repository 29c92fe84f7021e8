# SPDX-License-Identifier: Apache-2.0
"""Saves of requests that have ended: what vLLM hands off only then."""

from collections.abc import Sequence

from lmcache_hybrid.protocol.metadata import SaveSpec


class FinalSaves:
    """Waits for the next step, which may have no forward. Used by the scheduler's thread only.

    vLLM keeps the blocks of these requests until every rank has reported them.
    """

    def __init__(self) -> None:
        self._saves: list[SaveSpec] = []
        self._ended: list[str] = []

    def add(self, save: SaveSpec) -> None:
        """Save in the next step what an ended request leaves."""
        self._saves.append(save)
        self._ended.append(save.request_id)

    def forget(self) -> None:
        """Save none of it; the requests are reported all the same."""
        self._saves.clear()

    def remove(self, request_id: str) -> None:
        """Save nothing of a request, and do not report it."""
        self._saves = [save for save in self._saves if save.request_id != request_id]
        self._ended = [each for each in self._ended if each != request_id]

    def take(self) -> tuple[Sequence[SaveSpec], tuple[str, ...]]:
        """Return the saves, and the requests to report when they are made. Forgets both."""
        taken = self._saves, tuple(self._ended)
        self._saves, self._ended = [], []
        return taken
