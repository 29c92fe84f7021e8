# SPDX-License-Identifier: Apache-2.0
"""Reads what a request asks of LMCache: the ``lmcache.*`` entries of its ``kv_transfer_params``."""

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.scheduler.request_configs")

SKIP_SAVE, TAG = "lmcache.skip_save", "lmcache.tag."
# LMCache's multiprocess connector reads it, its in-process one does not.
UNSERVED = "lmcache.max_offload_tokens"
# Names as they are shown, by what they begin with after "lmcache.".
_SERVED = {"skip_save": SKIP_SAVE, "tag": f"{TAG}NAME"}
# As in JSON, or as a string; True == 1 and False == 0.
_SWITCH: dict[int | str, bool] = {
    **{"true": True, "1": True, True: True},
    **{"false": False, "0": False, False: False},
}
# Clients choose names: so many are warned of, of tags and of unknown names each.
MOST_NAMES = 20
# Characters of a name or value that are logged.
SHOWN = 60


@dataclass(frozen=True)
class RequestConfigs:
    """What a request asks for.

    Attributes:
        tags: (name, value) pairs of its namespace, in order; None where a value is no tag, so
            that the request must not be cached.
        skip_save: whether nothing of it is stored.
    """

    tags: tuple[tuple[str, str], ...] | None = ()
    skip_save: bool = False


NONE = RequestConfigs()


class RequestConfigsReader:
    """Reads each request once, and warns once of each mistake. Of the scheduler's thread."""

    def __init__(self) -> None:
        from lmcache.integration.vllm.utils import extract_request_configs_from_request

        self._extract = extract_request_configs_from_request
        # What was warned of, by kind of mistake.
        self._warned: dict[str, set[str]] = {}

    def read(self, request: "Request") -> RequestConfigs:
        """Read a request. A value that is none is the safer one: not stored, or not cached."""
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
            elif name == UNSERVED:
                if self._is_first("unserved", name):
                    logger.warning(
                        "%s of a request does nothing here: only LMCache's multiprocess connector "
                        "reads it. Set %s to true in requests that must not be stored.",
                        UNSERVED,
                        SKIP_SAVE,
                    )
            elif self._is_first("unknown", name):
                logger.warning(
                    "%s of a request is no setting that LMCache knows, and is ignored; %s",
                    _shown_name(name),
                    _instead_of(name),
                )
        return RequestConfigs(None if tags is None else tuple(tags), skip_save)

    def _switch(self, name: str, value: Any) -> bool:
        if value is None:  # JSON's null, which LMCache takes for false
            return False
        known = value.strip().lower() if isinstance(value, str) else value
        if isinstance(known, (int, str)) and known in _SWITCH:
            return _SWITCH[known]
        if self._is_first("switch", name):
            logger.warning(
                "%s=%s of a request is neither true nor false; write one of them. Requests with "
                "such a value are not stored.",
                name,
                _shown(value),
            )
        return True

    def _tag(self, name: str, value: Any) -> str | None:
        """A tag's value as it stands in LMCache's names of records; None where it is none.

        There 7 and "7" are one. A float or a boolean has more than one spelling, and is no tag.
        """
        if type(value) is int:
            value = str(value)
        if isinstance(value, str) and _is_plain(name) and _is_plain(value):
            return value
        if self._is_first("tag", name):
            logger.warning(
                "%s=%s of a request is no tag of LMCache's; write a printable string without '@' "
                "and '%%', or a whole number. Requests with such a tag are not cached.",
                _shown_name(name),
                _shown(value),
            )
        return None

    def _is_first(self, kind: str, name: str) -> bool:
        """Whether to warn of a name; says so once where it is one too many of its kind."""
        warned, name = self._warned.setdefault(kind, set()), name[:SHOWN]
        if name in warned or len(warned) > MOST_NAMES:
            return False
        warned.add(name)
        if len(warned) > MOST_NAMES:
            logger.warning("Requests name more wrong settings of LMCache than are logged here.")
        return len(warned) <= MOST_NAMES


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set("@%") & set(text)


def _instead_of(name: str) -> str:
    begins = name[:SHOWN].removeprefix("lmcache.").partition(".")[0]
    if near := difflib.get_close_matches(begins.lower(), _SERVED, 1):
        return f"did you mean {_SERVED[near[0]]}?"
    return f"those of a request are {' and '.join(_SERVED.values())}."


def _shown(value: Any) -> str:
    """What a client wrote, on one line and cut to what the log can bear."""
    return repr(value)[: 2 * SHOWN]


def _shown_name(name: str) -> str:
    return _shown(name[:SHOWN])[1:-1]
