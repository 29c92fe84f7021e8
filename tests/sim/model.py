# SPDX-License-Identifier: Apache-2.0
"""A toy model whose KV cache says what is in it.

The attention page of a block holds, for each of its tokens, a hash of all tokens
up to and with that one; the state at n holds n and the hash of the first n
tokens. Both are mixed with rank and group. So one look at a page tells whether
it is the right one, where a real model's would have to be guessed from its output.

The forward follows vLLM's V1 model runner in align mode (``preprocess_mamba``,
``_update_states``, ``postprocess_mamba_align_gpu``): block tables grow by
appending, the running state moves from block to block and is overwritten in
place, rejected drafts leave rubbish behind.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

VOCABULARY = 50
RUBBISH = np.int64(0x0BAD0BAD0BAD0BAD)


class WrongBytes(AssertionError):
    """The KV cache does not hold what the request's tokens say."""


class Truth:
    """What a prompt and its greedy continuation are, and the hash after each token.

    Args:
        owner: whatever else decides the bytes (LoRA adapter, cache salt).
        room: most tokens, prompt and output together.
    """

    def __init__(self, prompt: Sequence[int], owner: str, room: int) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self._hashes = np.zeros(room + 2, np.int64)
        self._hashes[0] = _digest(owner)
        self._hashed = 0
        self.hashes(len(prompt))

    def hashes(self, count: int) -> np.ndarray:
        """int64 [count]: the hash after each of the first ``count`` tokens."""
        while self._hashed < count:
            last = int(self._hashes[self._hashed])
            if self._hashed == len(self.tokens):
                self.tokens.append(last % VOCABULARY)
            self._hashes[self._hashed + 1] = hash((last, self.tokens[self._hashed]))
            self._hashed += 1
        return self._hashes[1 : count + 1]

    def hash_at(self, count: int) -> np.int64:
        """The hash after ``count`` tokens."""
        self.hashes(count)
        return self._hashes[count]

    def token(self, index: int) -> int:
        self.hashes(index + 1)
        return self.tokens[index]


def _digest(text: str) -> int:
    # Not hash(): a string's is another one in every process.
    return int.from_bytes(text.encode()[:7].ljust(7, b"."), "big")


@dataclass
class _Running:
    """The runner's view of one request."""

    truth: Truth
    block_ids: tuple[list[int], ...]
    computed: int
    known: int
    state_index: int | None = None
    accepted: int = 1


@dataclass
class ToyRank:
    """One rank: KV cache, connector, and the model's forward over them.

    Attributes:
        pages: int64 [num_blocks, N]; every group's blocks lie in it, one group a block.
        attention, states: group indices.
        windows: tokens that a token sees, itself included, by window group.
        draft_blocks: speculative state blocks per request (``num_speculative_blocks``).
    """

    rank: int
    num_blocks: int
    block_size: int
    attention: tuple[int, ...]
    states: tuple[int, ...]
    windows: dict[int, int] = field(default_factory=dict)
    draft_blocks: int = 0
    connector: object = None
    requests: dict[str, _Running] = field(default_factory=dict)

    running: ClassVar["ToyRank"]

    @classmethod
    def running_connector(cls):
        """What a real rank's process has one of (``get_kv_transfer_group``)."""
        return cls.running.connector

    def __post_init__(self) -> None:
        self.pages = np.full((self.num_blocks, self.block_size), RUBBISH)
        groups = len(self.attention) + len(self.windows) + len(self.states)
        self._mix = [
            np.int64(hash((self.rank + 1, group + 1)) & 0x7FFFFFFFFFFFFFFF)
            for group in range(groups)
        ]

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """One layer per group: attention fills a page, a state its first 16 bytes."""
        pages = torch.from_numpy(self.pages)
        return {
            f"layer{group}": pages[:, :2] if group in self.states else pages
            for group in (*self.attention, *self.windows, *self.states)
        }

    # One step, in the runner's order

    def execute(self, output: SchedulerOutput, truths: dict[str, Truth]) -> ModelRunnerOutput:
        """Run one step; raises WrongBytes when a page is not what it should be."""
        ToyRank.running = self
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update(output, truths)
        if not output.total_num_scheduled_tokens:
            with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as results:
                pass
            # A copy: an empty one is a constant, which vLLM's aggregator writes to.
            return copy.copy(ModelRunnerOutput.with_kv_conn_output_only(results))
        for request_id, count in output.num_scheduled_tokens.items():
            self._move_states(self.requests[request_id], count)
        with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as results:
            sampled = {
                request_id: self._forward(
                    request_id, count, output.scheduled_spec_decode_tokens.get(request_id, ())
                )
                for request_id, count in output.num_scheduled_tokens.items()
            }
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=results,
        )

    def _update(self, output: SchedulerOutput, truths: dict[str, Truth]) -> None:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for source, target in output.kv_cache_block_copies or ():
            self.pages[target] = self.pages[source]
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = _Running(
                truths[new.req_id],
                tuple(list(ids) for ids in new.block_ids),
                new.num_computed_tokens,
                len(new.prompt_token_ids),
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                request.block_ids = tuple(list(ids) for ids in new_ids)
                request.accepted = 1
            elif new_ids is not None:
                for ids, more in zip(request.block_ids, new_ids):
                    ids.extend(more)
            request.computed = cached.num_computed_tokens[i]
            request.known = truths[request_id].prompt_length + cached.num_output_tokens[i]
        for request_id in (*(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            if request_id in self.requests:
                self.requests[request_id].state_index = None

    def _move_states(self, request: _Running, count: int) -> None:
        """The running state is kept at the last block; copy it there."""
        size = self.block_size
        before = request.state_index
        if before is None:
            before = (request.computed - 1) // size
        now = -(-(request.computed + count) // size) - 1
        request.state_index = now
        if before != -1 and before != now:
            for group in self.states:
                ids = request.block_ids[group]
                self.pages[ids[now], :2] = self.pages[ids[before + request.accepted - 1], :2]
            request.accepted = 1

    def _forward(self, request_id: str, count: int, drafts: Sequence[int]) -> list[int]:
        request = self.requests[request_id]
        truth, start = request.truth, request.computed
        end = start + count
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth.token(
            end - len(drafts) + accepted
        ):
            accepted += 1
        for group in (*self.attention, *self.windows):
            self._attend(request_id, group, start, end, end - len(drafts) + accepted)
        for group in self.states:
            self._advance(request_id, group, start, end - len(drafts), len(drafts), accepted)
        if end < request.known:
            return []  # the prompt is not computed yet
        if self.draft_blocks:
            request.accepted = accepted + 1
            self._keep_boundary(request, end - len(drafts), accepted + 1)
        first = end - len(drafts)
        return [truth.token(first + i) for i in range(accepted + 1)]

    def _attend(self, request_id: str, group: int, start: int, end: int, right: int) -> None:
        """Check what the token at ``start`` sees, write [start, right), and rubbish to ``end``."""
        request, size = self.requests[request_id], self.block_size
        seen = max(0, start + 1 - self.windows[group]) if group in self.windows else 0
        first = seen // size
        ids = np.array(request.block_ids[group][first : -(-end // size)])
        assert ids.all(), "an attention page in the null block"
        expected = request.truth.hashes(end)[first * size :] ^ self._mix[group]
        held = self.pages[ids].reshape(-1)
        seen, start, right, end = (n - first * size for n in (seen, start, right, end))
        if not np.array_equal(held[seen:start], expected[seen:start]):
            wrong = seen + int(np.argmin(held[seen:start] == expected[seen:start]))
            raise WrongBytes(
                f"{request_id} rank {self.rank} attention group {group}: token "
                f"{first * size + wrong} of {first * size + start} in block {ids[wrong // size]}"
            )
        held[start:right] = expected[start:right]
        held[right:end] = RUBBISH
        self.pages[ids] = held.reshape(-1, size)

    def _advance(
        self, request_id: str, group: int, start: int, first: int, drafts: int, accepted: int
    ) -> None:
        """Check the state at ``start``, write the one at ``first`` and one for each draft."""
        request, mix = self.requests[request_id], self._mix[group]
        truth, ids, index = request.truth, request.block_ids[group], request.state_index
        assert ids[index], "a running state in the null block"
        if start:
            held = self.pages[ids[index + request.accepted - 1], :2]
            if held[0] != start or held[1] != truth.hash_at(start) ^ mix:
                raise WrongBytes(
                    f"{request_id} rank {self.rank} state group {group}: block {ids[index]} "
                    f"should hold the state at {start}, says {held[0]}"
                )
        for i in range(drafts + 1):
            page = self.pages[ids[index + i], :2]
            right = i <= accepted
            page[0] = first + i if right else RUBBISH
            page[1] = truth.hash_at(first + i) ^ mix if right else RUBBISH

    def _keep_boundary(self, request: _Running, running: int, accepted: int) -> None:
        """Copy the state at a boundary passed by accepted drafts to its own block.

        Args:
            running: tokens that the state in the first column has seen.
            accepted: tokens accepted in this step, the sampled one included.
        """
        size = self.block_size
        boundary = (running + accepted - 1) // size * size
        if boundary < running:
            return
        source, target = request.state_index, boundary // size - 1
        bias = boundary - running
        if source == target:
            request.accepted = 1
            if not bias:
                return
        for group in self.states:
            ids = request.block_ids[group]
            self.pages[ids[target], :2] = self.pages[ids[source + bias], :2]
