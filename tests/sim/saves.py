# SPDX-License-Identifier: Apache-2.0
"""What a save copies is what its key says: found in the step of the save, not at a later hit."""

from lmcache_hybrid.protocol.metadata import SaveSpec
from lmcache_hybrid.worker.saver import Saver

from .model import ToyRank, WrongBytes


def install(patch) -> None:
    """Check each save of a rank without a device, where copies are made at once.

    A save never raises, so the rank does at the end of the step.
    """
    save = Saver._save

    def checked(self: Saver, spec: SaveSpec) -> None:
        rank = ToyRank.running
        if rank.device is None:
            rank.wrong_save = rank.wrong_save or find_wrong(rank, spec, self._plan.block_size)
        save(self, spec)

    patch.setattr(Saver, "_save", checked)


def find_wrong(rank: ToyRank, spec: SaveSpec, block_size: int) -> WrongBytes | None:
    """Say which block does not hold the state that ``spec`` stores it as."""
    request = rank.requests.get(spec.request_id)
    if request is None:
        return None
    states = [(boundary * block_size, blocks) for boundary, blocks in spec.states]
    states += [(end, blocks) for end, _, blocks in spec.tails]
    for end, blocks in states:
        for group, block in zip(rank.states, blocks, strict=True):
            held, right = rank.pages[block, :2], request.truth.hash_at(end) ^ rank._mix[group]
            if rank.layers[group] and (held[0] != end or held[1] != right):
                return WrongBytes(
                    f"{spec.request_id} rank {rank.rank} state group {group}: block {block} is "
                    f"stored as the state at {end} and says {held[0]}"
                )
    return None
