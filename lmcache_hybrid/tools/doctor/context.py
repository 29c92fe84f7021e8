# SPDX-License-Identifier: Apache-2.0
"""Reads the user's settings and model as an engine does."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from lmcache_hybrid.config.check import written_config
from lmcache_hybrid.config.lmcache_config import load_lmcache_config
from lmcache_hybrid.config.options import Options, read_options
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.doctor.finding import Finding, error, listen, one_line, warning
from lmcache_hybrid.tools.doctor.model import Model, ModelError, read_model, refused
from lmcache_hybrid.tools.flags import CONNECTOR, parse_flags

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import KVTransferConfig


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        transfer: ``kv_transfer_config``, ours of those in a ``MultiConnector``; None if vLLM
            refuses the flags.
        config: LMCache's configuration, not settled yet; None if it cannot be read.
        model: groups and sizes; None if no model was named, or vLLM refuses it.
        named: the model's name, if any.
        troubles: findings made while reading these.
        written: the options that the user wrote and LMCache understands; None if unknown.
        left: those that it does not, see :func:`.config.check.written_config`.
        publishes: whether vLLM publishes KV cache events; None without its flags.
        inside: whether our connector is in a ``MultiConnector``.
    """

    transfer: "KVTransferConfig | None"
    config: "LMCacheEngineConfig | None"
    model: Model | None
    named: str | None
    troubles: tuple[Finding, ...]
    written: "LMCacheEngineConfig | None" = None
    left: frozenset[str] = frozenset()
    publishes: bool | None = None
    inside: bool = False

    @property
    def local_ranks(self) -> int:
        """Ranks of one engine on this machine; 1 without a model."""
        return self.model.local_ranks if self.model else 1

    @property
    def block_size(self) -> int | None:
        """N in tokens, None if unknown."""
        return self.model.block_size if self.model and self.model.served else None

    def read_options(self) -> Options:
        """This package's and LMCache's options, as an engine reads them; needs a ``config``.

        Raises:
            ConfigError: a sentence for each that is refused.
        """
        # Whether vLLM publishes events does not matter here.
        settings = SimpleNamespace(kv_transfer_config=self.transfer, kv_events_config=None)
        return read_options(settings, self.config, self.block_size)


def read_context(model: str | None, flags: Sequence[str] = ()) -> Context:
    """Read everything; what cannot be read becomes a finding, not an error.

    LMCache's file is the one that LMCACHE_CONFIG_FILE names.

    Args:
        flags: of ``vllm serve``.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    troubles: list[Finding] = []
    try:
        parsed = parse_flags(model, flags)
    except ConfigError as failure:
        told = error("vLLM's flags", str(failure), "Correct them.")
        written, left = written_config(None) or (None, ())
        return Context(None, None, None, model, (told,), written, frozenset(left))
    transfer = _ours(parsed.kv_transfer_config, troubles)
    config = _read_lmcache(transfer, troubles)
    found = None
    if model is not None:
        try:
            found = read_model(AsyncEngineArgs.from_cli_args(parsed))
        except ModelError as failure:
            troubles.append(error("model", str(failure), failure.fix))
        except Exception as failure:  # made of the arguments themselves
            refusal = refused(model, failure)
            troubles.append(error("model", str(refusal), refusal.fix))
    written, left = written_config(transfer) or (None, ())
    events = parsed.kv_events_config
    return Context(
        transfer,
        config,
        found,
        model,
        tuple(troubles),
        written,
        frozenset(left),
        publishes=bool(events and events.enable_kv_cache_events) if flags else None,
        inside=parsed.kv_transfer_config.kv_connector == "MultiConnector",
    )


def _ours(transfer: "KVTransferConfig", troubles: list[Finding]) -> "KVTransferConfig":
    """Return the configuration of this package's connector, also inside a ``MultiConnector``."""
    if transfer.kv_connector == "MultiConnector":
        try:
            transfer.has_connector(CONNECTOR)  # refuses what is no list of connectors
            for each in transfer.kv_connector_extra_config.get("connectors", ()):
                if each.get("kv_connector") == CONNECTOR:
                    return type(transfer)(**each)
        except (AttributeError, TypeError, ValueError) as failure:
            told = f"vLLM refuses it: {one_line(failure)}."
            troubles.append(error("kv-transfer-config", told, "Correct it."))
            return transfer
    if transfer.kv_connector != CONNECTOR:
        troubles.append(
            error(
                "kv-transfer-config",
                f"kv_connector is {transfer.kv_connector!r}, so this package is not asked.",
                f"Set kv_connector to {CONNECTOR}.",
            )
        )
    return transfer


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
    except Exception as failure:  # YAML, types, LMCache's own checks: it may raise anything
        troubles.append(
            error(
                "LMCache config",
                f"LMCache refuses its configuration: {one_line(failure)}.",
                "Correct the YAML file or the LMCACHE_* variable.",
            )
        )
    return None
