# SPDX-License-Identifier: Apache-2.0
"""Makes the connector of a store outside the engine, in place of LMCache's own."""

import asyncio
from typing import TYPE_CHECKING

from lmcache.v1.storage_backend import remote_backend
from lmcache.v1.storage_backend.connector import (
    ConnectorContext,
    CreateConnector,
    extract_plugin_type,
)
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector

from lmcache_hybrid.config.stores import BY_PLUGIN, BY_SCHEME
from lmcache_hybrid.config.stores.base import Place, imported

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

PLUGIN = "plugin://"


def place_of(url: str, config: "LMCacheEngineConfig") -> Place | None:
    """Return the store at one of LMCache's URLs; None if this package does not serve it."""
    scheme, _, plugin = url.partition("://")
    if url.startswith(PLUGIN):
        kind = BY_PLUGIN.get(extract_plugin_type(plugin))
        return None if kind is None else kind.of_plugin(plugin, config)
    kind = BY_SCHEME.get(scheme)
    return None if kind is None else Place(kind, url)


def create_connector(
    url: str,
    loop: asyncio.AbstractEventLoop,
    local_cpu_backend: "LocalCPUBackend | None",
    config: "LMCacheEngineConfig",
    metadata: "LMCacheMetadata",
    plugin_name: str | None = None,
) -> InstrumentedRemoteConnector:
    """Make the connector of a ``RemoteBackend``, at the start and when it reconnects."""
    place = place_of(url, config)
    if place is None:
        return CreateConnector(url, loop, local_cpu_backend, config, metadata, plugin_name)
    context = ConnectorContext(url, loop, local_cpu_backend, config, metadata, plugin_name)
    return InstrumentedRemoteConnector(imported(place.kind.make_connector)(place, context))


def install() -> None:
    """Have LMCache's remote backends of this process use connectors of ours. Idempotent.

    No bug: LMCache's ``ConnectorManager`` takes adapters of others, but asks its own first, so
    no other adapter can serve a scheme that LMCache knows.
    Gain: a connector of ours instead of repairs of LMCache's.
    Seen in: LMCache 0.5.6 and 0.5.7rc2.
    Remove when: ``ConnectorManager`` asks adapters of plugins before its own.
    """
    remote_backend.CreateConnector = create_connector
