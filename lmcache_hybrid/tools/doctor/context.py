# SPDX-License-Identifier: Apache-2.0
"""The user's settings and model, read as an engine reads them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_hybrid.config.options import load_lmcache_config
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.doctor.finding import Finding, error, listen, one_line, warning
from lmcache_hybrid.tools.doctor.model import Model, ModelError, read_model

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import KVTransferConfig

CONNECTOR = "LMCacheConnectorV1"
DEFAULT_TRANSFER = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        transfer: ``kv_transfer_config``, ours of those in a ``MultiConnector``; None where vLLM
            refuses it.
        config: LMCache's configuration, not settled yet; None where it cannot be read.
        model: groups and sizes; None where no model was named, or vLLM refuses it.
        named: the model's name, None where none was named.
        troubles: what went wrong while reading these.
    """

    transfer: "KVTransferConfig | None"
    config: "LMCacheEngineConfig | None"
    model: Model | None
    named: str | None
    troubles: tuple[Finding, ...]

    @property
    def block_size(self) -> int | None:
        """N in tokens, None where it is not known."""
        return self.model.block_size if self.model and self.model.served else None


def read_context(model: str | None, transfer: dict[str, Any] | None, unit: int = 0) -> Context:
    """Read everything; what cannot be read becomes a finding, not an error.

    LMCache's file is the one that LMCACHE_CONFIG_FILE names.
    """
    troubles: list[Finding] = []
    settings = DEFAULT_TRANSFER if transfer is None else transfer
    checked = _read_transfer(settings, troubles)
    config = None if checked is None else _read_lmcache(checked, troubles)
    found = None
    if model is not None and checked is not None:
        try:
            found = read_model(model, settings, unit)
        except ModelError as failure:
            troubles.append(error("model", str(failure), failure.fix))
    return Context(checked, config, found, model, tuple(troubles))


def _read_transfer(settings: dict[str, Any], troubles: list[Finding]) -> "KVTransferConfig | None":
    from vllm.config import KVTransferConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # a missing kv_role is filled in by the plugin
    try:
        checked = KVTransferConfig(**settings)
        if checked.kv_connector == "MultiConnector":
            beside = checked.kv_connector_extra_config.get("connectors", ())
            ours = [each for each in beside if each.get("kv_connector") == CONNECTOR]
            checked = KVTransferConfig(**ours[0]) if ours else checked
    except (TypeError, ValueError) as failure:
        troubles.append(
            error("kv-transfer-config", f"vLLM refuses it: {one_line(failure)}.", "Correct it.")
        )
        return None
    if checked.kv_connector != CONNECTOR:
        troubles.append(
            error(
                "kv-transfer-config",
                f"kv_connector is {checked.kv_connector!r}, so this package is not asked.",
                f"Set kv_connector to {CONNECTOR}.",
            )
        )
    return checked


def _read_lmcache(
    transfer: "KVTransferConfig", troubles: list[Finding]
) -> "LMCacheEngineConfig | None":
    from lmcache.v1 import config_base

    try:
        # LMCache ignores options that it does not know or cannot parse, but logs them.
        with listen(config_base.__name__) as heard:
            config = load_lmcache_config(SimpleNamespace(kv_transfer_config=transfer))
        troubles.extend(
            warning("LMCache config", f"LMCache says: {message}.", "Correct or remove it.")
            for message in heard
        )
        return config
    except ConfigError as failure:
        troubles.append(error("LMCache config", str(failure)))
    except Exception as failure:  # YAML, types, LMCache's own checks: whatever it raises
        troubles.append(
            error(
                "LMCache config",
                f"LMCache refuses its configuration: {one_line(failure)}.",
                "Correct the YAML file or the LMCACHE_* variable.",
            )
        )
    return None
