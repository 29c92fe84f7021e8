# SPDX-License-Identifier: Apache-2.0
"""Values of LMCache's options, as the user wrote them.

LMCache reads what it does not understand as something else: a default, None, or ``false``. So
each value is looked at before.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.upstream.lmcache_home import take

PREFIX = "LMCACHE_"
# Options in GB, of which LMCache's have 2^30 bytes.
SIZES = ("max_local_cpu_size", "max_local_disk_size", "reserve_local_cpu_size")
# Options that are no switches, although some write them as such.
SWITCHED = ("local_disk",)
_WITH_UNIT = re.compile(r"\s*([\d.]+)\s*([kmgt])(i?)b?\s*", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BOOLEANS = ("true", "false", "1", "0")


def read_values(file: str | None, environment: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """What the user wrote, by option: (where it is set, the value). The environment wins.

    Args:
        file: LMCache's YAML; None where there is none.

    Raises:
        ConfigError: the file does not exist, or is not YAML that holds options.
    """
    definitions, aliases = (
        take("v1.config", name) for name in ("_CONFIG_DEFINITIONS", "_CONFIG_ALIASES")
    )
    found: dict[str, tuple[str, Any]] = {}
    for key, value in _in_file(file).items():
        if (option := aliases.get(key, key)) in definitions:
            found[option] = str(key), value
    for key in (*definitions, *aliases):
        variable = f"{PREFIX}{key.upper()}"
        if variable in environment:
            text = environment[variable].strip()
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            found[aliases.get(key, key)] = variable, text[1:-1] if quoted else text
    return found


def _in_file(file: str | None) -> dict[Any, Any]:
    if file is None:
        return {}
    if not os.path.isfile(file):
        raise ConfigError(
            f"LMCACHE_CONFIG_FILE={file!r} is not a file; write the path of an LMCache YAML "
            "file, or unset it to use RAM with LMCache's defaults."
        )
    try:
        with open(file) as text:
            options = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{file} cannot be read as YAML ({told}); correct it.") from error
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ConfigError(f"{file} holds no options; write lines such as max_local_cpu_size: 5.")
    return options


def problems(values: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
    """A sentence for each value that LMCache would take for another one, or fail on."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    for option, (where, value) in values.items():
        definition = definitions.get(option)
        if definition is None:  # LMCache itself warns of it
            continue
        kind = _kind(definition)
        if value is None:
            if kind and definition["default"] is not None:
                yield f"{where} is empty; write a value, or remove it for LMCache's default."
        elif why := _wrong(option, kind, definition.get("env_converter"), value):
            # Other values may hold passwords.
            yield (
                f"{where}={value!r} {why}" if kind or isinstance(value, bool) else f"{where} {why}"
            )


def as_lmcache_reads(values: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """By option, for values without :func:`problems`."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    return {
        option: value if value is None else definitions[option]["env_converter"](value)
        for option, (_, value) in values.items()
    }


def _kind(definition: dict[str, Any]) -> type | None:
    """bool, int or float; None for other options."""
    converter = definition.get("env_converter")
    if definition["type"] is bool or getattr(converter, "__name__", "") == "_to_bool":
        return bool
    return converter if converter in (int, float) else None


def _wrong(option: str, kind: type | None, converter: Callable | None, value: Any) -> str:
    """Why a value is none of its option, and what to write; "" where it is one."""
    if value == "":  # of others LMCache makes none
        return "is empty; write a value, or unset it." if kind else ""
    if kind is bool:
        if isinstance(value, bool) or str(value).strip().lower() in _BOOLEANS:
            return ""
        return "counts as false in LMCache, whatever it says; write true or false."
    if kind in (int, float):
        number = _number(value)
        if number is None or (option in SIZES and math.isinf(number)):
            unit = " of gigabytes (2^30 bytes)" if option in SIZES else ""
            return f"is not a number{unit}{_instead(option, value)}"
        return "" if kind is float or number.is_integer() else "is not a whole number; write one."
    if option in SWITCHED and isinstance(value, bool):
        return "is not a folder; write its path, or remove it."
    if converter is not None:
        try:
            converter(value)
        except (ValueError, TypeError, AttributeError):
            return f"is not a value that LMCache's {option} takes; correct it or remove it."
    return ""


def _number(value: Any) -> float | None:
    """None for what is no number, as NaN and a boolean."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) or isinstance(value, bool) else number


def _instead(option: str, value: Any) -> str:
    """What to write in place of a size with a unit."""
    match = _WITH_UNIT.fullmatch(str(value))
    number = _number(match[1]) if match else None
    if match is None or number is None:
        return "; write one, or remove it for LMCache's default."
    size = number * (1024 if match[3] or option not in SIZES else 1000) ** _POWERS[match[2].lower()]
    return f"; write {size / (1 << 30):.4g}." if option in SIZES else f"; write {size:.0f}."
