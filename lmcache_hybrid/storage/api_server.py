# SPDX-License-Identifier: Apache-2.0
"""Refuses endpoints of LMCache's internal API server that do not work with a hybrid model.

They answer 501 and say why. LMCache's own would answer "success" and change nothing, or replace
this package's backend with one of LMCache's, without any records.
"""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lmcache_hybrid.core.backends import RAM

if TYPE_CHECKING:
    from starlette.middleware.base import RequestResponseEndpoint

    from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine, LMCacheManager

NOT_IMPLEMENTED = 501
READS = ("GET", "HEAD", "OPTIONS")
# Changes that mean the same for records as for chunks of attention.
_WORK = {
    ("PUT", "/freeze/enable"),
    ("PUT", "/freeze/disable"),
    ("PUT", "/hot_cache/enable"),
    ("PUT", "/hot_cache/disable"),
    ("PUT", "/bypass/add"),
    ("PUT", "/bypass/remove"),
    ("POST", "/metrics/reset"),
    ("POST", "/run_script"),  # off unless LMCache's extra_config allows imports
}
_CLEAR = ("DELETE", "/cache/clear")
# Why other changes do not work, by the first part of their path.
_WHY = {
    "conf": "options are read when the engine starts; change LMCache's file and restart the engine",
    "backends": "a backend that LMCache makes anew does not know the records; restart the engine",
    "lookup": "lookups of a hybrid model are not LMCache's; restart the engine",
    "cache": "it stores and loads chunks of attention alone; send the prompt to the engine",
    "chunk_statistics": "chunks are not counted for hybrid models; see vLLM's /metrics",
}
_UNKNOWN = "nobody has checked what it does to records; restart the engine instead"


def guard(server: Any, manager: "LMCacheManager") -> None:
    """Make a server refuse what does not work. Call before it starts.

    Args:
        server: LMCache's InternalAPIServer.
        manager: what it serves.
    """

    async def refuse(request: Request, call_next: "RequestResponseEndpoint") -> Response:
        why = _why_not(request, manager.lmcache_engine)
        if why is None:
            return await call_next(request)
        error = f"{request.method} {request.url.path} does not work with a hybrid model: {why}."
        return JSONResponse({"error": error}, NOT_IMPLEMENTED)

    if server.enable:
        server.app.middleware("http")(refuse)


def _why_not(request: Request, engine: "LMCacheEngine | None") -> str | None:
    """Return why a request is refused, and the fix; None to let it pass."""
    call = request.method, request.url.path
    if request.method in READS or call in _WORK:
        return None
    if call != _CLEAR:
        return _WHY.get(request.url.path.split("/")[1], _UNKNOWN)
    if engine is None:  # as of the scheduler: LMCache says so
        return None
    asked = request.query_params.getlist("locations") or engine.storage_manager.storage_backends
    if set(asked) <= {RAM}:
        return None
    return (
        f"LMCache clears RAM alone; add ?locations={RAM} for that, delete what lies in stores with "
        "lmcache-hybrid purge, or call vLLM's /reset_prefix_cache?reset_external=true"
    )
