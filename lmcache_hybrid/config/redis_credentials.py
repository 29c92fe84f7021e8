# SPDX-License-Identifier: Apache-2.0
"""Keeps user, password and TLS of Redis out of URLs, command lines and LMCache's logs."""

import contextlib
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, unquote_plus, urlsplit

from redis import ConnectionPool, CredentialProvider, RedisError
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, parse_url

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.secret_files import is_path

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

USERNAME, PASSWORD = "LMCACHE_HYBRID_REDIS_USERNAME", "LMCACHE_HYBRID_REDIS_PASSWORD"
PASSWORD_FILE, CA_FILE = "LMCACHE_HYBRID_REDIS_PASSWORD_FILE", "LMCACHE_HYBRID_REDIS_CA"
SEVERAL_HOSTS = ("redis-cluster", "redis-sentinel")
# Keys of LMCache's extra_config that its Redis plugin reads a URL from.
PLUGIN_URLS = ("remote_storage_plugin.redis.redis_url", "redis_url")
# Keys of LMCache's extra_config that its S3 client reads a login from.
S3_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
# What redis-py reads from a URL's query.
IN_QUERY = {*URL_QUERY_ARGUMENT_PARSERS, "client_name", "username", "password"}
# redis-py also takes a password there: unix:///run/redis.sock?password=...
_IN_QUERY = re.compile(r"(?<=[?&])password=([^&#]*)&?")

# In any text, also in tables: rather more than a login than less.
_LOGIN = re.compile(r"//\S*@")
_SECRETS = re.compile(
    rf"(?:(?<=[?&])(password=)[^&#\s]*|((?:{'|'.join(S3_KEYS)}|password)['\"]?\s*[:=]\s*['\"]?)"
    r"[^'\",}&#\s]+)",
    re.IGNORECASE,
)

# (user, password) that :func:`hide_passwords` took out of a URL, by the remaining URL.
_hidden: dict[str, tuple[str, str]] = {}


class _InFile(str):
    """A password that a file has; see :func:`read_again`."""


class _LoginOfFile(CredentialProvider):
    """Reads the file for each connection, because what mounts a secret also replaces it."""

    def __init__(self, user: str | None, password: str) -> None:
        self._user, self._first = user, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._first
        with contextlib.suppress(ConfigError):  # it is being replaced
            password = _password()
        return (self._user, password) if self._user else (password,)


class _Hidden(str):
    """A secret that LMCache's log of its configuration leaves out."""

    def __repr__(self) -> str:
        return "'***'"


def without_password(url: str) -> str:
    """Return ``url`` without user, password and query, safe to show."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return re.split("[?#]", url.rpartition("@")[2])[0]
    if scheme not in ("fs", "file"):  # these have no login, but paths with any character
        # Up to the last "@": a password that is not escaped may hold "/", "?" and "#".
        rest = re.split("[?#]", rest.rpartition("@")[2])[0]
    return scheme + separator + rest


def shown(value: Any) -> str:
    """Format a value without the logins of its URLs."""
    return _LOGIN.sub("//", repr(value))


def without_secrets(text: str) -> str:
    """Return what a log may have of a text: logins of URLs and keys of S3 are left out."""
    return _SECRETS.sub(r"\1\2***", _LOGIN.sub("//", text))


def connection_options(url: str) -> dict[str, Any]:
    """Return the connection options of ``url`` as redis-py names them. The URL's own win.

    Raises:
        ConfigError: the password file or the certificates cannot be read.
    """
    options: dict[str, Any] = {}
    user, password = login_of(url)
    if not password:
        user, password = _hidden.get(url) or (user or os.environ.get(USERNAME, ""), _password())
    if password:
        options["password"] = password
    if user:
        options["username"] = user
    scheme = url.partition("://")[0].lower()
    certificates = os.environ.get(CA_FILE)
    if certificates and (scheme == "rediss" or scheme in SEVERAL_HOSTS):
        if not os.access(certificates, os.R_OK):
            raise ConfigError(
                f"{CA_FILE}={certificates!r} cannot be read; name the file with the certificates "
                "that the servers' own are signed with."
            )
        options["ssl_ca_certs"] = certificates
        if scheme in SEVERAL_HOSTS:
            options["ssl"] = True
    return options


def read_again(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a connection which reads a file's password whenever it connects."""
    if not isinstance(options.get("password"), _InFile):
        return options
    options = dict(options)
    login = _LoginOfFile(options.pop("username", None), options.pop("password"))
    return options | {"credential_provider": login}


def _password() -> str:
    path = os.environ.get(PASSWORD_FILE)
    if not path:
        return os.environ.get(PASSWORD, "").removesuffix("\n")
    try:
        return _InFile(Path(path).read_text().removesuffix("\n"))
    except (OSError, UnicodeDecodeError) as error:
        shown = f"={path!r}" if is_path(path) else ""  # it may be the password itself
        raise ConfigError(
            f"{PASSWORD_FILE}{shown} cannot be read; name a text file with the password alone."
        ) from (error if shown else None)


def login_of(url: str) -> tuple[str, str]:
    """Return user and password of a URL, read as LMCache's connectors read them."""
    user, _, password = _login_and_rest(url)[0].partition(":")
    if url.lower().startswith(SEVERAL_HOSTS):
        return user, password
    queried = _IN_QUERY.search(url) if _has_query(url) and not password else None
    return unquote(user), unquote_plus(queried[1]) if queried else unquote(password)


def _has_query(url: str) -> bool:
    """Whether redis-py reads settings from this URL's query."""
    return url.partition("://")[0].lower() in ("redis", "rediss", "unix")


def _login_and_rest(url: str) -> tuple[str, str]:
    """Split a URL into its login ("" for none) and the URL without it."""
    scheme, separator, rest = url.partition("://")
    several = scheme.lower() in SEVERAL_HOSTS
    if not separator or scheme.lower() in ("fs", "file") or _ends_in_login(url):
        return "", url
    # In other URLs a path or a query may also contain an "@".
    login, at, _ = (rest if several else re.split("[/?#]", rest)[0]).rpartition("@")
    return login, f"{scheme}://{rest[len(login) + len(at) :]}"


def _ends_in_login(url: str) -> bool:
    """Whether a sign / ? # of the login, not escaped, ends the part of a URL that has it."""
    scheme, _, rest = url.partition("://")
    before, at, _ = rest.rpartition("@")
    first = re.split("[/?#]", before)[0]
    if not _has_query(url) or not at or first == before:
        return False
    if scheme.lower() == "unix":  # nothing but a login stands before the path
        return bool(first) and "@" not in first
    # A query may hold an "@". No database does, and there are no fragments.
    asked = before.partition("?")[2].partition("=")[0]
    return "#" in before or not (asked in IN_QUERY or asked.startswith("ssl_"))


def split_url(url: str) -> SplitResult:
    """Parse a URL.

    Raises:
        ValueError: it names several servers where one is meant; its password contains a sign
            that is not escaped; its port is not a number; its database is none, which redis-py
            takes for 0; or its query has a bad value. The message quotes no part of the URL,
            unlike Python's.
    """
    if _ends_in_login(url):
        raise ValueError(
            "its user or password has a sign that ends it; write the signs / ? # @ there as %2F "
            "%3F %23 %40"
        )
    try:
        parts = urlsplit(url)
        several = "," in parts.netloc.rpartition("@")[2]
        if parts.scheme in ("redis", "rediss") and not several:
            parts.port  # noqa: B018
    except ValueError:
        raise ValueError(
            "its port is not a number; write the signs / ? # @ of a password as %2F %3F %23 %40"
        ) from None
    if parts.scheme in ("redis", "rediss") and several:
        raise ValueError(
            "it names several servers; write one, or those of a cluster or all sentinels as "
            "redis-cluster://host:port,host:port or redis-sentinel://host:port,host:port"
        )
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            read = parse_url(url)
        except ValueError as error:  # names what is wrong in the query
            raise ValueError(f"{error}".rstrip(".") + "; correct it") from None
        if parts.scheme != "unix" and parts.path.strip("/") and "db" not in read:
            raise ValueError("its database is not a number; write one, as in redis://host:6379/0")
        _check_query(url, read)
    return parts


def _check_query(url: str, read: dict[str, Any]) -> None:
    """Raise ValueError if redis-py's connections do not take what a URL's query sets."""
    # Records are bytes, and read by our own client.
    for name, served in (("decode_responses", (False, "false", "False")), ("protocol", (2, "2"))):
        if name in read and read[name] not in served:
            raise ValueError(f"its setting {name} is not for records; remove it")
    pool = ConnectionPool.from_url(url)
    try:
        pool.connection_class(**pool.connection_kwargs)  # connects to nothing
    except (TypeError, AttributeError) as error:
        name = f"{error}".rpartition("argument ")[2] if "argument " in f"{error}" else ""
        setting = f"its setting {name} is none" if name else "a setting in it is none"
        tls = ", and write rediss:// for TLS" if "ssl" in name and url.startswith("redis:") else ""
        raise ValueError(f"{setting} of Redis' connections; remove it{tls}") from None
    except RedisError as error:
        raise ValueError(f"{error}".rstrip(".") + "; correct it") from None


def hide_passwords(config: "LMCacheEngineConfig") -> None:
    """Hide logins before LMCache logs its configuration. Mutates ``config``.

    They are taken out of URLs, where :func:`connection_options` still finds them in this process by
    the remaining URL. Those of S3 stay, but for their ``repr``.
    """
    if config.remote_url:
        config.remote_url = _hide(config.remote_url)
    if config.remote_config_url:  # asked already
        config.remote_config_url = without_secrets(config.remote_config_url)
    extra = config.extra_config or {}
    for name in PLUGIN_URLS:
        if isinstance(extra.get(name), str):
            extra[name] = _hide(extra[name])
    for name in S3_KEYS:
        if isinstance(extra.get(name), str):
            extra[name] = _Hidden(extra[name])


def plugin_url(config: "LMCacheEngineConfig") -> tuple[str, str]:
    """Return (option, URL) of LMCache's Redis plugin, as LMCache's own adapter finds it."""
    extra = config.extra_config or {}
    for name in PLUGIN_URLS:
        if extra.get(name):
            return f"extra_config.{name}", str(extra[name])
    return "remote_url", config.remote_url or "redis://localhost:6379"


def with_login(url: str, user: str, password: str) -> str:
    """Add a login to ``url``, which has none.

    As after :func:`hide_passwords`, the returned URL does not contain the password.
    """
    if password:
        _hidden[url] = user, password
    elif user:
        return url.replace("://", f"://{quote(user, safe='')}@", 1)
    return url


def _hide(url: str) -> str:
    user, password = login_of(url)
    if not password:
        return url
    _, bare = _login_and_rest(url)
    if _has_query(bare):
        bare = _IN_QUERY.sub("", bare).rstrip("?&")
    _hidden[bare] = user, password
    return bare


def holds_password(value: object) -> bool:
    """Whether this setting contains a URL with a password, or the secret key of S3."""
    if isinstance(value, dict):
        return bool(value.get(S3_KEYS[1])) or any(map(holds_password, value.values()))
    return isinstance(value, str) and (S3_KEYS[1] in value or bool(login_of(value)[1]))


def unencrypted(url: str | None) -> str | None:
    """Return ``url``, safe to show, if records leave this machine without TLS; else None."""
    scheme = (url or "").partition("://")[0].lower()
    if not url or scheme not in ("redis", *SEVERAL_HOSTS):
        return None
    if scheme in SEVERAL_HOSTS and os.environ.get(CA_FILE):
        return None
    shown = without_password(url)
    hosts = shown.partition("://")[2].partition("/")[0].split(",")
    return None if all(map(_is_loopback, hosts)) else shown


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or "localhost"
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
