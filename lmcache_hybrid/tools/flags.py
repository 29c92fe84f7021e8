# SPDX-License-Identifier: Apache-2.0
"""Parses vLLM's flags as ``vllm serve MODEL FLAGS`` does."""

import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.config import KVTransferConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from yaml import YAMLError

from lmcache_hybrid.core.errors import ConfigError

CONNECTOR = "LMCacheConnectorV1"
DEFAULT_TRANSFER = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}


# Pydantic's text around its complaints: how many, of which class, and a URL for each.
_PYDANTIC = re.compile(
    r"\d+ validation errors? for \w+ | \[type=.*?\] For further information visit \S+"
)
# The value of a flag, which may be a password.
_VALUE = re.compile(r"(--[\w-]+)=\S+")


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        told = _PYDANTIC.sub("", " ".join(message.split())).rstrip(".")
        told = _VALUE.sub(r"\1", told)
        raise ConfigError(f"vLLM does not take these flags: {told}.")

    def print_help(self, *_: Any) -> NoReturn:
        raise ConfigError("The help of vLLM's flags is vLLM's own: vllm serve --help.")


def parse_flags(model: str | None, flags: Sequence[str]) -> Namespace:
    """Parse flags with vLLM's parser, with our connector if they name none.

    Flags of the server alone (``--port``, ``--api-key``) are accepted and have no effect.

    Args:
        model: name or folder; None leaves vLLM's default. Then do not make engine arguments of
            the result: that would look up the default model.

    Raises:
        ConfigError: vLLM refuses one of them. One sentence.
    """
    load_general_plugins()  # the plugin fills in a missing kv_role
    named = [] if model is None else [model]
    if any(flag.startswith("--config=") for flag in flags):
        raise ConfigError(
            "vLLM takes --config=FILE, and does not read that file; write --config FILE."
        )
    parser = make_arg_parser(_Parser(prog="vllm serve"))
    try:
        parsed = parser.parse_args([*named, *flags])
    except ConfigError:  # vLLM's parser refuses a flag
        raise
    except (AssertionError, AttributeError, OSError, ValueError, YAMLError) as error:
        if "--config" not in flags:
            raise
        # Of an empty file, or one with a list.
        why = "it is no table of flags" if isinstance(error, AttributeError) else f"{error}"
        raise ConfigError(f"vLLM cannot read the file of --config: {why.rstrip('.')}.") from error
    transfer = parsed.kv_transfer_config or KVTransferConfig(**DEFAULT_TRANSFER)
    vars(parsed).update(kv_transfer_config=transfer)
    if model is not None:
        vars(parsed).update(model=model)
    return parsed
