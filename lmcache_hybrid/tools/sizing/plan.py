# SPDX-License-Identifier: Apache-2.0
"""Computes all figures of ``lmcache-hybrid plan``, as in its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lmcache_hybrid.core.expected_states import boundaries
from lmcache_hybrid.core.groups import suggested_unit
from lmcache_hybrid.core.sizes import GIB
from lmcache_hybrid.tools.sizing import sharing, storage
from lmcache_hybrid.tools.sizing.blocks import Platform, Sizes
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, ModelShape
from lmcache_hybrid.tools.sizing.storage import BACKENDS, CHUNK_ENDS, Workload
from lmcache_hybrid.tools.sizing.to_write import to_write

INTERVALS = (16, 8, 4, 2, 1)  # T in blocks, as in docs/reuse.md
# GiB a second to all ranks: from RAM as in the fastest report of docs/generated/gpu (one H100,
# small models), and from a store on a 25 Gbit network.
RAM_RATE, NETWORK_RATE = 2.5, 2.5
# Sizes per rank in what is to be written.
LIMITS = ("max_local_cpu_size", "max_local_disk_size")
# Prompts in RAM above a disk or folder, as in docs/recipes.md.
RAM_PROMPTS = 10


def plan_of(
    model: str,
    shape: ModelShape,
    platform: Platform,
    sizes: Sizes,
    work: Workload,
    *,
    raised: bool,
    hopper: int,
    prefill_rate: int,
    load_rates: Mapping[str, float],
    backends: Sequence[str],
    hosts: int,
    lost: Mapping[str, str],
    flags: list[str],
    shared_by: sharing.Sharing,
) -> dict[str, Any]:
    """Compute the size of a workload; bytes are over all ranks unless named per rank.

    Args:
        raised: whether N is more than the block size that vLLM starts from.
        hopper: N with FlashInfer's prefill of gated delta nets, which is for GPUs only.
        prefill_rate: tokens a second.
        load_rates: bytes a second to all ranks together, by where records come from.
        backends: names in BACKENDS.
        hosts: of one engine; they have equally many ranks.
        lost: what hits lose to a drafter, by release of vLLM, see ``config.drafts.planned``.
        flags: vLLM's flags for these sizes, name and value in turn.
        shared_by: the engines of one store; its figures are None for no engine.
    """
    n, heads = sizes.block_size, shape.attention.heads * sizes.dcp
    return {
        "model": model,
        "platform": platform.name,
        "dtypes": {"weights": shape.dtype},
        "block_size": sizes.state_tokens,
        # Ranks that share an attention block, which has so many times N tokens.
        "decode_context_parallel": sizes.dcp,
        "block_size_is_logged": raised,
        "block_size_with_flashinfer_prefill": hopper,
        # Ranks that hold and store the same KV head; not of latent attention.
        "ranks_per_kv_head": 1 if shape.attention.latent else max(1, sizes.tp // heads),
        # Whether a prompt of this length can hit at all.
        "hits": bool(boundaries(work.context, n, 0, work.unit)),
        "tensor_parallel": sizes.tp,
        "hosts": hosts,
        "groups_per_rank": [asdict(group) for group in sizes.groups],
        "attention_bytes_per_block": sizes.in_all(ATTENTION),
        "state_bytes_per_boundary": sizes.in_all(STATE),
        "workload": asdict(work),
        "bytes_per_prompt": storage.bytes_of_one(sizes, work),
        "backends": {name: _backend(name, sizes, work, flags, hosts) for name in backends},
        "checkpoints": [_checkpoint(sizes, work, tokens) for tokens in _intervals(work, n)],
        "units": [
            _unit(sizes, work, unit, prefill_rate, load_rates)
            for unit in _units(work, sizes.state_tokens)
        ],
        "lost_to_drafts": dict(lost),
        "rates": {"prefill_tokens": prefill_rate, "load_bytes": dict(load_rates)},
        "one_store": sharing.demand(sizes, work, shared_by) if shared_by.engines else None,
    }


def _backend(
    name: str, sizes: Sizes, work: Workload, flags: list[str], hosts: int
) -> dict[str, Any]:
    found = storage.stored(sizes, work, BACKENDS[name])
    in_ram = storage.stored(sizes, replace(work, prompts=RAM_PROMPTS, shared=0), BACKENDS["ram"])
    own: dict[str, Any] = {}
    if work.checkpoint != CHUNK_ENDS:
        own["lmcache.hybrid_checkpoint_tokens"] = work.checkpoint
    write = to_write(name, sizes, found.taken, own, flags, bytes_in_ram=in_ram.taken)
    per_rank = {option: write["lmcache_yaml"].get(option) for option in LIMITS}
    return {
        **asdict(found),
        "gib_per_rank": found.taken / sizes.tp / GIB,
        # What the ranks of one host may take together, by the option to write.
        "gib_per_host": {
            option: round(size * sizes.tp / hosts, 1) for option, size in per_rank.items() if size
        },
        "limit": BACKENDS[name].limit,
        "write": write,
    }


def _intervals(work: Workload, n: int) -> list[int | str]:
    """List T of each row of its table: chunk ends, none, then the largest first."""
    chosen = {blocks * n for blocks in INTERVALS if blocks * n < work.context}
    if isinstance(work.checkpoint, int) and work.checkpoint:
        chosen.add(work.checkpoint)
    return [CHUNK_ENDS, 0, *sorted(chosen, reverse=True)]


def _checkpoint(sizes: Sizes, work: Workload, tokens: int | str) -> dict[str, Any]:
    """Compute the gain and cost of one T."""
    work = replace(work, checkpoint=tokens)
    context, n, interval = work.context, sizes.block_size, work.interval(sizes.state_tokens)
    at_most, expected = storage.after_branch(context, n, interval)
    return {
        "tokens": tokens,
        "interval": interval,
        "states": len(boundaries(context, n, interval, work.unit)),
        "bytes_per_prompt": storage.bytes_of_one(sizes, work),
        "recomputed_at_most": at_most,
        "recomputed_expected": round(expected),
        "prefill_steps": storage.prefill_steps(context, n, interval, work.step_tokens, work.unit),
    }


def _units(work: Workload, n: int) -> list[int]:
    """List N and the useful units, the user's included; the largest first."""
    chosen = {n, suggested_unit(n), suggested_unit(n, n // 8), suggested_unit(n, 16), work.unit}
    return sorted(chosen - {0}, reverse=True)


def _unit(
    sizes: Sizes, work: Workload, unit: int, prefill_rate: int, load_rates: Mapping[str, float]
) -> dict[str, Any]:
    """Compute the gain and cost of one U, in tokens; N stands for hits at multiples of N only.

    ``faster_from`` is the shortest hit that loads faster than it computes.
    """
    n = sizes.block_size
    work = replace(work, unit=unit if unit < n else 0)
    return {
        "tokens": unit,
        "shortest": unit + 1,
        "computed_again": unit,
        "bytes_per_prompt": storage.bytes_of_one(sizes, work),
        "prefill_steps": storage.prefill_steps(
            work.context, n, work.interval(sizes.state_tokens), work.step_tokens, work.unit
        ),
        "faster_from": {
            name: storage.break_even(sizes, unit, prefill_rate, rate)
            for name, rate in load_rates.items()
        },
    }
