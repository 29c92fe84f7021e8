# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side tells the worker side, once per step."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from lmcache_hybrid.lookup import Prefix


@dataclass(frozen=True)
class Load:
    """Restore blocks [start, boundary) and the state at ``boundary`` (in blocks).

    Attributes:
        attention_blocks: per attention group of the plan, one block id for each of
            ``start .. boundary - 1``.
        state_blocks: per state group of the plan, the block id that shall hold the state.
        window_blocks: per window group of the plan, one block id for each of
            ``window.first(start, boundary) .. boundary - 1``.
    """

    request_id: str
    prefix: Prefix
    start: int
    boundary: int
    attention_blocks: tuple[tuple[int, ...], ...]
    state_blocks: tuple[int, ...]
    window_blocks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Save:
    """Store blocks that this step's forward completed.

    Attributes:
        attention: (block number, block id per attention group of the plan).
        states: (boundary in blocks, block id per state group of the plan).
        windows: (group, block number, block id).
        boundaries: in blocks, those of the request that are to be kept longest; empty
            when nothing is new about that.
    """

    request_id: str
    prefix: Prefix
    attention: tuple[tuple[int, tuple[int, ...]], ...]
    states: tuple[tuple[int, tuple[int, ...]], ...]
    windows: tuple[tuple[int, int, int], ...] = ()
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """One step's work.

    Attributes:
        dropped: (request, number of the question) whose claims are to be released.
        idle: no forward runs in this step, so waiting for a load delays nobody.
        epoch: how often the store was reset when the step was scheduled. What a step of
            an earlier epoch computed is not stored: the weights may be others by now.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    idle: bool = False
    epoch: int = 0


NOTHING = StepMetadata()
