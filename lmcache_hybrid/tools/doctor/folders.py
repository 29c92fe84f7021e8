# SPDX-License-Identifier: Apache-2.0
"""Checks folders that an engine would create, without creating them, and whose folders they are."""

import copy
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_hybrid.config.folders import trusted_owner
from lmcache_hybrid.config.no_hits import relative
from lmcache_hybrid.config.stores import places
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.folder.folder_use import in_use
from lmcache_hybrid.tools.doctor.context import Context
from lmcache_hybrid.tools.doctor.finding import Finding, ok, warning

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

AS_ENGINE = "Run doctor as the engine's user"


def check_folders(context: Context) -> Iterator[Finding]:
    """Report folders that do not exist yet, belong to another user, or are relative."""
    config = context.config or context.written
    for option, folder in _named(config) if config else ():
        path = os.path.abspath(folder)
        if told := relative(option, folder):
            yield warning("folder", f"{told}.", f"Write {path}.")
        if option == "local_disk" and in_use(path):
            yield ok("folder", f"An engine uses {path} now; another one needs its own folder.")
        if os.path.lexists(path):
            yield from _of_another(path, trusted_owner(config))
        elif _takes_files(os.path.dirname(path)):
            yield _missing(path)


def _named(config: "LMCacheEngineConfig") -> Iterator[tuple[str, str]]:
    """Yield (option, folder) as written, without those that are refused."""
    for folder in (config.local_disk or "").split(","):
        if folder.strip():
            yield "local_disk", folder.strip()
    for place in places(config):
        with suppress(ConfigError):
            option, folders = place.kind.folders(place, config) or ("", ())
            for folder in folders:
                yield option, folder


def _takes_files(folder: str) -> bool:
    """Whether it exists, and not only in the kernel (``/proc``): there it is refused already."""
    try:
        return os.path.isdir(folder) and shutil.disk_usage(folder).total > 0
    except OSError:
        return False


def _missing(path: str) -> Finding:
    above, me = os.path.dirname(path), os.geteuid()
    if not os.access(above, os.W_OK | os.X_OK):
        return warning(
            "folder",
            f"{path} does not exist yet, and {_name(me)}, as whom doctor runs, may not create it.",
            f"{AS_ENGINE}, or let that user write to {above}.",
        )
    found = ok(
        "folder",
        f"{path} does not exist yet: the engine creates it, for its own user alone (mode 0700).",
    )
    if me:
        return found
    return replace(found, fix=f"{AS_ENGINE}: root may write to {above} where that user may not.")


def _of_another(path: str, trusted: int | None) -> Iterator[Finding]:
    """Report a folder whose checks say nothing about the engine, which runs as another user."""
    me = os.geteuid()
    try:
        owner = os.stat(path).st_uid
    except OSError:  # a broken link, a folder above that is closed to us: refused already
        return
    # Root's may be shared by a group.
    if owner in (me, trusted) or (owner == 0 and os.access(path, os.W_OK | os.X_OK)):
        return
    yield warning(
        "folder",
        f"{path} belongs to {_name(owner)}, but doctor runs as {_name(me)} and can speak only for "
        "an engine of that user.",
        f"{AS_ENGINE}: sudo -u '#{owner}' lmcache-hybrid doctor, if that is the folder's owner.",
    )


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (user {user})"
    except KeyError:
        return f"user {user}"


@dataclass
class StandIns:
    """Temporary folders beside those that do not exist yet.

    Attributes:
        config: a copy of the configuration, which names them in their place.
    """

    config: "LMCacheEngineConfig"
    _made: dict[str, str] = field(default_factory=dict)

    def sentence(self, text: str) -> str:
        """Put the configured names back into a message."""
        for folder, temporary in self._made.items():
            text = text.replace(temporary, folder)
        return text

    def findings(self, found: Iterable[Finding]) -> Iterator[Finding]:
        for each in found:
            message, fix = self.sentence(each.message), self.sentence(each.fix)
            yield replace(each, message=message, fix=fix)

    def of(self, folder: str) -> str:
        """Return the folder, or the temporary one beside it if it can be created."""
        path = os.path.abspath(folder)
        if folder not in self._made and not os.path.lexists(path):
            # If this fails, the check of the folder itself fails too, and says why.
            with suppress(OSError, ValueError):
                self._made[folder] = tempfile.mkdtemp(
                    prefix=".lmcache-hybrid-doctor-", dir=os.path.dirname(path)
                )
        return self._made.get(folder, folder)

    def remove(self) -> None:
        for temporary in self._made.values():
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def stand_ins(config: "LMCacheEngineConfig") -> Iterator[StandIns]:
    """Put temporary folders in the place of missing ones, which the checks would create.

    They would belong to the user of the doctor, closed to the engine's. Removed at the end.
    """
    made = StandIns(copy.deepcopy(config))
    try:
        _replace(made)
        yield made
    finally:
        made.remove()


def _replace(made: StandIns) -> None:
    config = made.config
    if config.local_disk:
        parts = [part.strip() for part in config.local_disk.split(",")]
        if all(parts):
            config.local_disk = ",".join(map(made.of, parts))
    for place in places(config):
        with suppress(ConfigError):
            option, folders = place.kind.folders(place, config) or ("", ())
            if not folders:
                continue
            named = ",".join(map(made.of, folders))
            if place.plugin:
                config.extra_config[option.removeprefix("extra_config.")] = named
            else:
                scheme, _, rest = place.url.partition("://")
                config.remote_url = f"{scheme}://{rest.partition('/')[0]}{named}"
