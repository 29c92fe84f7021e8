# SPDX-License-Identifier: Apache-2.0
"""``s3://``: a bucket. Refuses wrong options.

LMCache would log a warning and go on without the store.
"""

import ipaddress
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.config.stores.base import Place, StoreKind, parts_of
from lmcache_hybrid.core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig


_HOST = re.compile(r"[^@:]+(:\d+)?")
# AWS' own, without a bucket in front.
_ENDPOINT = re.compile(r"s3([.-](dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com")
# The region in a host of AWS.
_REGION = re.compile(
    r"\.s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.com(?:\.cn)?(?::\d+)?$"
)
# A bucket with a dot in its name at AWS.
_DOTTED = re.compile(
    r"([^.]+\.[^:]+)\.s3([.-](dualstack\.)?[a-z]{2}(-[a-z]+)+-\d+)?\.amazonaws\.com(\.cn)?(:\d+)?"
)
# Texts that mean false.
_FALSE = ("false", "0", "no", "off", "none")


class Bucket(StoreKind):
    """One object for each record."""

    schemes = ("s3",)
    make_connector = "lmcache_hybrid.storage.remote.s3:connect"
    tool_advice = (
        "list and delete objects with the AWS command line, and have a lifecycle rule of the "
        "bucket delete old ones"
    )
    own_options = ("save_chunk_meta",)  # an object has its size, see _check

    def check(self, place: Place, config: "LMCacheEngineConfig") -> None:
        _check(parts_of(place.url), config.extra_config or {})

    def unencrypted(self, place: Place, config: "LMCacheEngineConfig") -> str | None:
        if not (config.extra_config or {}).get("disable_tls"):
            return None
        host = place.url.partition("://")[2].partition(":")[0]
        try:
            return None if ipaddress.ip_address(host).is_loopback else place.url
        except ValueError:
            return None if f".{host}".endswith(".localhost") else place.url


def _check(parts: SplitResult, extra: dict[str, Any]) -> None:
    """Check an ``s3://`` URL and the options beside it.

    Args:
        extra: LMCache's ``extra_config``.

    Raises:
        ConfigError: LMCache could not make a client of these.
    """
    alone = not re.search("[.:]", parts.netloc) or _ENDPOINT.fullmatch(parts.netloc)
    if not _HOST.fullmatch(parts.netloc) or parts.path or parts.query or alone:
        raise ConfigError(
            f"LMCache option remote_url={without_password(parts.geturl())!r} is not a host alone, "
            "with the bucket's name in front, which is all that LMCache takes; write "
            "s3://BUCKET.s3.REGION.amazonaws.com, or the like of another server."
        )
    if not extra.get("s3_region"):
        raise ConfigError(
            "LMCache option extra_config.s3_region is not set; set it to the bucket's region, such "
            "as us-east-1, which servers without regions accept too."
        )
    found = _REGION.search(parts.netloc)
    if found and extra["s3_region"] != found[1]:
        raise ConfigError(
            f"LMCache option extra_config.s3_region={extra['s3_region']!r} is not the region of "
            f"remote_url={parts.geturl()!r}, which AWS would refuse; set it to {found[1]}."
        )
    dotted = _DOTTED.fullmatch(parts.netloc)
    if dotted and not extra.get("disable_tls"):
        raise ConfigError(
            f"LMCache option remote_url={parts.geturl()!r} names the bucket {dotted[1]!r}, whose "
            "dot no certificate of AWS covers; use a bucket without a dot in its name."
        )
    if extra.get("aws_session_token") and extra.get("aws_access_key_id"):
        raise ConfigError(
            "LMCache option extra_config.aws_session_token is read by nobody, and without it AWS "
            "refuses the other two keys; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
            "AWS_SESSION_TOKEN instead of all three."
        )
    if extra.get("save_chunk_meta"):
        raise ConfigError(
            f"LMCache option extra_config.save_chunk_meta={extra['save_chunk_meta']!r} is not for "
            "s3://, where a value is one object without metadata; remove it."
        )
    for name in ("disable_tls", "s3_prefer_http2", "s3_enable_s3express"):
        value = extra.get(name)
        if isinstance(value, str) and value.strip().lower() in _FALSE:
            raise ConfigError(
                f"LMCache option extra_config.{name}={value!r} is a text, which LMCache takes for "
                "true whatever it says; write false without quotes."
            )
    threads = extra.get("s3_num_io_threads", 1)
    if not str(threads).isdecimal() or not int(threads):
        raise ConfigError(
            f"LMCache option extra_config.s3_num_io_threads={threads!r} is not a number of "
            "threads; write a whole number above 0, or remove it."
        )
