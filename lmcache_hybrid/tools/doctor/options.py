# SPDX-License-Identifier: Apache-2.0
"""Settings that this package refuses, or that will not do what they say."""

from collections.abc import Iterator
from types import SimpleNamespace

from lmcache_hybrid.config.options import (
    DEFAULT_CHUNK_SIZE,
    check_lengths,
    check_pool,
    read_options,
    refusals,
)
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, error, ok, skipped, warning


def check_options(context: Context) -> Iterator[Finding]:
    """LMCache's options and ours, by the checks that an engine makes."""
    yield from context.troubles
    config = context.config
    if config is None:
        yield skipped("options", "There is no configuration to check; see above.")
        return
    refused = refusals(config, context.block_size)
    yield from (error("options", sentence) for sentence in refused)
    try:
        options = read_options(SimpleNamespace(kv_transfer_config=context.transfer), config)
        if context.model is not None and context.block_size is not None:
            check_lengths(options, context.block_size)
            check_pool(config, context.model.largest)
    except ConfigError as failure:
        refused.append(str(failure))
        yield error("options", str(failure))
        return
    if not refused:
        yield ok("options", "Every option is accepted.")
    if not options.save:
        yield warning(
            "options",
            "This engine stores nothing (kv_role kv_consumer or LMCACHE_FORCE_SKIP_SAVE).",
            "Set kv_role to kv_both, unless another engine fills the store.",
        )
    elif not (config.local_cpu or config.local_disk or config.remote_url):
        yield error(
            "options",
            "local_cpu, local_disk and remote_url are all off, so nothing is kept.",
            "Set local_cpu to true, or name a disk or a remote store.",
        )


def check_chunk_size(context: Context) -> Iterator[Finding]:
    """LMCache's chunk against the model's block; a wrong one is refused with the options."""
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
