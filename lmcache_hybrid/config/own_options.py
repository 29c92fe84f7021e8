# SPDX-License-Identifier: Apache-2.0
"""Describes this package's own options, and reads them wherever a user may write them.

An option may stand, in order of precedence, in ``kv_connector_extra_config`` as
``lmcache.hybrid_NAME``, in the environment as ``LMCACHE_HYBRID_NAME``, and in LMCache's file or
its ``extra_config`` as ``hybrid_NAME``. Imports neither vLLM nor LMCache: vLLM's API server
reads options before LMCache is needed.

``extra`` is ``kv_connector_extra_config``. All public functions that take it raise ConfigError if
LMCache's file cannot be read.
"""

import ast
import difflib
import json
import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmcache_hybrid.config.lmcache_file import CONFIG_FILE, options_in_file
from lmcache_hybrid.core.errors import ConfigError

# Keys of kv_connector_extra_config with this prefix are this package's own.
OWN_PREFIX = "lmcache.hybrid_"
LOAD_LIMIT_KEY = "lmcache.max_tokens_per_load"
CHECKPOINT_KEY = f"{OWN_PREFIX}checkpoint_tokens"
KEY_FILE_KEY = f"{OWN_PREFIX}key_file"
POLICY_KEY = f"{OWN_PREFIX}load_policy"
SHARE_KEY = f"{OWN_PREFIX}share_prefills"
LOAD_FAILURE_KEY = f"{OWN_PREFIX}load_failure_policy"
MAX_SIZE_KEY = f"{OWN_PREFIX}fs_max_size_gb"
MAX_AGE_KEY = f"{OWN_PREFIX}fs_max_age_hours"
TRUSTED_OWNER_KEY = f"{OWN_PREFIX}trusted_folder_owner"
KEEP_SHARE_KEY = f"{OWN_PREFIX}keep_share"
POLICIES = ("always", "faster")
# Default of CHECKPOINT_KEY: a state at each chunk end of a prefill.
CHUNK_ENDS = "chunk"
# Options of earlier versions: why they are gone.
GONE = {"lmcache.hybrid_attention_group": "it changed nothing, all attention groups are stored"}
# Variables of this package that are not options.
OTHER_VARIABLES = {
    "LMCACHE_HYBRID_ALLOW_UNTESTED",
    "LMCACHE_HYBRID_STRICT",
    "LMCACHE_HYBRID_REDIS_CA",
    "LMCACHE_HYBRID_REDIS_PASSWORD",
    "LMCACHE_HYBRID_REDIS_PASSWORD_FILE",
    "LMCACHE_HYBRID_REDIS_USERNAME",
}
_LMCACHE = "lmcache."
VARIABLES = "LMCACHE_HYBRID_"
# Variables that Kubernetes makes for a service, whose name may begin with lmcache.
OF_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)$")
# What a switch may be in the environment, and in YAML with quotes.
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class OwnOption:
    """One option.

    Attributes:
        key: its name in ``kv_connector_extra_config``.
        default: its value where it is not set.
        parse: converts what the user wrote, a text in the environment. Raises ValueError with
            the rest of a sentence: why that is not a value, and what to write.
    """

    key: str
    default: Any
    parse: Callable[[Any], Any]

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return "LMCACHE_" + self.key.removeprefix(_LMCACHE).upper()


def _tokens(value: Any) -> int:
    number = _whole(value)
    if number is None:
        raise ValueError("is not a whole number; write one.")
    if number < 0:
        raise ValueError("is not a number of tokens; write one, or 0.")
    return number


def _checkpoint(value: Any) -> int | str:
    if value == CHUNK_ENDS:
        return CHUNK_ENDS
    number = _whole(value)
    if number is None:
        raise ValueError(f"is not a whole number; write one, or '{CHUNK_ENDS}'.")
    return number


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
        return number if number == float(value) and not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _one_of(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"is not a policy; write one of {names}.")
        return str(value)

    return parse


def _switch(value: Any) -> bool:
    known = _SWITCH.get(str(value).strip().lower()) if isinstance(value, (int, str)) else None
    if known is None:
        raise ValueError("is neither true nor false; write one of them.")
    return known


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("is not a path; write one, or remove it.")
    return value


def _limit(unit: str) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            number = 0.0 if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = 0.0
        if not 0 < number < 1e15:  # bytes and seconds of it are numbers, too
            raise ValueError(f"is not a limit; write a number of {unit} above 0, or remove it.")
        return number

    return parse


def _share(value: Any) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= 0.5:  # what is not kept needs room, too
        raise ValueError("is not a share; write a number from 0, which keeps nothing, to 0.5.")
    return number


def _user(value: Any) -> int:
    text = "" if isinstance(value, bool) else str(value)
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise ValueError(
            "names no user of this machine; write a user's name or number, as stat -c %u shows it "
            "for the folder, or remove it."
        ) from None


OWN_OPTIONS = {
    option.key: option
    for option in (
        OwnOption(CHECKPOINT_KEY, CHUNK_ENDS, _checkpoint),
        OwnOption(POLICY_KEY, POLICIES[0], _one_of(*POLICIES)),
        OwnOption(SHARE_KEY, True, _switch),
        OwnOption(LOAD_FAILURE_KEY, "recompute", _one_of("recompute", "fail")),
        OwnOption(KEY_FILE_KEY, None, _path),
        OwnOption(MAX_SIZE_KEY, None, _limit("GB")),
        OwnOption(MAX_AGE_KEY, None, _limit("hours")),
        OwnOption(TRUSTED_OWNER_KEY, None, _user),
        OwnOption(KEEP_SHARE_KEY, 0.25, _share),
        OwnOption(LOAD_LIMIT_KEY, 0, _tokens),
    )
}


def read_own_options(
    extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the value of each option, by key.

    Raises:
        ConfigError: also where :func:`problems` are found.
    """
    if wrong := list(problems(extra, environment)):
        raise ConfigError(*wrong)
    return sound_own_options(extra, environment)


def sound_own_options(
    extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the value of each option, by key; its default in place of a bad one."""
    found = {key: option.default for key, option in OWN_OPTIONS.items()}
    for key, (_, value) in written(extra, environment).items():
        if key in OWN_OPTIONS:
            with suppress(ValueError):  # see problems
                found[key] = OWN_OPTIONS[key].parse(value)
    return found


def names_of(extra: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, the name of each option where the user wrote it."""
    return {key: where for key, (where, _) in written(extra).items()}


def load_failure_policy(extra: Mapping[str, Any]) -> str:
    """Return LOAD_FAILURE_KEY's value; its default for a bad one, which is refused later."""
    return str(sound_own_options(extra)[LOAD_FAILURE_KEY])


def problems(extra: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option that does not exist, has a bad value or is there twice."""
    in_file = options_in_file(environment.get(CONFIG_FILE))
    yield from _misspelt("kv_connector_extra_config", _LMCACHE, extra)
    yield from _misspelt("LMCache's file", "", in_file)
    yield from _twice("LMCache's file", in_file)
    yield from _replaced(extra, environment, in_file)
    empty = [str(name) for name, value in in_file.items() if value is None]
    for table in _lmcache_extras(extra, environment, in_file):
        yield from _misspelt("LMCache's extra_config", "", table)
        yield from _twice("LMCache's extra_config", table)
        empty += [f"extra_config.{name}" for name, value in table.items() if value is None]
    # Null there is as good as nothing, but records would not be sealed.
    empty += [KEY_FILE_KEY] if extra.get(KEY_FILE_KEY, "") is None else []
    for name in empty:
        if is_own(name.removeprefix("extra_config.")):
            yield f"{name} is empty; write a value, or remove it."
    for key, (where, value) in written(extra, environment).items():
        if key in OWN_OPTIONS:
            try:
                OWN_OPTIONS[key].parse(value)
            except ValueError as error:
                yield f"{where}={_shown(value)} {error}"
        elif key not in GONE:
            yield f"{where} is not a setting; the settings are {sorted(OWN_OPTIONS)}."


def remarks(extra: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option that is written and does nothing.

    An unknown variable is not an error: Kubernetes makes some of the names of services.
    """
    for key, (where, _) in written(extra, environment).items():
        if key in GONE:
            yield f"{where} is not a setting any more: {GONE[key]}; remove it."
    known = [option.variable for option in OWN_OPTIONS.values()] + sorted(OTHER_VARIABLES)
    for name in environment:
        of_service, meant = OF_SERVICE.search(name), name.upper().replace("LM_CACHE_", "LMCACHE_")
        if meant.startswith(VARIABLES) and name not in known and not of_service:
            near = difflib.get_close_matches(meant, known, 1, 0.85)
            yield f"{name} does nothing; " + (f"did you mean {near[0]}?" if near else "unset it.")


def _misspelt(where: str, prefix: str, options: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a sentence for each key that is one of ours in another spelling.

    Args:
        where: the place, for the message.
        prefix: what our keys begin with there.
    """
    for key, value in options.items():
        if key == "lmcache" and isinstance(value, dict) and not prefix:
            yield f"{where} has a table 'lmcache', which nobody reads; write its options alone."
        plain = _plain(key)
        exact = key in (f"{_LMCACHE}{plain}", plain) if not prefix else key == f"{_LMCACHE}{plain}"
        # What begins with OWN_PREFIX is in written().
        if is_own(plain) and not exact and not str(key).startswith(OWN_PREFIX):
            yield f"{where} has {key}, which nobody reads; write {prefix}{plain}."


def _twice(where: str, options: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a sentence for each of our options that stands in one place in both spellings."""
    for name in map(str, options):
        if is_own(name) and name != _key(name) and _key(name) in options:
            yield f"{where} has both {name} and {_key(name)}; remove one of them."


def is_meant(key: str) -> bool:
    """Whether a key is one of ours or of LMCache's, however it is spelt."""
    return key.startswith(_LMCACHE) or is_own(_plain(key))


def _plain(key: Any) -> str:
    """Return the name in LMCache's file that a key is meant to be."""
    return re.sub(r"[-. ]", "_", str(key).strip().lower()).removeprefix("lmcache_")


def _shown(value: Any) -> str:
    """Format a value for a message, in at most 200 characters."""
    try:
        return repr(value)[:200]
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "a number of thousands of digits"


def is_own(name: str) -> bool:
    """Whether LMCache's file may name this package's option so."""
    return _key(name) in OWN_OPTIONS or _key(name).startswith(OWN_PREFIX)


def _key(name: str) -> str:
    return name if name.startswith(_LMCACHE) else f"{_LMCACHE}{name}"


def written(
    extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, tuple[str, Any]]:
    """Return (name where it stands, value as written) by key, of unknown options too."""
    in_file = options_in_file(environment.get(CONFIG_FILE))
    found: dict[str, tuple[str, Any]] = {}
    for table in _lmcache_extras(extra, environment, in_file):
        for name, value in table.items():
            if is_own(str(name)):
                found[_key(str(name))] = f"extra_config.{name}", value
    for name, value in in_file.items():
        if is_own(str(name)):
            found[_key(str(name))] = str(name), value
    for key, option in OWN_OPTIONS.items():
        value = _unquoted(environment.get(option.variable))
        # Compose files write empty variables. One of a key file would leave records unsealed.
        if value or (value is not None and key == KEY_FILE_KEY):
            found[key] = option.variable, value
    for key, value in extra.items():
        # Null is as good as nothing.
        if value is not None and (key in OWN_OPTIONS or key.startswith(OWN_PREFIX)):
            found[key] = key, value
    return {key: each for key, each in found.items() if each[1] is not None}


def _unquoted(text: Any) -> Any:
    """Strip a text and the quotes around it, as LMCache does with variables."""
    if not isinstance(text, str):
        return text
    text = text.strip()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    try:
        inner = ast.literal_eval(text)
        return inner if isinstance(inner, str) else text
    except (ValueError, SyntaxError):
        return text[1:-1]


def _replaced(
    extra: Mapping[str, Any], environment: Mapping[str, str], in_file: Mapping[Any, Any]
) -> Iterator[str]:
    """Yield a sentence where an ``extra_config`` loses what a farther one has.

    LMCache reads the nearest alone. This package's options are read in all of them.
    """
    tables = list(_extras(extra, environment, in_file))
    for far, has in tables[:-1]:
        near, reads = tables[-1]
        lost = [str(key) for key in has if key not in reads and not is_own(str(key))]
        if lost:
            yield (
                f"{near} takes the place of {far}, and lacks {', '.join(lost)}; write all of it in "
                "one of the two."
            )


def _lmcache_extras(
    extra: Mapping[str, Any], environment: Mapping[str, str], in_file: Mapping[Any, Any]
) -> Iterator[Mapping[Any, Any]]:
    """Yield each ``extra_config`` of LMCache's, the nearest last.

    LMCache reads the nearest alone; a key file in another would be lost without a word.
    """
    return (table for _, table in _extras(extra, environment, in_file))


def _extras(
    extra: Mapping[str, Any], environment: Mapping[str, str], in_file: Mapping[Any, Any]
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield each with its place. LMCache refuses malformed ones."""
    own_key, variable = f"{_LMCACHE}extra_config", "LMCACHE_EXTRA_CONFIG"
    for where, value in (
        ("extra_config in LMCache's file", in_file.get("extra_config")),
        (variable, environment.get(variable)),
        (own_key, extra.get(own_key)),
    ):
        try:
            read = json.loads(_unquoted(value)) if isinstance(value, str) else value
        except ValueError:
            continue
        if isinstance(read, dict):
            yield where, read
