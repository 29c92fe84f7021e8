# SPDX-License-Identifier: Apache-2.0
"""A test record through a bucket, and what is told of one that is missing or away."""

import contextlib
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lmcache_hybrid.storage.remote.s3_failures import cause_of_silence
from lmcache_hybrid.tools.doctor import backends
from lmcache_hybrid.tools.doctor.backends import check_backends
from tests.bucket import EXTRA
from tests.tls import TLS_HANDSHAKE, make_certificate

from .findings import ERROR, MODEL, OK, assert_sentences, only


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(backends, "WAIT_SECONDS", 5.0)


def test_a_bucket_takes_a_record_and_is_left_as_it_was(context, bucket):
    bucket.empty()
    found = context(local_cpu=False, remote_url=bucket.url, extra_config=EXTRA, model=MODEL)
    told = only(assert_sentences(check_backends(found)))
    assert (told.check, told.status) == ("remote_url", OK)
    assert bucket.names() == []


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_told(context, bucket):
    found = context(local_cpu=False, remote_url=bucket.url, extra_config=EXTRA)
    bucket.drop()
    try:
        told = only(assert_sentences(check_backends(found)))
    finally:
        bucket.make()
    assert told.status == ERROR and "S3 answered 404 NoSuchBucket" in told.message


@pytest.mark.slow
def test_a_server_that_is_away_is_told(context):
    found = context(local_cpu=False, remote_url="s3://127.0.0.1:1", extra_config=EXTRA)
    told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR and "s3://127.0.0.1:1 cannot be used: " in told.message


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextlib.contextmanager
def serving(handler, context: ssl.SSLContext | None = None):
    """The port of a server on this machine, which speaks TLS only if a context is given."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        # Handshakes on the threads of the connections, as AWS' client leaves some unfinished.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def encrypted(tmp_path):
    """The port of a server that speaks TLS only, with a certificate that nobody trusts."""
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with serving(BaseHTTPRequestHandler, context) as port:
        yield port


def told_of(context, url: str, **extra) -> str:
    found = context(local_cpu=False, remote_url=url, extra_config=EXTRA | extra)
    told = only(assert_sentences(check_backends(found)))
    assert told.status == ERROR
    return told.message


@pytest.mark.slow
def test_a_server_without_tls_is_told_with_what_to_write(context, bucket):
    message = told_of(context, bucket.url, disable_tls=False)
    assert "it speaks without TLS; set extra_config.disable_tls: true, or turn TLS on" in message


@pytest.mark.slow
def test_a_server_that_only_speaks_tls_is_told_with_what_to_write(context, bucket, encrypted):
    message = told_of(context, f"s3://localhost:{encrypted}")
    assert "it speaks TLS; remove extra_config.disable_tls" in message


@pytest.mark.slow
def test_a_certificate_that_is_not_trusted_is_told(context, bucket, encrypted):
    message = told_of(context, f"s3://localhost:{encrypted}", disable_tls=False)
    assert "its certificate is not valid here (" in message


@pytest.mark.slow
def test_a_host_that_has_no_address_is_told(context, bucket):
    message = told_of(context, "s3://bucket.nowhere.invalid")
    assert "no connection to bucket.nowhere.invalid:80 (" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_a_proxy_that_does_not_let_it_pass_is_told(context, bucket, monkeypatch, name):
    """AWS' client uses the proxies that the environment names, unless no_proxy has the host."""
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    message = told_of(context, bucket.url)
    assert "it is not reached through the proxy that http_proxy names; let it pass" in message
    assert "or name 127.0.0.1 in no_proxy" in message
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = context(local_cpu=False, remote_url=bucket.url, extra_config=EXTRA)
    assert only(check_backends(found)).status == OK


class Passes(BaseHTTPRequestHandler):
    """A proxy that lets everything pass, to servers that answer nothing."""

    def do_CONNECT(self):
        self.send_response(200)
        self.end_headers()

    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *said):
        pass


@pytest.mark.parametrize("tls", [True, False])
def test_a_proxy_that_lets_it_pass_is_not_blamed(monkeypatch, tls):
    """The server behind it may be slow, or refuse what it is asked."""
    with serving(Passes) as port:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert cause_of_silence("bucket.nowhere.invalid", tls) == ""
    said = cause_of_silence("bucket.nowhere.invalid", tls)
    assert f"through the proxy that http{'s' * tls}_proxy names" in said
    monkeypatch.setenv(f"http{'s' * tls}_proxy", f"http://user:secret@127.0.0.1:{port}")
    assert cause_of_silence("bucket.nowhere.invalid", tls) == "", "its password is not sent"


def test_a_server_that_ends_the_handshake_is_not_called_one_without_tls():
    """Such as one that wants a certificate of the client, and answers plain requests with 400."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with client:
                    if client.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
                        client.recv(1 << 16)
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        assert cause_of_silence(place, tls=True) == "" == cause_of_silence(place, tls=False)


@pytest.mark.parametrize("endpoint", ["a..b", "host:port", "[::1", ""])
def test_what_is_no_host_has_no_cause(endpoint):
    assert cause_of_silence(endpoint, tls=True) == ""


def test_tls_on_one_side_only_is_found(encrypted):
    place = f"localhost:{encrypted}"
    assert cause_of_silence(place, tls=False) == "it speaks TLS; remove extra_config.disable_tls"
    assert cause_of_silence(place, tls=True).startswith("its certificate is not valid here (")
    with serving(Passes) as port:
        said = cause_of_silence(f"localhost:{port}", tls=True)
        assert said.startswith("it speaks without TLS; set extra_config.disable_tls: true")
        assert cause_of_silence(f"localhost:{port}", tls=False) == ""


@pytest.mark.parametrize("host", ["127.1", "0.0.0.0"])
def test_a_certificate_for_another_name_is_told(encrypted, tmp_path, monkeypatch, host):
    """Its authority is trusted; both hosts are this machine's loopback address."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    said = cause_of_silence(f"{host}:{encrypted}", tls=True)
    assert said.startswith("its certificate is not valid here (") and " mismatch, " in said
    assert said.endswith("); write its name as its certificate does")
