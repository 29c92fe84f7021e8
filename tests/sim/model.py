# SPDX-License-Identifier: Apache-2.0
"""A toy model whose KV cache says what is in it.

The attention page of a block holds, for each of its tokens, a hash of all tokens
up to and with that one; the state at n holds n and the hash of the first n
tokens. Both are mixed with group and, where ranks hold different bytes, with the rank.
So one look at a page tells whether it is the right one, where a real model's would
have to be guessed from its output.

The forward follows vLLM's model runners in align mode (``preprocess_mamba``,
``_update_states``, ``postprocess_mamba_align_gpu``): block tables grow by
appending, the running state moves from block to block and is overwritten in
place, rejected drafts leave rubbish behind. Whatever touches pages is queued on
the rank's device with all that it needs; without a device it happens at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import mamba_utils

from .device import Device, Point, Stream
from .orders import V1, V2
from .truth import Truth

# Tokens that scratch groups compress into one, and hold until then.
RATIO = 2
RUBBISH = np.int64(0x0BAD0BAD0BAD0BAD)


class WrongBytes(AssertionError):
    """The KV cache does not hold what the request's tokens say."""


@dataclass
class _Running:
    """The runner's view of one request.

    Attributes:
        reached: tokens that its last step left right; None before the first one.
        drafted: whether that step made drafts for the next one.
    """

    truth: Truth
    block_ids: tuple[list[int], ...]
    computed: int
    known: int
    state_index: int | None = None
    accepted: int = 1
    state_tokens: int = 0
    reached: int | None = None
    drafted: bool = False


@dataclass
class ToyRank:
    """One rank: KV cache, connector, and the model's forward over them.

    Attributes:
        pages: int64 [num_blocks, N or 2 N]; every group's blocks lie in it, one group a block.
        attention, states: group indices.
        windows: tokens that a token sees, itself included, by window group.
        replicated: groups whose pages are equal on all ranks.
        rings: tokens in a block, by scratch group.
        draft_blocks: speculative state blocks per request (``num_speculative_blocks``).
        device: where the pages lie; None: in host memory.
        order: of the connector's calls, as the runner makes them.
        checkpoint: (offset, column) of the state to be written inside a prefill chunk, from
            (end, tokens) of the chunk; offset 0 for none.
        checkpoints: states that were written inside a chunk.
        resumed: requests that arrived as new ones after a preemption.
        layers: names by group; a pipeline stage may have none of a group.
        wide: groups whose blocks have so many times as many tokens.
        context: ranks that share an attention block's tokens, this one's place among them, and how
            many tokens it holds in turn (decode context parallelism).
        optimistic: steps are scheduled before it is known how many drafts the last one accepted,
            as the V2 runner corrects in its own counts.
        wrong_save: of a step's saves, the first that copied other bytes than its key says.
    """

    rank: int
    num_blocks: int
    block_size: int
    attention: tuple[int, ...]
    states: tuple[int, ...]
    windows: dict[int, int] = field(default_factory=dict)
    replicated: tuple[int, ...] = ()
    rings: dict[int, int] = field(default_factory=dict)
    draft_blocks: int = 0
    device: Device | None = None
    checkpoint: Callable[[int, int], tuple[int, int]] = lambda end, count: (0, -1)
    order: V1 | V2 | None = None
    connector: object = None
    checkpoints: int = 0
    resumed: int = 0
    layers: list[list[str]] = field(default_factory=list)
    wide: dict[int, int] = field(default_factory=dict)
    context: tuple[int, int, int] = (1, 0, 1)
    optimistic: bool = False
    wrong_save: WrongBytes | None = None
    requests: dict[str, _Running] = field(default_factory=dict)

    running: ClassVar["ToyRank"]

    @classmethod
    def running_connector(cls):
        """What a real rank's process has one of (``get_kv_transfer_group``)."""
        return cls.running.connector

    def __post_init__(self) -> None:
        self.pages = np.full(
            (self.num_blocks, max(map(self._size, range(len(self.layers))))), RUBBISH
        )
        self.load_weights(0)
        self._copying = None if self.device is None else Stream(self.device)
        self._copied: deque[Point | None] = deque()

    def load_weights(self, version: int) -> None:
        """Compute other bytes from now on. Pages stay what they are."""
        groups = len(self.attention) + len(self.windows) + len(self.states) + len(self.rings)
        self._mix = [
            np.int64(hash((rank + 1, group + 1, version)) & 0x7FFFFFFFFFFFFFFF)
            for group in range(groups)
            for rank in (-1 if group in self.replicated else self.rank,)
        ]

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """By layer: those of attention share a page, one state is in its first 16 bytes.

        Where a stage has two state layers in a group, the second one's bytes mean nothing: so
        stages have records of other lengths.
        """
        pages = torch.from_numpy(self.pages)
        caches = {}
        for group, names in enumerate(self.layers):
            width = 2 if group in self.states else self._size(group) // max(1, len(names))
            for index, name in enumerate(names):
                caches[name] = pages[:, index * width : (index + 1) * width]
        return caches

    def _size(self, group: int) -> int:
        """Tokens of a rank in a block of an attention or window group."""
        return self.block_size * self.wide.get(group, 1)

    def _held(self, groups: Iterable[int]) -> list[int]:
        """Those of ``groups`` of which this rank has a layer."""
        return [group for group in groups if self.layers[group]]

    # One step, in the runner's order

    def execute(self, output: SchedulerOutput, truths: dict[str, Truth]) -> ModelRunnerOutput:
        """Run one step; raises WrongBytes when a page is not what it should be."""
        ToyRank.running = self
        if self.device is not None:
            self.device.enter()
        self.order.before_blocks(output)
        self._update(output, truths)
        if not output.total_num_scheduled_tokens:
            self._copied.append(None)
            return self.order.without_forward(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self._move_states(self.requests[request_id], count)
        with self.order.forward(output):
            sampled = {
                request_id: self._forward(
                    request_id, count, output.scheduled_spec_decode_tokens.get(request_id, ())
                )
                for request_id, count in output.num_scheduled_tokens.items()
            }
        self._copy_tokens()
        for request_id, tokens in sampled.items():
            if tokens and self.draft_blocks:
                self._keep_boundary(self.requests[request_id], len(tokens))
        self.order.before_drafts(output)
        if self.draft_blocks:
            self._queue(lambda: None)  # the draft's forward
        results = self.order.finish()
        if self.wrong_save is not None:
            raise self.wrong_save
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=results,
        )

    def _queue(self, work: Callable[[], None]) -> None:
        """Do it on the device, in the order of the compute stream."""
        if self.device is None:
            work()
        else:
            self.device.compute.add("run", work)

    def _copy_tokens(self) -> None:
        """Copy what was sampled to the host, on a stream of its own behind the forward."""
        if self.device is None:
            return
        sampled, copied = Point(self.device.compute), Point(self._copying)
        self.device.compute.add("record", sampled)
        self._copying.add("wait", sampled)
        self._copying.add("record", copied)
        self._copied.append(copied)

    def await_tokens(self) -> None:
        """Wait for the tokens of the oldest step whose tokens were not waited for."""
        if self.device is not None and (copied := self._copied.popleft()) is not None:
            self.device.reach(copied)

    def _copy_page(self, source: int, target: int, used: int) -> None:
        def copy() -> None:
            self.pages[target, :used] = self.pages[source, :used]

        self._queue(copy)

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """As ``copy_kv_cache_blocks_inplace``: all are read before one is written."""

        def copy() -> None:
            self.pages[targets] = self.pages[sources]

        self._queue(copy)

    def _update(self, output: SchedulerOutput, truths: dict[str, Truth]) -> None:
        gone = output.finished_req_ids
        if not isinstance(self.order, V1):
            gone = gone | (output.preempted_req_ids or set())
        for request_id in gone:
            self.requests.pop(request_id, None)
        if fresh := output.new_block_ids_to_zero:
            self._queue(lambda: self.pages.__setitem__(fresh, 0))
        if copies := output.kv_cache_block_copies:
            self._copy_blocks(*map(list, zip(*copies)))
        for new in output.scheduled_new_reqs:
            known = len(new.prefill_token_ids or new.prompt_token_ids)
            self.resumed += known > len(new.prompt_token_ids)
            # With the V2 runner also those that go on after a preemption; a session's next parts.
            last = self.requests.get(new.req_id)
            self.requests[new.req_id] = _Running(
                truths[new.req_id],
                tuple(list(ids) for ids in new.block_ids),
                new.num_computed_tokens,
                known,
                last.state_index if last and isinstance(self.order, V1) else None,
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
            if self.optimistic:
                request.computed = request.reached
                continue
            request.computed = cached.num_computed_tokens[i]
            request.known = request.truth.prompt_length + cached.num_output_tokens[i]
        if isinstance(self.order, V1) and output.total_num_scheduled_tokens:
            self._forget_columns(output)

    def _forget_columns(self, output: SchedulerOutput) -> None:
        """As the V1 runner: of the requests in this step, by vLLM's own function."""
        columns = {request_id: each.state_index for request_id, each in self.requests.items()}
        mamba_utils.cleanup_mamba_state_idx(output, columns)
        for request_id, each in self.requests.items():
            each.state_index = columns.get(request_id)

    def _move_states(self, request: _Running, count: int) -> None:
        """The running state is kept at the last block; copy it there."""
        size = self.block_size
        before = request.state_index
        if before is None:
            before = (request.computed - 1) // size
        now = -(-(request.computed + count) // size) - 1
        request.state_index = now
        if before != -1 and before != now:
            for group in self._held(self.states):
                ids = request.block_ids[group]
                self._copy_page(ids[before + request.accepted - 1], ids[now], 2)
            request.accepted = 1

    def _forward(self, request_id: str, count: int, drafts: Sequence[int]) -> list[int]:
        request = self.requests[request_id]
        truth, start = request.truth, request.computed
        end = start + count
        if self.optimistic and request.drafted:
            drafts = truth.drafts(end - len(drafts), len(drafts))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth.token(
            end - len(drafts) + accepted
        ):
            accepted += 1
        for group in self._held((*self.attention, *self.windows)):
            self._attend(request_id, group, start, end, end - len(drafts) + accepted)
        for group in self._held(self.rings):
            self._compress(request_id, group, start, end, end - len(drafts) + accepted)
        for group in self._held(self.states):
            self._advance(request_id, group, start, end - len(drafts), len(drafts), accepted)
        request.state_tokens = end - len(drafts)
        request.reached, request.drafted = end - len(drafts) + accepted, end >= request.known
        if end < request.known:
            return []  # the prompt is not computed yet
        if self.draft_blocks:
            request.accepted = accepted + 1
        first = end - len(drafts)
        return [truth.token(first + i) for i in range(accepted + 1)]

    def _attend(self, request_id: str, group: int, start: int, end: int, right: int) -> None:
        """Check what the token at ``start`` sees, write [start, right), and rubbish to ``end``."""
        request, size = self.requests[request_id], self._size(group)
        span = size * self.context[0]
        seen = max(0, start + 1 - self.windows[group]) if group in self.windows else 0
        first = seen // span
        ids = np.array(request.block_ids[group][first : -(-end // span)])
        assert ids.all(), "an attention page in the null block"
        tokens, slots = self._own(first * span, end, size)
        expected = request.truth.hashes(end)[tokens] ^ self._mix[group]
        seen, start, right = np.searchsorted(tokens, (seen, start, right))

        def attend() -> None:
            pages = self.pages[ids, :size].reshape(-1)
            held = pages[slots]
            if not np.array_equal(held[seen:start], expected[seen:start]):
                wrong = seen + int(np.argmin(held[seen:start] == expected[seen:start]))
                raise WrongBytes(
                    f"{request_id} rank {self.rank} attention group {group}: token "
                    f"{tokens[wrong]} in block {ids[slots[wrong] // size]}"
                )
            held[start:right] = expected[start:right]
            held[right:] = RUBBISH
            pages[slots] = held
            self.pages[ids, :size] = pages.reshape(-1, size)

        self._queue(attend)

    def _own(self, first: int, end: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the tokens [first, end) this rank holds, and in which slot behind ``first``.

        As ``ComputeSlotMappingKernel`` of ``vllm/v1/worker/block_table.py``.
        """
        ranks, own, turn = self.context
        tokens = np.arange(first, end)
        blocks, offsets = np.divmod(tokens - first, size * ranks)
        slots = blocks * size + offsets // (ranks * turn) * turn + offsets % turn
        mine = offsets // turn % ranks == own
        return tokens[mine], slots[mine]

    def _compress(self, request_id: str, group: int, start: int, end: int, right: int) -> None:
        """Check the tokens before ``start`` that are not compressed yet; write like _attend."""
        request, size = self.requests[request_id], self.rings[group]
        (block,) = request.block_ids[group]
        assert block, "scratch in the null block"
        expected = request.truth.hashes(end) ^ self._mix[group]

        def compress() -> None:
            held = self.pages[block]
            for token in range(start - start % RATIO, start):
                if held[token % size] != expected[token]:
                    where = f"{request_id} rank {self.rank} scratch group {group}"
                    raise WrongBytes(f"{where}: token {token} of {start} in block {block}")
            for token in range(max(start, end - size), end):
                held[token % size] = expected[token] if token < right else RUBBISH

        self._queue(compress)

    def _advance(
        self, request_id: str, group: int, start: int, first: int, drafts: int, accepted: int
    ) -> None:
        """Check the state at ``start``, write the one at ``first`` and one for each draft."""
        request, mix = self.requests[request_id], self._mix[group]
        truth, index = request.truth, request.state_index
        ids = list(request.block_ids[group][index : index + drafts + 1])
        assert ids[0], "a running state in the null block"
        before = request.block_ids[group][index + request.accepted - 1]
        inside = None if drafts else self._find_checkpoint(request, group, start, first)

        def advance() -> None:
            held = self.pages[before, :2]
            if start and (held[0] != start or held[1] != truth.hash_at(start) ^ mix):
                raise WrongBytes(
                    f"{request_id} rank {self.rank} state group {group}: block {before} "
                    f"should hold the state at {start}, says {held[0]}"
                )
            if inside is not None:
                block, tokens = inside
                self.pages[block, :2] = tokens, truth.hash_at(tokens) ^ mix
            for i, block in enumerate(ids):
                right = i <= accepted
                self.pages[block, 0] = first + i if right else RUBBISH
                self.pages[block, 1] = truth.hash_at(first + i) ^ mix if right else RUBBISH
            if inside is not None and inside[0] in ids:
                # As in ``mamba_mixer2``: the last convolution window is written before that of
                # the checkpoint, and the recurrent state behind it.
                self.pages[inside[0], :2] = RUBBISH

        self._queue(advance)

    def _find_checkpoint(
        self, request: _Running, group: int, start: int, end: int
    ) -> tuple[int, int] | None:
        """(block, tokens) of the state that the chunk writes at a boundary inside."""
        offset, column = self.checkpoint(end, end - start)
        block = request.block_ids[group][column] if offset else 0
        if not block:
            return None  # none is kept; kernels write nothing to the null block
        self.checkpoints += 1
        return block, start + offset

    def _keep_boundary(self, request: _Running, accepted: int) -> None:
        """Copy the state at a boundary passed by accepted drafts to its own block.

        Args:
            accepted: tokens accepted in this step, the sampled one included.
        """
        # Tokens that the state in the first column has seen.
        size, running = self.block_size, request.state_tokens
        boundary = (running + accepted - 1) // size * size
        if boundary < running:
            return
        source, target = request.state_index, boundary // size - 1
        bias = boundary - running
        if source == target:
            request.accepted = 1
            if not bias:
                return
        for group in self._held(self.states):
            ids = request.block_ids[group]
            self._copy_page(ids[source + bias], ids[target], 2)
