# SPDX-License-Identifier: Apache-2.0
"""Sets defaults, and refuses unsupported settings, in vLLM's configuration.

Runs in ``VllmConfig.__post_init__``: in the API server, and again in EngineCore. Settings that
would make hits wrong: :mod:`.unsound`.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.logger import init_logger

from lmcache_hybrid.config.own_options import LOAD_FAILURE_KEY, is_meant, load_failure_policy
from lmcache_hybrid.core.groups import BESIDE_KEY
from lmcache_hybrid.upstream import versions
from vllm_patch import unsound

if TYPE_CHECKING:
    from lmcache_hybrid.connector import HybridConnector

logger = init_logger("vllm.lmcache_hybrid.config.options")

CONNECTOR = "LMCacheConnectorV1"
DYNAMIC = f"{CONNECTOR}Dynamic"  # LMCache's own class of the same connector
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"

# Max bytes of a local socket's path, and those of vLLM's names in a folder; ours are no longer.
_SOCKET_BYTES, _NAME_BYTES = 107, len("/") + 36
_WRITE_CONNECTORS = (
    "write a list with a table for each connector, such as "
    f'[{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}].'
)

# Why no hybrid model can be served in this process, "" when it can.
_problem = ""
_hooked = False


def hybrids_of(connector: Any) -> "list[HybridConnector]":
    """List the hybrid connectors: of a MultiConnector, or the one itself."""
    # Only our connectors have this method.
    all_of_it = getattr(connector, "sub_connectors", [connector])
    return [each for each in all_of_it if hasattr(each, "reset_failed")]


def is_ours(config: VllmConfig) -> bool:
    """Whether an engine uses :data:`CONNECTOR`, alone or among others."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return False
    if hasattr(transfer, "has_connector"):
        return transfer.has_connector(CONNECTOR)
    # Before vLLM 0.29, where hybrid models are refused.
    return transfer.kv_connector == CONNECTOR


def install() -> None:
    """Hook ``KVTransferConfig`` and ``VllmConfig``. Mutates both classes."""
    _default_kv_role()
    _say_what_is_no_list()
    _keep_missing_media_refused()
    _hook_settle()


def refuse_hybrid_models(problem: str) -> None:
    """Refuse every hybrid model that asks for the connector, with ``problem``.

    Raises:
        AttributeError: this vLLM lacks the method to hook.
    """
    global _problem
    _problem = problem
    _hook_settle()


def _hook_settle() -> None:
    """Hook ``_settle`` into each configuration. Idempotent."""
    global _hooked
    if not _hooked:
        _before_hma_check(_settle)
        _hooked = True


def _default_kv_role() -> None:
    """Set a missing ``kv_role``, which vLLM refuses, to ``kv_both`` for this connector."""
    original = KVTransferConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: KVTransferConfig) -> None:
        if self.kv_connector == CONNECTOR and self.kv_role is None:
            logger.info_once("kv_role is not set: using kv_both for %s.", CONNECTOR)
            self.kv_role = "kv_both"
        original(self)

    KVTransferConfig.__post_init__ = __post_init__


def _say_what_is_no_list() -> None:
    """Refuse 'connectors' of a ``MultiConnector`` in one sentence where vLLM fails on them.

    All that reads them asks ``has_connector`` first.
    """
    original = KVTransferConfig.has_connector

    @functools.wraps(original)
    def has_connector(self: KVTransferConfig, connector_name: str) -> bool:
        children = _children(self) if self.kv_connector == "MultiConnector" else ()
        is_list = isinstance(children, (list, tuple))
        if is_list and all(isinstance(each, dict) for each in children):
            return bool(original(self, connector_name))
        # Not the value, which may hold passwords.
        kind = f"a {type(children).__name__}"
        if is_list:
            kind += f" of {' and '.join(sorted({type(each).__name__ for each in children}))}"
        raise ValueError(
            f"kv_connector_extra_config of {self.kv_connector} has {kind} as 'connectors'; "
            f"{_WRITE_CONNECTORS}"
        )

    KVTransferConfig.has_connector = has_connector


def _keep_missing_media_refused() -> None:
    """Make hybrid models refuse media without their embeddings, as without this connector.

    ``kv_both`` makes an engine a KV consumer, which vLLM trusts to receive all KV. It then accepts
    embeddings from every client, and items without any; as a cache may miss, the first such item
    would crash the engine.
    """
    original = VllmConfig._resolve_mm_embedding_inputs

    @functools.wraps(original)
    def _resolve_mm_embedding_inputs(self: VllmConfig) -> None:
        transfer, encoders = self.kv_transfer_config, self.ec_transfer_config
        alone = transfer is not None and transfer.kv_connector == CONNECTOR
        served = self.model_config is not None and _is_hybrid(self)
        if not (alone and served) or (encoders is not None and encoders.is_ec_consumer):
            return original(self)
        media = self.model_config and self.model_config.multimodal_config
        if media is not None:
            media.allow_missing_mm_embeddings = False

    VllmConfig._resolve_mm_embedding_inputs = _resolve_mm_embedding_inputs


def _before_hma_check(settle: Callable[[VllmConfig], None]) -> None:
    """Run ``settle(vllm_config)`` once the connector is known, before HMA is decided.

    ``VllmConfig.__post_init__`` calls ``_post_init_kv_transfer_config`` right before it asks the
    connector class, which does not know the model, about HMA.
    """
    original = VllmConfig._post_init_kv_transfer_config

    @functools.wraps(original)
    def _post_init_kv_transfer_config(self: VllmConfig) -> None:
        asked = is_ours(self)
        original(self)
        if self.model_config is None or self.kv_transfer_config is None:
            return
        if _is_hybrid(self):
            _refuse_others_in_our_place(self, asked)
        if is_ours(self):
            settle(self)

    VllmConfig._post_init_kv_transfer_config = _post_init_kv_transfer_config


def _refuse_others_in_our_place(config: VllmConfig, asked: bool) -> None:
    """Refuse settings that run another class although the user has named :data:`CONNECTOR`.

    vLLM does not warn, and the user believes that LMCache is on.

    Args:
        asked: whether the user asked for it; vLLM's own flags may have replaced it since.
    """
    transfer = config.kv_transfer_config
    if asked and not is_ours(config):
        raise ValueError(
            f"kv_offloading_size={config.cache_config.kv_offloading_size} makes vLLM run "
            f"{transfer.kv_connector} in place of {CONNECTOR}; remove --kv-offloading-size, or "
            "--kv-transfer-config."
        )
    children = _children(transfer)
    named = {transfer.kv_connector: transfer.kv_connector_module_path}
    if isinstance(children, (list, tuple)):
        tables = (child for child in children if isinstance(child, dict))
        named |= {each.get("kv_connector"): each.get("kv_connector_module_path") for each in tables}
    if (path := named.get(CONNECTOR)) and path != MODULE:
        raise ValueError(
            f"kv_connector_module_path={path!r} runs another {CONNECTOR} than vLLM's, and that "
            "does not serve hybrid models; remove it."
        )
    name = transfer.kv_connector
    if name == "MultiConnector" and not children:
        raise ValueError(
            "kv_connector_extra_config of MultiConnector names no 'connectors', and so none that "
            f"serves this hybrid model; {_WRITE_CONNECTORS}"
        )
    if not asked and (name == DYNAMIC or _names_ours(children)):
        name = DYNAMIC if DYNAMIC in named else name
        raise ValueError(
            f"kv_connector={name!r} runs {CONNECTOR} inside a class that lmcache-hybrid does not "
            f"know; name {CONNECTOR}, or MultiConnector with it among its 'connectors'."
        )


def _children(transfer: KVTransferConfig) -> Any:
    return transfer.kv_connector_extra_config.get("connectors", ())


def _names_ours(connectors: Any) -> bool:
    """Whether :data:`CONNECTOR` or its variant is among them, or nested in one of them."""
    return isinstance(connectors, (list, tuple)) and any(
        isinstance(each, dict)
        and (
            each.get("kv_connector") in (CONNECTOR, DYNAMIC)
            or _names_ours((each.get("kv_connector_extra_config") or {}).get("connectors", ()))
        )
        for each in connectors
    )


def _is_hybrid(config: VllmConfig) -> bool:
    return bool(config.model_config.is_hybrid)


def _is_recurrent(config: VllmConfig) -> bool:
    model = config.model_config
    return bool(model.is_attention_free and model.has_inner_state)


def _mixes_windows(config: VllmConfig) -> bool:
    layers = getattr(config.model_config.hf_text_config, "layer_types", None) or ()
    return {"sliding_attention", "full_attention"} <= set(layers)


def _is_drafters(config: VllmConfig) -> bool:
    """Whether vLLM made it from the engine's settled one, to load a draft model."""
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or speculative.target_model_config is model:
        return False
    return speculative.draft_model_config is model


def _settle(config: VllmConfig) -> None:
    if _is_drafters(config):
        return
    if _problem:
        if _is_hybrid(config):
            raise ValueError(f"{CONNECTOR} cannot serve this hybrid model: {_problem}")
        return
    if _is_recurrent(config):
        raise ValueError(
            f"{CONNECTOR} cannot serve a model of recurrent layers alone: a prompt is found by its "
            "attention pages, and there are none; remove --kv-transfer-config."
        )
    if _is_hybrid(config):
        _settle_hybrid(config)
    elif config.scheduler_config.disable_hybrid_kv_cache_manager is not False:
        _keep_hma_off(config)
    elif _mixes_windows(config):
        _settle_hybrid(config)
    else:
        raise ValueError(
            "disable_hybrid_kv_cache_manager=False is not supported by "
            f"{CONNECTOR} for models with attention of one kind only; remove "
            "--no-disable-hybrid-kv-cache-manager."
        )


def _keep_hma_off(config: VllmConfig) -> None:
    """Turn HMA off for a model without state layers, as vLLM does without this plugin.

    vLLM turns it off for connectors without ``SupportsHMA``, and LMCache's own adapter needs that
    for models that mix window and full attention. The class now advertises HMA, so it is decided
    here per model. --no-disable-hybrid-kv-cache-manager keeps HMA on for such a model; then
    lmcache-hybrid stores its windows.
    """
    scheduler = config.scheduler_config
    if scheduler.disable_hybrid_kv_cache_manager is None and _mixes_windows(config):
        logger.info_once(
            "Window layers keep all of their KV cache, because LMCache's own adapter needs that. "
            "With --no-disable-hybrid-kv-cache-manager they keep their windows only, and "
            "lmcache-hybrid stores these."
        )
    scheduler.disable_hybrid_kv_cache_manager = True


def _refuse_two_forms(words: Sequence[str]) -> None:
    """Refuse flags with dots beside JSON: vLLM makes JSON of them that replaces the other."""
    flag = "--kv-transfer-config"
    names = [word.replace("_", "-").partition("=")[0] for word in words]
    if flag in names and any(name.startswith(f"{flag}.") for name in names):
        raise ValueError(
            f"{flag} is there as JSON and with dots, and vLLM takes one of the two alone; write "
            "all of it as JSON."
        )


def _settle_hybrid(config: VllmConfig) -> None:
    if (counted := versions.counted()) is not None:
        logger.info_once("%s", counted)
    cache, transfer = config.cache_config, config.kv_transfer_config
    if config.is_mm_encoder_only:
        raise ValueError(
            "this instance runs the encoder of its multimodal model alone, which has no KV cache; "
            "remove --kv-transfer-config here."
        )
    _refuse_two_forms(sys.argv)
    if not cache.enable_prefix_caching and config.model_config.runner_type == "pooling":
        raise ValueError(
            "enable_prefix_caching=False leaves no boundary that LMCache could store for this "
            "pooling model, and may be vLLM's default for it; remove --kv-transfer-config."
        )
    if not cache.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching=False leaves no boundary that LMCache could store "
            "for this hybrid model; remove --no-enable-prefix-caching, or add "
            "--enable-prefix-caching where it was not written: vllm bench latency turns it off."
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager is True and _is_hybrid(config):
        raise ValueError(
            "disable_hybrid_kv_cache_manager=True leaves states without blocks of their own; "
            "remove --disable-hybrid-kv-cache-manager."
        )
    _refuse_folder_of_sockets()
    unsound.refuse(config)
    own = _settle_neighbours(transfer)
    _settle_hash(cache)
    # An option of ours, as vLLM cannot tell an explicit "fail" from its default.
    wanted = load_failure_policy(own)
    if transfer.kv_load_failure_policy != wanted:
        logger.info_once(
            "Setting kv_load_failure_policy to %r for LMCache on a hybrid model (%s overrides it).",
            wanted,
            LOAD_FAILURE_KEY,
        )
        transfer.kv_load_failure_policy = wanted


def _settle_neighbours(transfer: KVTransferConfig) -> dict[str, Any]:
    """Check the connectors beside ours in a ``MultiConnector``, and note them in our config.

    Returns:
        The ``kv_connector_extra_config`` of our connector.
    """
    if transfer.kv_connector == CONNECTOR:
        if BESIDE_KEY in transfer.kv_connector_extra_config:
            raise ValueError(
                f"kv_connector_extra_config has {BESIDE_KEY}, which lmcache-hybrid itself writes "
                "inside a MultiConnector; remove it."
            )
        return transfer.kv_connector_extra_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    children = transfer.kv_connector_extra_config["connectors"]
    if beside := [key for key in transfer.kv_connector_extra_config if is_meant(key)]:
        raise ValueError(
            f"kv_connector_extra_config of MultiConnector has {', '.join(beside)}, which nobody "
            f"reads there; write it in that of {CONNECTOR}, in 'connectors'."
        )
    own = [child for child in children if child.get("kv_connector") == CONNECTOR]
    if len(own) > 1:
        raise ValueError(
            f"kv_connector_extra_config names {CONNECTOR} {len(own)} times in 'connectors', and "
            "one process has one LMCache engine; name it once."
        )
    for child in children:
        if not KVConnectorFactory.supports_hma_config(KVTransferConfig(**child)):
            raise ValueError(
                f"MultiConnector cannot serve this hybrid model: {child['kv_connector']} does not "
                "know several KV cache groups (SupportsHMA); remove it from 'connectors'."
            )
    extra = own[0].setdefault("kv_connector_extra_config", {})
    extra[BESIDE_KEY] = len(children) > 1
    return extra


def _refuse_folder_of_sockets() -> None:
    """Refuse a folder in which there can be none of vLLM's local sockets, and ours."""
    folder = envs.VLLM_RPC_BASE_PATH
    taken, most = len(os.fsencode(folder)), _SOCKET_BYTES - _NAME_BYTES
    if taken > most:
        raise ValueError(
            f"VLLM_RPC_BASE_PATH={folder!r} has {taken} bytes, and a folder of local sockets has "
            f"at most {most}; set it, or the TMPDIR that stands in for it, to a shorter path, such "
            "as /tmp."
        )
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        why = "cannot be written" if os.path.isdir(folder) else "is not a folder that exists"
        raise ValueError(
            f"VLLM_RPC_BASE_PATH={folder!r} {why}, so the engine's processes cannot reach each "
            f"other; create it for the engine's user, or unset it for {tempfile.gettempdir()}."
        )


def _settle_hash(cache: CacheConfig) -> None:
    """Choose block hashes that are the same in every process, as records are found by them."""
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        raise ValueError(
            f"prefix_caching_hash_algo={algorithm!r} uses a random seed per process, so nothing "
            "stored could be found again; use sha256_cbor, or set PYTHONHASHSEED to a shared value."
        )
    if algorithm == "sha256":
        logger.info_once(
            "Setting prefix_caching_hash_algo to 'sha256_cbor', which is the same in every "
            "process and Python version."
        )
        cache.prefix_caching_hash_algo = "sha256_cbor"
