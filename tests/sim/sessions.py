# SPDX-License-Identifier: Apache-2.0
"""Sessions of streaming input (``Request.resumable``): their prompts come in parts.

vLLM's scheduler discards the last token of each part. What a session's tokens are from then on is
a new :class:`Truth`, made when the next part begins.
"""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from .truth import Truth

NEXT, CUT_SHORT = "next parts of sessions", "parts that ended at a stop token"


class Sessions:
    """The sessions of one engine.

    Attributes:
        asked: tokens that a session has at most, by its request's id.
    """

    def __init__(self, engine) -> None:
        self._engine, self.asked = engine, dict[str, int]()
        scheduler = engine.scheduler
        update = scheduler._update_request_as_session

        def begin_part(session: Request, part) -> None:
            update(session, part)
            engine.events[NEXT] += 1
            engine.events[CUT_SHORT] += session.stop_reason is not None
            session.stop_reason = None  # vLLM leaves the last part's
            tokens, salt = list(session.all_token_ids), session.cache_salt or ""
            engine._truths[session.request_id] = Truth(tokens, salt, engine.room)

        scheduler._update_request_as_session = begin_part

    @property
    def live(self) -> list[str]:
        return [each for each in self._engine.live if each in self.asked]

    def begin(self, request_id: str, prompt: Sequence[int], output: int, **options: Any) -> None:
        """A new session and its first part; ``options`` are those of :meth:`.SimEngine.add`."""
        self.asked[request_id] = len(prompt) + output
        self._engine.add(request_id, prompt, output, resumable=True, **options)

    def go_on(
        self, request_id: str, prompt: Sequence[int], output: int, stops: Sequence[int] = ()
    ) -> None:
        """The next part; it waits until those before have ended."""
        self.asked[request_id] += len(prompt) + output
        self._send(request_id, prompt, output, stops, resumable=True)

    def end(self) -> None:
        """Nothing more comes: each session ends with the parts it has."""
        for request_id in self.live:
            self._send(request_id, [0], 1, (), resumable=False)

    def _send(self, request_id, prompt, output, stops, resumable: bool) -> None:
        # vLLM takes what the request brings and drops the request itself.
        self._engine.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(
                    max_tokens=output, ignore_eos=True, stop_token_ids=list(stops)
                ),
                pooling_params=None,
                resumable=resumable,
            )
        )

    def waits(self, request_id: str) -> bool:
        """Whether the session has ended all parts that it has."""
        status = self._engine.requests[request_id].status
        return status == RequestStatus.WAITING_FOR_STREAMING_REQ
