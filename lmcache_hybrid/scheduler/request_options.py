# SPDX-License-Identifier: Apache-2.0
"""Reads a request's settings: the ``lmcache.*`` entries of its ``kv_transfer_params``."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.request_options")

SKIP_SAVE, TAG = "lmcache.skip_save", "lmcache.tag."
DROP, DROP_FROM, PREFETCH = "lmcache.drop", "lmcache.drop_from", "lmcache.prefetch"
KEEP, KEEP_TO = "lmcache.keep", "lmcache.keep_to"
# Max seconds to keep a prompt.
KEEP_SECONDS = 24 * 3600
# Read by LMCache's multiprocess connector, not by its in-process one.
UNSERVED = "lmcache.max_offload_tokens"
# Names to suggest, by their first part after "lmcache.".
_SERVED = {
    **{"skip_save": SKIP_SAVE, "tag": f"{TAG}NAME"},
    **{"drop": DROP, "drop_from": DROP_FROM, "prefetch": PREFETCH},
    **{"keep": KEEP, "keep_to": KEEP_TO},
}
# As in JSON, or as a string; True == 1 and False == 0.
_SWITCH: dict[int | str, bool] = {
    **{"true": True, "1": True, True: True},
    **{"false": False, "0": False, False: False},
}
# Clients choose names: max names to warn of per kind of mistake.
MOST_NAMES = 20
NO_SWITCH = "%s=%s is neither true nor false; write one of them."
# Characters of a name or value that are logged.
SHOWN = 60


@dataclass(frozen=True)
class RequestOptions:
    """A request's settings.

    Attributes:
        tags: (name, value) pairs of its namespace, in order; None where a value is invalid and
            the request must not be cached.
        skip_save: whether nothing of it is stored.
        drop_from: token from which on its records are removed; None to remove none.
        prefetch: whether its records are copied to RAM.
        keep: seconds for which its records are evicted last, 0 to end that; None for nothing.
        keep_to: token up to which they are; None for all of the prompt.
        refusals: (option, why it is not done), for its client.
    """

    tags: tuple[tuple[str, str], ...] | None = ()
    skip_save: bool = False
    drop_from: int | None = None
    prefetch: bool = False
    keep: float | None = None
    keep_to: int | None = None
    refusals: tuple[tuple[str, str], ...] = ()


NONE = RequestOptions()


class RequestOptionsReader:
    """Reads settings, and warns once of each mistake. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        from lmcache.integration.vllm.utils import extract_request_configs_from_request

        self._extract = extract_request_configs_from_request
        # Names already warned of, by kind of mistake.
        self._warned: dict[str, set[str]] = {}

    def read(self, request: "Request") -> RequestOptions:
        """Read a request. An invalid value is taken as the safer one: not stored, or not cached."""
        self._tell_unread(request.kv_transfer_params)
        configs = self._extract(request)
        if not configs:
            return NONE
        tags: list[tuple[str, str]] | None = []
        skip_save = False
        for name, value in sorted(configs.items()):
            if name.startswith(TAG):
                text = self._tag(name, value)
                if text is None:
                    tags = None
                elif tags is not None:
                    tags.append((name.removeprefix(TAG), text))
            elif name == SKIP_SAVE:
                skip_save = self._switch(name, value)
            elif name in (DROP, DROP_FROM, PREFETCH, KEEP, KEEP_TO):
                pass  # all together, below
            elif name == UNSERVED:
                if self._is_first("unserved", name):
                    logger.warning(
                        "%s of a request does nothing here: only LMCache's multiprocess connector "
                        "reads it. Set %s to true in requests that must not be stored.",
                        UNSERVED,
                        SKIP_SAVE,
                    )
            else:
                self._tell_unknown(name)
        return _steering(configs, None if tags is None else tuple(tags), skip_save)

    def _tell_unread(self, params: Any) -> None:
        """Warn of names that LMCache does not see: a table ``lmcache``, ``lmcache_skip_save``.

        Args:
            params: what the client sent as ``kv_transfer_params``.
        """
        for name in params if isinstance(params, Mapping) else ():
            if isinstance(name, str) and name[:7].lower() == "lmcache" and name[:8] != "lmcache.":
                self._tell_unknown(name)

    def _tell_unknown(self, name: str) -> None:
        if self._is_first("unknown", name):
            logger.warning(
                "%s of a request is not a setting that LMCache knows, and is ignored; %s",
                _shown_name(name),
                _instead_of(name),
            )

    def _switch(self, name: str, value: Any) -> bool:
        known = _known(value)
        if known is not None:
            return known
        if self._is_first("switch", name):
            logger.warning(
                "%s=%s of a request is neither true nor false; write one of them. Requests with "
                "such a value are not stored.",
                name,
                _shown(value),
            )
        return True

    def _tag(self, name: str, value: Any) -> str | None:
        """Return a tag's value as LMCache's record names spell it; None if invalid.

        There 7 and "7" are equal. Floats and booleans have several spellings and are invalid.
        """
        if type(value) is int:
            value = str(value)
        if isinstance(value, str) and _is_plain(name) and _is_plain(value):
            return value
        if self._is_first("tag", name):
            logger.warning(
                "%s=%s of a request is not a tag that LMCache takes; write a printable string "
                "without '@' and '%%', or a whole number. Requests with such a tag are not cached.",
                _shown_name(name),
                _shown(value),
            )
        return None

    def _is_first(self, kind: str, name: str) -> bool:
        """Whether to warn of a name. Logs once that a kind has too many to warn of."""
        warned, name = self._warned.setdefault(kind, set()), name[:SHOWN]
        if name in warned or len(warned) > MOST_NAMES:
            return False
        warned.add(name)
        if len(warned) > MOST_NAMES:
            logger.warning("Requests name more wrong settings of LMCache than are logged here.")
        return len(warned) <= MOST_NAMES


def _known(value: Any) -> bool | None:
    """Read a switch; None where it is neither true nor false."""
    if value is None:  # JSON's null, which LMCache takes for false
        return False
    known = value.strip().lower() if isinstance(value, str) else value
    return _SWITCH.get(known) if isinstance(known, (int, str)) else None


def _steering(
    configs: Mapping[str, Any], tags: tuple[tuple[str, str], ...] | None, skip_save: bool
) -> RequestOptions:
    """Add what a request asks of the store: a drop, a prefetch or a keep, and what is refused."""
    drop_from, no_drop = _drop(configs)
    keep, no_keep = _keep(configs)
    prefetch = _known(configs.get(PREFETCH))
    refusals = {name: why for name, why in ((DROP, no_drop), (KEEP, no_keep)) if why}
    if prefetch is None:
        refusals[PREFETCH] = NO_SWITCH % (PREFETCH, _shown(configs[PREFETCH]))
    asked = {
        DROP: drop_from is not None,
        PREFETCH: bool(prefetch),
        KEEP: configs.get(KEEP) is not None,
    }
    several = [name for name, is_asked in asked.items() if is_asked]
    if len(several) > 1:
        refusals |= dict.fromkeys(several, f"write {' or '.join(several)}, not both.")
    return RequestOptions(
        tags,
        skip_save,
        drop_from,
        bool(prefetch) and PREFETCH not in refusals,
        None if KEEP in refusals else keep,
        configs.get(KEEP_TO),
        tuple(refusals.items()),
    )


def _keep(configs: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the seconds for which records are kept, None for no keep; why it is refused."""
    seconds, to = configs.get(KEEP), configs.get(KEEP_TO)
    if seconds is None:
        why = f"{KEEP_TO} does nothing without {KEEP}: write {KEEP}=SECONDS beside it."
        return None, "" if to is None else why
    if type(seconds) not in (int, float) or not 0 <= seconds <= KEEP_SECONDS:
        most = f"write a number up to {KEEP_SECONDS}, or 0 to end a keep."
        return None, f"{KEEP}={_shown(seconds)} is not a number of seconds; {most}"
    if to is not None and (type(to) is not int or to < 1):
        return None, f"{KEEP_TO}={_shown(to)} is not a number of tokens; write 1 or more."
    return seconds, ""


def _drop(configs: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the token from which on records are removed, None for no drop; why it is refused."""
    asked, start = _known(configs.get(DROP)), configs.get(DROP_FROM)
    if asked is None:
        return None, NO_SWITCH % (DROP, _shown(configs[DROP]))
    if start is None:
        return 0 if asked else None, ""
    if not asked:
        return None, f"{DROP_FROM} does nothing without {DROP}: write {DROP}=true beside it."
    if type(start) is not int or start < 0:
        return None, f"{DROP_FROM}={_shown(start)} is not a number of tokens; write 0 or more."
    return start, ""


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set("@%") & set(text)


def _instead_of(name: str) -> str:
    begins = name[len("lmcache") : SHOWN].lstrip("._-").partition(".")[0]
    if near := difflib.get_close_matches(begins.lower(), _SERVED, 1):
        return f"did you mean {_SERVED[near[0]]}?"
    *names, last = _SERVED.values()
    return f"those of a request are {', '.join(names)} and {last}."


def _shown(value: Any) -> str:
    """Format a client's value for the log: one line, cut to 2 * SHOWN characters."""
    return repr(value)[: 2 * SHOWN]


def _shown_name(name: str) -> str:
    return _shown(name[:SHOWN])[1:-1]
