# SPDX-License-Identifier: Apache-2.0
"""Reads the YAML file of LMCache's options, without LMCache."""

import os
from collections.abc import Iterator
from typing import Any

import yaml

from lmcache_hybrid.core.errors import ConfigError

CONFIG_FILE = "LMCACHE_CONFIG_FILE"


def options_in_file(file: str | None) -> dict[Any, Any]:
    """Read the options as they are written.

    Args:
        file: the one that CONFIG_FILE names; None for none.

    Raises:
        ConfigError: the file does not exist, is not a YAML mapping of options, or has one twice.
    """
    if file is None:
        return {}
    if not os.path.isfile(file):
        raise ConfigError(
            f"{CONFIG_FILE}={file!r} is not a file; write the path of an LMCache YAML "
            "file, or unset it to use RAM with LMCache's defaults."
        )
    try:
        with open(file) as opened:
            text = opened.read()
        options = yaml.safe_load(text)
        twice = [*_twice(yaml.compose(text, yaml.SafeLoader))]
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); let the user that runs vLLM read it."
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # Its message may quote a password.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file} cannot be read as YAML{where}; correct it.") from None
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ConfigError(f"{file} holds no options; write lines such as max_local_cpu_size: 5.")
    if twice:  # the last would win silently
        raise ConfigError(*(f"{file} has {each}; keep one of them." for each in twice))
    return options


def _twice(node: yaml.Node | None, nested: bool = False) -> Iterator[str]:
    """Yield each key that a mapping, or one directly in it, has twice, with both lines."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":  # merges add up
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                yield f"{key.value} in the lines {lines[name]} and {line}"
            lines[name] = line
        if not nested:
            yield from _twice(value, nested=True)
