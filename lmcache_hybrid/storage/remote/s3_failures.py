# SPDX-License-Identifier: Apache-2.0
"""Finds the words for why an S3 server gives no answer, and what to write."""

import http.client
import os.path
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

# Max seconds to connect, and to wait for an answer.
CAUSE_SECONDS = 1.0
# Max seconds to wait for credentials: AWS' client asks pod and machine for theirs, twice.
CREDENTIALS_SECONDS = 5.0
# What OpenSSL says of an answer that is no TLS.
_PLAIN_ANSWERS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
# Status codes of a proxy that does not reach the server, or wants a password.
_OF_PROXIES = (407, 502, 503, 504)


def cause_of_silence(endpoint: str, tls: bool) -> str:
    """Ask a server for its root, without AWS' client, to see why that gets no answer. Blocks.

    AWS' client tries again what can never succeed, until its caller stops waiting.

    Args:
        endpoint: host, or host:port.
        tls: whether AWS' client uses it.

    Returns:
        The words and what to write, as a part of a sentence; "" where this shows nothing.
    """
    scheme = "https" if tls else "http"
    try:
        parts = urlsplit(f"//{endpoint}")
        if not parts.hostname:
            return ""
        host, port = parts.hostname, parts.port or (443 if tls else 80)
        proxy = "" if proxy_bypass(host) else getproxies().get(scheme, "")
        if proxy:
            if _passes(proxy, host, port, tls):
                return ""
            return (
                f"it is not reached through the proxy that {scheme}_proxy names; let it pass "
                f"there, or name {host} in no_proxy"
            )
        socket.create_connection((host, port), CAUSE_SECONDS).close()
    except OSError as error:
        return f"no connection to {host}:{port} ({error.strerror or error})"
    except ValueError:  # no host or port
        return ""
    try:
        encrypted, why = _answers(http.client.HTTPSConnection(host, port, timeout=CAUSE_SECONDS))
    except ssl.SSLCertVerificationError as error:
        if tls:
            said = error.verify_message.rstrip(".")
            fix = "let this system trust its authority"
            if "mismatch" in said:  # of host name or address
                fix = "write its name as its certificate does"
            return f"its certificate is not valid here ({said}); {fix}"
        encrypted, why = True, ""
    if encrypted and not tls:
        return "it speaks TLS; remove extra_config.disable_tls"
    plain = http.client.HTTPConnection(host, port, timeout=CAUSE_SECONDS)
    if tls and why in _PLAIN_ANSWERS and _answers(plain)[0]:
        return "it speaks without TLS; set extra_config.disable_tls: true, or turn TLS on there"
    return ""


def lack_of_credentials(provider: Any) -> str:
    """Ask for the credentials with which AWS' client signs requests. Blocks.

    Where it finds none it looks for them with each request, until its caller stops waiting.

    Args:
        provider: an ``AwsCredentialsProvider``.

    Returns:
        :func:`no_credentials`; "" where there are some.
    """
    try:
        provider.get_credentials().result(CREDENTIALS_SECONDS)
    except Exception:  # whatever AWS' client raises
        return no_credentials()
    return ""


def no_credentials() -> str:
    """Return what to write where AWS' client has no credentials, as a part of a sentence."""
    file = f"{os.path.expanduser('~')}/.aws/credentials"
    return (
        "AWS' client finds no credentials for it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        f"write them to {file}, or give this pod or machine a role"
    )


def _answers(connection: http.client.HTTPConnection) -> tuple[bool, str]:
    """Whether a server answers as HTTP; and OpenSSL's reason if it does not.

    Raises:
        SSLCertVerificationError: its certificate is not accepted.
    """
    try:
        connection.request("HEAD", "/")
        connection.getresponse()
    except ssl.SSLCertVerificationError:
        raise
    except ssl.SSLError as error:
        return False, error.reason or ""
    except (OSError, http.client.HTTPException):
        return False, ""
    finally:
        connection.close()
    return True, ""


def _passes(proxy: str, host: str, port: int, tls: bool) -> bool:
    """Whether a proxy lets a connection pass, as far as can be told without its password."""
    parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    if parts.username:
        return True
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=CAUSE_SECONDS
    )
    try:
        if tls:
            connection.set_tunnel(host, port)
            connection.connect()
            return True
        connection.request("HEAD", f"http://{host}:{port}/")
        return connection.getresponse().status not in _OF_PROXIES
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
