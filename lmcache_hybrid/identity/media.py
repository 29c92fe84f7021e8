# SPDX-License-Identifier: Apache-2.0
"""Decides whether a request's images, audio and videos are named by their content.

vLLM names an item by the hash of its content, or by the client's ``multi_modal_uuids``, and block
hashes cover either name. The process that reads the item marks the request, see
:mod:`vllm_patch.media_marks`; the scheduler reads the mark here.
"""

from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.identity.media")

# Key in ``SamplingParams.extra_args``. A client's own value is overwritten.
MARK = "lmcache_hybrid_media"
CONTENT, CLIENT = "content", "client"
# Prefix of all names from clients, so that none equals a content hash.
CLIENT_PREFIX = "client-uuid:"


def mark_of(params: "SamplingParams | None") -> str | None:
    """Return the mark that a request's parameters carry."""
    mark: str | None = (params.extra_args or {}).get(MARK) if params is not None else None
    return mark


def carry_mark(
    session: "Request", earlier: str | None, media_before: bool, media_added: bool
) -> None:
    """Mark a session whose next part has just replaced its parameters. Mutates these.

    Each part is marked for its own media only, and the session has all of them.

    Args:
        earlier: the mark before.
        media_before: whether earlier parts had media.
        media_added: whether this part has some.
    """
    params = session.sampling_params
    if not media_before or params is None:
        return
    marks = {earlier, mark_of(params)} if media_added else {earlier}
    extra = {key: value for key, value in (params.extra_args or {}).items() if key != MARK}
    if marks <= {CONTENT, CLIENT}:
        extra[MARK] = CLIENT if CLIENT in marks else CONTENT
    params.extra_args = extra or None


def may_cache(request: "Request") -> bool:
    """Whether blocks with the request's media may be stored and hit.

    True without media, and if vLLM hashed all of them. Names from clients count only with a
    ``cache_salt``: two clients may give one name to two images. False for an unmarked request, and
    behind vLLM's Rust front end, where a client could have set the mark.
    """
    features = request.mm_features
    if not features:
        return True
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.warning_once(
            "Requests with images, audio or video are not cached: vLLM's Rust front end does not "
            "say who named them. Unset VLLM_USE_RUST_FRONTEND to have them cached."
        )
        return False
    mark = mark_of(request.sampling_params)
    if mark == CONTENT and not any(CLIENT_PREFIX in item.identifier for item in features):
        return True
    if mark in (CONTENT, CLIENT):
        if request.cache_salt:
            return True
        logger.warning_once(
            "Requests with multi_modal_uuids are not cached without a cache_salt: two clients "
            "may give one uuid to two images. Send a cache_salt for each tenant, or no uuids."
        )
        return False
    logger.warning_once(
        "Requests with images, audio or video are not cached: the process that read them has "
        "not marked them. Install lmcache-hybrid where the API server runs, and let "
        "VLLM_PLUGINS not exclude it."
    )
    return False
