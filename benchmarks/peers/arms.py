# SPDX-License-Identifier: Apache-2.0
"""What is compared, and the releases that it is compared in. Imports neither vLLM nor LMCache.

In the texts of an arm ``$folder`` stands for a folder of its own, ``$redis`` for the port of its
Valkey, ``$server`` for the port of its ``lmcache server`` and ``$chunk`` for N.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from string import Template
from typing import Any

VLLM = "0.32.0"
# The release of LMCache of each environment; the first one is also that of this package's arms.
RELEASES = ("0.5.6", "0.5.7rc2")
BASE = "vllm"
# Of RAM, for every arm alike.
RAM_GB = 1


@dataclass(frozen=True)
class Arm:
    """One way to keep the cache.

    Attributes:
        title: as the page names it.
        release: of LMCache, which names the environment.
        connector: ``--kv-transfer-config`` as a dict; None for vLLM alone.
        lmcache: YAML for LMCache in the engine's process; None where there is none.
        server: arguments of ``lmcache server``; None where there is none.
        store: what outlives all processes: "", "files" or "redis".
        repairs: of vLLM 0.32 by this package are there; they matter to all connectors on a CPU.
        timed: it is asked the serve workload, too.
    """

    title: str
    release: str = RELEASES[0]
    connector: Mapping[str, Any] | None = None
    lmcache: Mapping[str, Any] | None = None
    server: tuple[str, ...] | None = None
    store: str = ""
    repairs: bool = True
    timed: bool = True

    def filled(self, part: Any, places: Mapping[str, object]) -> Any:
        """A part of this arm with ``places`` put in."""
        return json.loads(Template(json.dumps(part)).substitute(places))


def _ours(title: str, lmcache: Mapping[str, Any], store: str = "") -> Arm:
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    return Arm(title, connector=connector, lmcache=lmcache, store=store)


def _mp(title: str, release: str, *server: str, store: str = "") -> Arm:
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": "$server",
        "lmcache.mp.mp_transfer_mode": "engine_driven",
    }
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    connector |= {"kv_connector_extra_config": extra}
    ours = ("--chunk-size", "$chunk", "--supported-transfer-mode", "engine_driven")
    ours += ("--l1-size-gb", str(RAM_GB), "--eviction-policy", "LRU")
    return Arm(title, release, connector, server=(*ours, *server), store=store)


def _offloading(title: str, spec: str, store: str = "", **more: Any) -> Arm:
    extra = {"cpu_bytes_to_use": RAM_GB << 30, "spec_name": spec}
    extra |= {"spec_module_path": "tests.e2e.host_offloading", **more}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    connector |= {"engine_id": "peers-$server"}  # names its memory in /dev/shm
    return Arm(title, connector={**connector, "kv_connector_extra_config": extra}, store=store)


OUTSIDE = {"local_cpu": False, "max_local_cpu_size": 1}
SEPARATE = "--separate-object-groups"
FILES = ("--l2-adapter", json.dumps({"type": "fs", "base_path": "$folder/files"}))
REDIS = ("--l2-adapter", '{"type": "resp", "host": "127.0.0.1", "port": $redis}')
NEW = RELEASES[1]
ARMS: dict[str, Arm] = {
    BASE: Arm("vLLM alone"),
    "ours-ram": _ours("this package, RAM", {"local_cpu": True, "max_local_cpu_size": RAM_GB}),
    "ours-disk": _ours(
        "this package, disk",
        OUTSIDE | {"local_disk": "$folder/files", "max_local_disk_size": 24},
        "files",
    ),
    "ours-redis": _ours(
        "this package, Redis", OUTSIDE | {"remote_url": "redis://127.0.0.1:$redis"}, "redis"
    ),
    "offloading": _offloading("OffloadingConnector, RAM", "HostOffloadingSpec"),
    "offloading-files": _offloading(
        "OffloadingConnector, files",
        "HostTieringSpec",
        "files",
        secondary_tiers=[{"type": "fs", "root_dir": "$folder/files"}],
    ),
    "mp-old": _mp("LMCacheMPConnector 0.5.6, RAM", RELEASES[0]),
    "mp-old-separate": _mp("LMCacheMPConnector 0.5.6, RAM, separate", RELEASES[0], SEPARATE),
    "mp": _mp("LMCacheMPConnector 0.5.7rc2, RAM", NEW),
    "mp-separate": _mp("LMCacheMPConnector 0.5.7rc2, RAM, separate", NEW, SEPARATE),
    "mp-bare": replace(
        _mp("LMCacheMPConnector 0.5.7rc2, RAM, separate, vLLM as released", NEW, SEPARATE),
        repairs=False,
        timed=False,
    ),
    "mp-files-separate": _mp(
        "LMCacheMPConnector 0.5.7rc2, files, separate", NEW, SEPARATE, *FILES, store="files"
    ),
    "mp-redis": _mp("LMCacheMPConnector 0.5.7rc2, Redis", NEW, *REDIS, store="redis"),
    "mp-redis-separate": replace(
        _mp("LMCacheMPConnector 0.5.7rc2, Redis, separate", NEW, SEPARATE, *REDIS, store="redis"),
        timed=False,
    ),
}
