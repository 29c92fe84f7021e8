# SPDX-License-Identifier: Apache-2.0
"""Ranks that Ray places: on which host is not known, so the scheduler asks them over TCP.

Rank 0 may be on another host than the scheduler, so it must not make the scheduler's keys. The
scheduler's process makes them before the ranks start, and vLLM's configuration takes the public
one to the ranks.
"""

import functools
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of ``kv_connector_extra_config``, and no option; see ``BESIDE_KEY``.
SCHEDULER_KEY = "_scheduler_of_lmcache_hybrid"


def placed_by_ray(parallel: Any) -> bool:
    """Whether Ray places the ranks of an engine.

    Args:
        parallel: vLLM's ParallelConfig, which does not look into executors named by their path.
    """
    if getattr(parallel, "use_ray", False):
        return True
    executor = getattr(parallel, "distributed_executor_backend", None)
    if not isinstance(executor, str) or "." not in executor:
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return bool(getattr(resolve_obj_by_qualname(executor), "uses_ray", False))


@functools.cache
def scheduler_keys() -> tuple[bytes, bytes]:
    """Return the public and the secret key of this process's scheduler, in Z85."""
    return zmq.curve_keypair()


def name_scheduler(vllm_config: "VllmConfig") -> None:
    """Write the public key into the configuration, before vLLM sends it to the ranks.

    Mutates ``vllm_config``. Called in the scheduler's process.
    """
    key = scheduler_keys()[0].decode()
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra[SCHEDULER_KEY] = key
    # Of a MultiConnector, each gets its own configuration only.
    for each in extra.get("connectors", ()):
        each.setdefault("kv_connector_extra_config", {})[SCHEDULER_KEY] = key


def named_scheduler(vllm_config: "VllmConfig") -> bytes | None:
    """Return the scheduler's public key; None where Ray does not place the ranks.

    Raises:
        KeyError: :func:`name_scheduler` was not called.
    """
    if not placed_by_ray(vllm_config.parallel_config):
        return None
    key: str = vllm_config.kv_transfer_config.kv_connector_extra_config[SCHEDULER_KEY]
    return key.encode()


def node_address() -> str:
    """Return the address of this host in Ray's cluster, at which vLLM's ranks reach each other."""
    from vllm.v1.executor import ray_utils

    return str(ray_utils.ray.util.get_node_ip_address())
