# SPDX-License-Identifier: Apache-2.0
"""Checks the values of LMCache's options as the user wrote them.

LMCache turns a value that it does not understand into a default, None, or ``false``, so each is
checked first.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_hybrid.config.lmcache_file import CONFIG_FILE, options_in_file
from lmcache_hybrid.config.lmcache_options import GIGABYTES, OPTIONS, PLAIN, TOKENS, UNREAD
from lmcache_hybrid.config.own_options import OF_SERVICE, VARIABLES
from lmcache_hybrid.upstream.lmcache_home import take

PREFIX = "LMCACHE_"
_OTHER_PREFIX = re.compile("^(LM_CACHE_|lmcache_)")
_CONFIG_NAME = re.compile(f"{PREFIX}CONFIG(_?(PATH|FILE|FILE_PATH|YAML))?", re.IGNORECASE)
# Variables of LMCache's own, beside those of its options.
_OF_ENCODERS = f"{PREFIX}EC_"
# Options of older releases of LMCache, which names variables of them nowhere: what to set instead.
_GONE = {
    "local_device": "set LMCACHE_LOCAL_CPU, or LMCACHE_LOCAL_DISK and LMCACHE_MAX_LOCAL_DISK_SIZE",
    "max_local_cache_size": "set LMCACHE_MAX_LOCAL_CPU_SIZE",
    "lookup_url": "set LMCACHE_REMOTE_URL for a store that engines share",
    "distributed_url": "set LMCACHE_REMOTE_URL for a store that engines share",
    "enable_nixl": "set kv_role, and LMCACHE_REMOTE_URL for a store that engines share",
    "weka_path": "set LMCACHE_LOCAL_DISK, or LMCACHE_REMOTE_URL to file:///path",
    "error_handling": "unset it",
    "pipelined_backend": "unset it",
}
_WITH_UNIT = re.compile(r"\s*([\d.]+)\s*([kmgt])(i?)b?\s*", re.IGNORECASE)
# Parts of a list of paths that a shell, or Kubernetes, would expand.
_EXPANDED = re.compile(r"(^|,)\s*~|\$[\w{(]")
_ONE_SLASH = re.compile(r"(^|,)\s*file:(?!//)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
# LMCache reads _TRUE as true and all else as false; _FALSE are the values that mean it.
_TRUE = ("true", "1")
_FALSE = ("false", "0", "0.0", "no", "off", "n", "f", "none", "null", "disabled", "")

# By option: where it is set, and the value as written.
Values = dict[str, tuple[str, Any]]


def read_values(file: str | None, environment: Mapping[str, str]) -> Values:
    """Read the values that LMCache will read. The environment wins over the file.

    Empty variables that change nothing are left out.

    Args:
        file: LMCache's YAML; None for none.

    Raises:
        ConfigError: the file does not exist, or is not a YAML mapping of options.
    """
    definitions, aliases, deprecated, unquoted = (
        take("v1.config", "_CONFIG_DEFINITIONS"),
        take("v1.config", "_CONFIG_ALIASES"),
        take("v1.config", "_DEPRECATED_CONFIGS"),
        take("v1.config_base", "_parse_quoted_string"),
    )
    # LMCache warns of other old names and ignores them.
    names = {name: name for name in definitions} | {
        old: new for old, new in aliases.items() if old in deprecated and new in definitions
    }
    found: Values = {}
    for key, value in options_in_file(file).items():
        if key in names:
            found[names[key]] = str(key), value
    for key, option in names.items():
        variable = f"{PREFIX}{key.upper()}"
        if variable not in environment:
            continue
        value = unquoted(environment[variable])
        before = found[option][1] if option in found else definitions[option]["default"]
        if value or _changes(_kind(definitions[option]), before, file is not None):
            found[option] = variable, value
    return found


def _changes(kind: type | None, before: Any, from_file: bool) -> bool:
    """Whether an empty variable changes the value ``before``."""
    if kind is bool:
        return _is_on(before)
    # With a file LMCache keeps the number, or the default; without, it becomes None.
    return kind is not None and not from_file and before is not None


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() in _TRUE


def problems(values: Values) -> Iterator[str]:
    """Yield a sentence for each value that LMCache would misread, or fail on."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    for option, (where, value) in values.items():
        definition = definitions.get(option)
        if definition is None:  # LMCache itself warns of it
            continue
        kind, default = _kind(definition), definition["default"]
        blank = isinstance(value, str) and not value.strip()
        if value is None or blank:
            # Empty variables that change nothing are left out already; an empty switch is off.
            off = kind is bool and value is not None
            compared = OPTIONS.get(option, PLAIN).least is not None  # LMCache fails on None
            changed = default or compared or (off and where.startswith(PREFIX))
            # In its file LMCache fails on spaces for a number or JSON, whether it needs it or not.
            failing = blank and value and (kind in (int, float) or option == "extra_config")
            if failing or (kind and changed and not option.startswith(UNREAD)):
                yield f"{where} is empty; write a value, or remove it for LMCache's default."
        elif why := _wrong(option, kind, definition.get("env_converter"), value):
            # Other values may hold passwords.
            shown = f"={value!r}" if kind or isinstance(value, bool) else ""
            yield f"{where}{shown} {why}"


def taken_away(file: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each empty variable that removes a text (a URL) of the file."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    for option, value in options_in_file(file).items():
        variable = f"{PREFIX}{str(option).upper()}"
        is_text = option in definitions and _kind(definitions[option]) is None
        if is_text and value and environment.get(variable) == "":
            yield f"{variable} is empty, and takes {option} out of {file}; unset it to keep that."


def unasked(
    file: str | None, environment: Mapping[str, str], extra: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence where LMCache never asks the server of its ``remote_config_url``.

    Args:
        extra: ``kv_connector_extra_config``.
    """
    if extra.get("lmcache.remote_config_url"):
        yield (
            "lmcache.remote_config_url does nothing in kv_connector_extra_config, which is read "
            "after that server would be asked; write it in LMCache's file."
        )
    values, limit = read_values(file, environment), "pd_allocation_timeout_sec"
    default = take("v1.config", "_CONFIG_DEFINITIONS").get(limit, {}).get("default")
    where, url = values.get("remote_config_url", ("", None))
    if url and _number(values.get(limit, ("", default))[1]) == math.inf:
        yield (
            f"{where} is never asked, because LMCache cannot send its default of {limit} as JSON; "
            f"set {limit} to a number, such as 3600."
        )


def misspelt(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that is nearly one of LMCache's options.

    LMCache reads those that it knows; only of its file's keys it names the others. An option's
    name in small letters alone, as in its file, and ``LM_CACHE_`` are in older examples of it.
    """
    every = (*take("v1.config", "_CONFIG_DEFINITIONS"), *take("v1.config", "_CONFIG_ALIASES"))
    options = [name for name in every if not name.startswith(UNREAD)]
    known = [f"{PREFIX}{name.upper()}" for name in options]
    for name in environment:
        alone = name in options and "_" in name
        meant = f"{PREFIX}{name}" if alone else _OTHER_PREFIX.sub(PREFIX, name)
        if not meant.startswith(PREFIX) or meant.startswith((VARIABLES, _OF_ENCODERS)):
            continue
        if OF_SERVICE.search(name):
            continue
        if why := _GONE.get(meant.removeprefix(PREFIX).lower()):
            yield f"{name} does nothing, as LMCache has no such option any more; {why}."
            continue
        if _CONFIG_NAME.fullmatch(meant):
            near = [CONFIG_FILE]
        elif meant.removeprefix(PREFIX).lower() in options:
            near = [meant.upper()]
        else:
            near = difflib.get_close_matches(meant, known, 1, 0.86)
        if near and near[0] != name:
            yield f"{name} does nothing; did you mean {near[0]}?"


def unprefixed(extra: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, option) of LMCache's options in ``kv_connector_extra_config`` without prefix."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    for key in extra:
        option = key.lower().removeprefix(PREFIX.lower())
        if option in definitions:
            yield key, option


def without_prefix(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each of :func:`unprefixed`, and for a table of such options."""
    for key, option in unprefixed(extra):
        yield f"kv_connector_extra_config has {key}, which nobody reads; write lmcache.{option}."
    for key in extra:
        if _CONFIG_NAME.fullmatch(re.sub("[-.]", "_", key)):
            yield (
                f"kv_connector_extra_config has {key}, which nobody reads; name the file in the "
                f"variable {CONFIG_FILE}."
            )
    if isinstance(extra.get("lmcache"), dict):
        yield (
            "kv_connector_extra_config has a table 'lmcache', which nobody reads; write its "
            "options as lmcache.NAME in JSON: vLLM makes a table of flags with dots."
        )


def as_lmcache_reads(values: Values) -> dict[str, Any]:
    """Convert values without :func:`problems`, by option; unknown options are left out."""
    definitions = take("v1.config", "_CONFIG_DEFINITIONS")
    return {
        option: definitions[option]["env_converter"](value)
        for option, (_, value) in values.items()
        if option in definitions and value not in (None, "")
    }


def settle_empty(config: Any) -> None:
    """Replace empty texts and missing numbers with LMCache's defaults. Mutates ``config``.

    LMCache fails to open an empty ``remote_url`` and then switches off entirely.
    """
    for name, definition in take("v1.config", "_CONFIG_DEFINITIONS").items():
        value = getattr(config, name, None)
        no_number = value is None and _kind(definition) in (int, float)
        if no_number or (value == "" and definition["type"] is not bool):
            vars(config)[name] = definition["default"]


def _kind(definition: dict[str, Any]) -> type | None:
    """Return bool, int or float; None for other options."""
    converter = definition.get("env_converter")
    if definition["type"] is bool or getattr(converter, "__name__", "") == "_to_bool":
        return bool
    return converter if converter in (int, float) else None


def _wrong(option: str, kind: type | None, converter: Callable | None, value: Any) -> str:
    """Return why a value is invalid, and what to write; "" if it is valid."""
    if kind is bool:
        text = str(value).strip().lower()
        said = isinstance(value, bool) or text in _TRUE or text.strip("\"'") in _FALSE
        return "" if said else "counts as false in LMCache; write true or false."
    if kind in (int, float):
        known, number = OPTIONS.get(option, PLAIN), _number(value)
        if number is None or (known.unit == GIGABYTES and math.isinf(number)):
            unit = f" of {GIGABYTES}" if known.unit == GIGABYTES else ""
            return f"is not a number{unit}{_instead(known.unit, value)}"
        if known.least is not None and number < known.least:
            return f"is negative; write {known.least} or more."
        if kind is float or _is_whole(value):
            return ""
        return f"is not a whole number; write {f'{number:.0f}' if number.is_integer() else 'one'}."
    if option == "local_disk" and (
        isinstance(value, (bool, list, dict)) or str(value).lower() in ("true", "false")
    ):
        return "is not a folder; write its path, or remove it."
    if option == "local_disk" and _EXPANDED.search(str(value)):
        return "is taken as it is written, without ~ and $VARIABLES; write the whole path."
    if option == "local_disk" and _ONE_SLASH.search(str(value)):
        return "is a path that begins with file:, not a URL; write file:///path, or the path alone."
    try:
        read = value if converter is None else converter(value)
        if option != "extra_config" or isinstance(read, dict | None):
            return ""
    except (ValueError, TypeError, AttributeError):
        pass
    if option == "extra_config":
        return 'is no table; write JSON there, such as {"disk_io_threads": 8}, or remove it.'
    return f"is not a value that LMCache's {option} takes; correct it or remove it."


def _is_whole(value: Any) -> bool:
    """Whether ``int`` keeps its value."""
    try:
        return int(value) == float(value)
    except (ValueError, OverflowError):  # "256.0", infinity
        return False


def _number(value: Any) -> float | None:
    """Convert to a float; None if not a number, also for NaN and booleans."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) or isinstance(value, bool) else number


def _instead(unit: str, value: Any) -> str:
    """Return what to write in place of a number that is followed by a unit.

    Args:
        unit: of the option.
    """
    match = _WITH_UNIT.fullmatch(str(value)) if unit in (GIGABYTES, TOKENS) else None
    number = _number(match[1]) if match else None
    if match is None or number is None:
        return "; write one, or remove it for LMCache's default."
    power = _POWERS[match[2].lower()]
    if unit == TOKENS:
        return f"; write {number * 1024**power:.0f}."
    return f"; write {number * (1024 if match[3] else 1000) ** power / (1 << 30):.4g}."
