# SPDX-License-Identifier: Apache-2.0
"""Checks what the model's groups mean for hits, and settings that have no effect."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from lmcache_hybrid.config.check import beside
from lmcache_hybrid.config.drafts import too_short
from lmcache_hybrid.config.lmcache_config import DEFAULT_CHUNK_SIZE, refusals
from lmcache_hybrid.config.lmcache_file import CONFIG_FILE
from lmcache_hybrid.config.lmcache_values import misspelt, taken_away, unasked
from lmcache_hybrid.config.no_hits import with_few_hits, without_hits
from lmcache_hybrid.config.options import Options, without_events
from lmcache_hybrid.config.own_options import remarks
from lmcache_hybrid.config.store_sizes import check_folder_limit, check_sizes
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import suggested_unit
from lmcache_hybrid.storage.hosts import own_address
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, Status, error, ok, skipped, warning
from lmcache_hybrid.tools.doctor.folders import stand_ins
from lmcache_hybrid.tools.doctor.model import CPU, Model

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


def check_model(context: Context) -> Iterator[Finding]:
    """Report groups, N, bytes per block and per state."""
    model = context.model
    if model is None:
        if context.named is None:
            yield skipped("model", "No MODEL was named.", "Name it: lmcache-hybrid doctor MODEL.")
        return
    if not model.served:
        yield warning(
            "model",
            "The model has no recurrent layers (nor windows with HMA on), so LMCache's own adapter "
            "serves it, as without this package.",
        )
        return
    windows = f", windows {model.windows}" if model.windows else ""
    where = f"On each of {model.ranks} ranks" if model.ranks > 1 else "Without tensor parallelism"
    where += f", all {len(model.stages)} stages together," if model.stages[1:] else ""
    if model.device:
        yield _device(model)
    yield ok("groups", f"Attention groups {model.attention}{windows}, state groups {model.states}.")
    yield _unit(model)
    if model.drafts:
        short = too_short(model.unit or model.block_size)
        yield ok("drafts", f"{model.drafts} {short}")
    sizes = [f"{model.attention_bytes:,} bytes of attention"]
    if model.windows:
        sizes.append(f"{model.window_bytes:,} of windows")
    yield ok(
        "bytes",
        f"{where} a block has {' and '.join(sizes)}, the states at a boundary "
        f"{model.state_bytes:,} bytes.",
    )


def check_hosts(context: Context) -> Iterator[Finding]:
    """Name the address of this host at which its ranks answer lookups, if there are others."""
    model = context.model
    if model is None or not model.served or model.hosts == 1:
        return
    try:
        address = own_address()
    except ConfigError as failure:
        yield error("hosts", str(failure))
        return
    yield ok(
        "hosts",
        f"The ranks are on {model.hosts} hosts, and each of them answers the scheduler's lookups "
        f"over TCP, encrypted, here at {address} on any free port.",
    )


def _device(model: Model) -> Finding:
    """Name the device that the figures are for."""
    if model.device != CPU:
        return ok("device", f"N and bytes are those of vLLM on this device: {model.device}.")
    sizes = " or ".join(map(str, model.gpu_sizes))
    also = f" (N is {sizes} there)" if sizes else ""
    return Finding(
        "device",
        Status.OK,
        f"vLLM runs on the CPU here: on a GPU N and bytes differ{also}.",
        f"For a GPU: lmcache-hybrid plan {model.plan}." if sizes else "For a GPU: run this on it.",
    )


def _unit(model: Model) -> Finding:
    """Report N, and U if hits may end inside a block."""
    size, unit = model.block_size, model.unit
    if model.dcp > 1:
        return _shared_unit(model)
    other = model.suggested_unit()
    if not unit:
        better = (
            f"Set --prefix-match-unit {other}: hits from {other + 1} tokens on." if other else ""
        )
        message = f"N is {size} tokens: only longer prompts can hit, at multiples of {size}."
        return Finding("block size", Status.OK, message, better)
    if model.whole or not suggested_unit(size):
        return error(
            "block size",
            f"--prefix-match-unit {unit} has no effect: this model hits at multiples of {size} "
            "only.",
            "Leave it out.",
        )
    if size % unit:
        nearest = model.suggested_unit(unit)
        fix = f"Use {nearest}." if nearest else f"Leave it out{_for_gpus(model)}."
        message = f"--prefix-match-unit {unit} does not divide this model's block size {size}"
        if model.device == CPU and model.fits_gpu(unit):
            return error(
                "block size", f"{message} on a CPU.", "Leave it out here; on a GPU it is right."
            )
        return error("block size", f"{message}.", fix)
    message = (
        f"N is {size} tokens, and with --prefix-match-unit {unit} prompts of {unit + 1} tokens and "
        f"more hit, at multiples of {unit}; engines that share a store need the same"
    )
    if not model.fits_gpu(unit) and model.gpu_sizes:
        sizes = " or ".join(map(str, model.gpu_sizes))
        return warning(
            "block size",
            f"{message}; on a GPU vLLM exits, as N is {sizes} there.",
            f"For a GPU choose U with lmcache-hybrid plan {model.plan}.",
        )
    return ok("block size", f"{message}.")


def _shared_unit(model: Model) -> Finding:
    """Report N and U where ranks share the blocks of attention."""
    size, unit, n = model.block_size, model.unit, model.block_size // model.dcp
    if unit and n % unit:
        message = f"--prefix-match-unit {unit} does not divide this model's block size {n}."
        return error("block size", message, "Leave it out.")
    return ok(
        "block size",
        f"N is {n} tokens, and {model.dcp} ranks share each attention block of {size}: prompts of "
        f"{(unit or size) + 1} tokens and more hit, at multiples of {unit or size}.",
    )


def _for_gpus(model: Model) -> str:
    return "; `lmcache-hybrid plan` has units for a GPU" if model.device == CPU else ""


def check_options(context: Context) -> Iterator[Finding]:
    """Check LMCache's options and ours as an engine does."""
    yield from context.troubles
    config = context.config
    if config is None:
        yield from _beside_others(context)
        yield skipped("options", "There is no configuration to check; see above.")
        return
    own = {} if context.transfer is None else context.transfer.kv_connector_extra_config
    file = os.environ.get(CONFIG_FILE)
    with suppress(ConfigError):  # read_options raises it again
        environment = os.environ
        moot = taken_away(file, environment), unasked(file, environment, own)
        for sentence in (*remarks(own, environment), *chain(*moot), *misspelt(environment)):
            yield warning("options", sentence)
    with stand_ins(config) as made:
        found = refusals(made.config, context.block_size, context.local_ranks)
        refused = [made.sentence(each) for each in found]
    yield from (error("options", sentence) for sentence in refused)
    others: list[str] = []
    options: Options | None = None
    try:
        options = context.read_options()
    except ConfigError as failure:
        others += failure.args
    model = context.model if context.block_size else None
    if model and model.no_decode_saves and config.save_decode_cache:
        others.append(model.no_decode_saves)
    others += _too_small(config, model, options)
    yield from (error("options", sentence) for sentence in others if sentence not in refused)
    if others:
        return
    if not refused:
        yield ok("options", "Every option is accepted.")
    if context.transfer is not None and context.transfer.kv_role == "kv_consumer":
        yield warning(
            "options",
            "This engine stores nothing (kv_role kv_consumer).",
            "Set kv_role to kv_both, unless another engine fills the store.",
        )
    most = options.max_tokens_per_load if options else 0
    publishes = True if context.publishes is None else context.publishes
    silent = without_events(config, publishes, context.inside)
    for sentence in (*with_few_hits(config), *silent):
        yield warning("options", sentence)
    longest, unit = (model.longest, model.unit or model.block_size) if model else (1, 0)
    finer = suggested_unit(unit) if model and not model.whole else 0
    if model and finer and not model.fits_gpu(finer):
        finer = 0
    role = None if context.transfer is None else context.transfer.kv_role
    generates = model is None or model.generates
    for sentence in without_hits(config, role, longest, unit, finer, most, generates):
        yield error("options", sentence)


def _too_small(
    config: "LMCacheEngineConfig", model: Model | None, options: Options | None
) -> Iterator[str]:
    """Yield a sentence for each store that holds no block of the model."""
    if model is None:
        return
    block = max(map(sum, model.stages), default=0) + model.window_bytes
    groups = len((*model.attention, *model.windows, *model.states))
    try:
        check_sizes(config, model.largest, block, groups)
    except ConfigError as failure:
        yield from failure.args
    try:
        if options is not None:
            check_folder_limit(options, block, groups)
    except ConfigError as failure:
        yield from failure.args


def _beside_others(context: Context) -> Iterator[Finding]:
    """Report what else is refused where a mistake keeps LMCache's options from being read."""
    config = context.written
    if config is None or context.transfer is None:
        return
    with stand_ins(config) as made:
        found = refusals(made.config, context.block_size, context.local_ranks)
        wrong = [made.sentence(each) for each in found]
    try:
        replace(context, config=config).read_options()
    except ConfigError as failure:
        wrong += failure.args
    told = " ".join(trouble.message for trouble in context.troubles)
    for sentence in beside(wrong, context.left):
        if sentence not in told:
            yield error("options", sentence)


def check_chunk_size(context: Context) -> Iterator[Finding]:
    """Compare LMCache's chunk with the model's block; check_options refuses a wrong one."""
    config, size = context.config, context.block_size
    if config is None or (context.model and not context.model.served):
        return
    chosen = config.chunk_size
    if size is None:
        yield skipped(
            "chunk size",
            f"chunk_size is {chosen}"
            + (", LMCache's default" if chosen == DEFAULT_CHUNK_SIZE else "")
            + "; whether it fits depends on the model's block size.",
            "Name the MODEL, or leave chunk_size out: it is set to the block size.",
        )
    elif chosen == size:
        yield ok("chunk size", f"chunk_size {chosen} is the block size.")
    elif chosen == DEFAULT_CHUNK_SIZE or chosen % size == 0:
        yield ok("chunk size", f"chunk_size {chosen} is set to the block size {size}.")
