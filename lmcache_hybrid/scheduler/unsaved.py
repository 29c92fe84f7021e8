# SPDX-License-Identifier: Apache-2.0
"""Decides for which requests nothing is stored, or loaded."""

from typing import TYPE_CHECKING

from lmcache_hybrid.config.options import Options
from lmcache_hybrid.protocol.prefix import Prefix

if TYPE_CHECKING:
    from vllm.v1.request import Request


def why_unsaved(
    request: "Request", prefix: Prefix | None, options: Options, skip_save: bool
) -> str | None:
    """Return why nothing of a request is stored, as counters name it; None if it is stored."""
    if prefix is None:
        return "uncacheable"
    if not options.save:
        return "read_only"
    if options.priority_limit is not None and request.priority > options.priority_limit:
        return "priority"
    return "skip_save" if skip_save else None


def why_unread(request: "Request") -> str | None:
    """Return why nothing is loaded for a request, as counters name it; None if it may be.

    It is still looked up, so that nothing is stored twice.
    """
    return "skip_reading" if request.skip_reading_prefix_cache else None
