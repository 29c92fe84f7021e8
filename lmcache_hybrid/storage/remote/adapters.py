# SPDX-License-Identifier: Apache-2.0
"""Which connector serves which scheme of ``remote_url`` and which remote storage plugin."""

import asyncio
from typing import TYPE_CHECKING

from lmcache.v1.storage_backend import remote_backend
from lmcache.v1.storage_backend.connector import (
    ConnectorAdapter,
    ConnectorContext,
    CreateConnector,
    extract_plugin_type,
)
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.connector.s3_adapter import S3ConnectorAdapter

from lmcache_hybrid.config.redis_credentials import plugin_url
from lmcache_hybrid.config.shared_folders import folders_of_plugin, folders_of_url
from lmcache_hybrid.storage.remote import clients
from lmcache_hybrid.storage.remote.fs import HybridFSConnector
from lmcache_hybrid.storage.remote.record_connector import RecordConnector
from lmcache_hybrid.storage.remote.redis import HybridRedisConnector

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

PLUGIN = "plugin://"


class RedisAdapter(ConnectorAdapter):
    """Redis and Valkey: one server, a cluster, a primary that sentinels name."""

    def can_parse(self, url: str) -> bool:
        scheme, _, rest = url.partition("://")
        if url.startswith(PLUGIN):
            return extract_plugin_type(rest) == "redis"
        return scheme in clients.SCHEMES

    def create_connector(self, context: ConnectorContext) -> RecordConnector:
        url, config = context.url, context.config
        if url.startswith(PLUGIN):
            url = plugin_url(config)
        return HybridRedisConnector(url, context)


class FSAdapter(ConnectorAdapter):
    """Folders of one ``fs://`` URL or one plugin, separated by commas."""

    def __init__(self) -> None:
        super().__init__("fs://")

    def can_parse(self, url: str) -> bool:
        if url.startswith(PLUGIN):
            return extract_plugin_type(url.removeprefix(PLUGIN)) == "fs"
        return super().can_parse(url)

    def create_connector(self, context: ConnectorContext) -> RecordConnector:
        if context.plugin_name is None:
            folders = folders_of_url(context.url)
        else:
            _, folders = folders_of_plugin(context.plugin_name, context.config.extra_config)
        return HybridFSConnector(folders, context)


class S3Adapter(ConnectorAdapter):
    """A bucket; LMCache's own adapter reads the options."""

    def __init__(self) -> None:
        super().__init__("s3://")

    def create_connector(self, context: ConnectorContext) -> RecordConnector:
        from lmcache_hybrid.storage.remote.s3 import HybridS3Connector  # imports AWS' client

        return HybridS3Connector(S3ConnectorAdapter().create_connector(context), context)


# The first that can parse a URL serves it. What none of them can is LMCache's own.
ADAPTERS: tuple[ConnectorAdapter, ...] = (RedisAdapter(), FSAdapter(), S3Adapter())


def create_connector(
    url: str,
    loop: asyncio.AbstractEventLoop,
    local_cpu_backend: "LocalCPUBackend | None",
    config: "LMCacheEngineConfig",
    metadata: "LMCacheMetadata",
    plugin_name: str | None = None,
) -> InstrumentedRemoteConnector:
    """Make the connector of a ``RemoteBackend``, now and when it connects again."""
    for adapter in ADAPTERS:
        if adapter.can_parse(url):
            context = ConnectorContext(url, loop, local_cpu_backend, config, metadata, plugin_name)
            return InstrumentedRemoteConnector(adapter.create_connector(context))
    return CreateConnector(url, loop, local_cpu_backend, config, metadata, plugin_name)


def install() -> None:
    """Have LMCache's remote backends of this process use :data:`ADAPTERS`. Idempotent.

    No bug: LMCache's ``ConnectorManager`` takes adapters of others, but asks its own first, so
    no other adapter can serve a scheme that LMCache knows.
    Gain: a connector of ours instead of repairs of LMCache's.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``ConnectorManager`` asks adapters of plugins before its own.
    """
    remote_backend.CreateConnector = create_connector
