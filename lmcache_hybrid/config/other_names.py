# SPDX-License-Identifier: Apache-2.0
"""Translates ``resp://`` and ``valkey://`` to Redis URLs.

LMCache has a connector for each; here one connector serves all, and engines find each other's
records whichever name they use. Options of LMCache's connectors keep their meaning or are refused.
"""

import logging
import os
import re
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.redis_credentials import CA_FILE, with_login, without_password
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

# vLLM's own logger, without importing vLLM: operators' commands also read URLs.
logger = logging.getLogger("vllm.lmcache_hybrid.config.other_names")

RESP, VALKEY = "resp", "valkey"
# LMCache's variables for the login to a resp:// server.
RESP_USERNAME, RESP_PASSWORD = "LMCACHE_RESP_USERNAME", "LMCACHE_RESP_PASSWORD"
_OWN_THREADS = "reads and writes have threads of their own here; remove it"
_ONE_TIMEOUT = "a read may take blocking_timeout_secs; remove it and set that"
_TTL = "valkey_enable_ttl"
# Keys of extra_config that are refused here, by scheme, and why.
_REFUSED = {
    RESP: {"resp_num_threads": _OWN_THREADS},
    VALKEY: {
        "valkey_num_workers": _OWN_THREADS,
        "valkey_sync_num_workers": _OWN_THREADS,
        "request_timeout": _ONE_TIMEOUT,
        "connection_timeout": _ONE_TIMEOUT,
        _TTL: "records have no TTL; set maxmemory-policy allkeys-lru on the server and remove it",
    },
}


def name_as_redis(config: "LMCacheEngineConfig") -> None:
    """Write the ``redis://`` name of the same server into ``remote_url``. Mutates ``config``.

    Takes the login out of ``extra_config``, which LMCache logs.

    Raises:
        ConfigError: an option that is refused here, or no host and port.
    """
    url = config.remote_url or ""
    scheme, _, rest = url.partition("://")
    if scheme not in (RESP, VALKEY):
        return
    if not re.fullmatch(r"[^/?#@,]+:\d+/?", rest):
        raise ConfigError(
            f"LMCache option remote_url={without_password(url)!r} is not a host and a port alone; "
            f"write {scheme}://host:port."
        )
    extra = config.extra_config if config.extra_config is not None else {}
    for name, why in _REFUSED[scheme].items():
        value = extra.get(name)
        if _is_true(value) if name == _TTL else value is not None:
            raise ConfigError(
                f"LMCache option extra_config.{name}={value!r} does not work with "
                f"{scheme}:// on a hybrid model: {why}."
            )
    if _is_true(extra.pop("save_chunk_meta", False)):
        raise ConfigError(
            f"LMCache option extra_config.save_chunk_meta=True is not for {scheme}://, where a "
            "value has no metadata; remove it."
        )
    server = rest.rstrip("/")
    new = _valkey(server, extra) if scheme == VALKEY else f"redis://{server}"
    config.remote_url = with_login(new, *_login(scheme, extra))
    logger.info("%s is reached as %s: both are names of one store.", url, new)


def _is_true(value: Any) -> bool:
    """Read a boolean as LMCache reads it from ``extra_config``."""
    return str(value).strip().lower() in ("true", "1")


def _login(scheme: str, extra: dict[str, Any]) -> tuple[str, str]:
    if scheme == VALKEY:
        return str(extra.pop("valkey_username", "")), str(extra.pop("valkey_password", ""))
    user = str(extra.pop("username", "")) or os.environ.get(RESP_USERNAME, "")
    return user, str(extra.pop("password", "")) or os.environ.get(RESP_PASSWORD, "")


def _valkey(server: str, extra: dict[str, Any]) -> str:
    tls, mode = _is_true(extra.get("tls_enable", False)), extra.get("valkey_mode", "standalone")
    if mode not in ("standalone", "cluster"):
        raise ConfigError(
            f"LMCache option extra_config.valkey_mode={mode!r} is not a mode; write standalone or "
            "cluster."
        )
    if mode == "cluster":
        if tls and not os.environ.get(CA_FILE):
            raise ConfigError(
                "LMCache option extra_config.tls_enable=True with valkey_mode=cluster needs the "
                f"certificates that the servers' own are signed with; name their file in {CA_FILE}."
            )
        return f"redis-cluster://{server}"
    database = extra.get("valkey_database")
    if database is not None and not re.fullmatch(r"\d+", str(database)):
        raise ConfigError(
            f"LMCache option extra_config.valkey_database={database!r} is not a database; write a "
            "whole number."
        )
    return f"{'rediss' if tls else 'redis'}://{server}{'' if database is None else f'/{database}'}"
