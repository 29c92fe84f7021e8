# SPDX-License-Identifier: Apache-2.0
"""Loads LMCache's configuration for a hybrid model: keeps, sets or refuses each option."""

import copy
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import psutil
from vllm.logger import init_logger

from lmcache_hybrid.config import own_options
from lmcache_hybrid.config.container import memory_limit
from lmcache_hybrid.config.folders import check_folder, file_system_of, trusted_owner
from lmcache_hybrid.config.lmcache_file import CONFIG_FILE
from lmcache_hybrid.config.lmcache_options import EXTRA_OPTIONS, OPTIONS, LMCacheOption
from lmcache_hybrid.config.lmcache_values import (
    Values,
    as_lmcache_reads,
    misspelt,
    problems,
    read_values,
    settle_empty,
    taken_away,
    unasked,
    without_prefix,
)
from lmcache_hybrid.config.other_names import name_as_redis
from lmcache_hybrid.config.own_options import (
    KEY_FILE_KEY,
    LOAD_LIMIT_KEY,
    OWN_OPTIONS,
    OWN_PREFIX,
    TRUSTED_OWNER_KEY,
)
from lmcache_hybrid.config.redis_credentials import (
    PASSWORD_FILE,
    hide_passwords,
    holds_password,
    shown,
    without_secrets,
)
from lmcache_hybrid.config.stores import all_places, check_places, places, shared_folders
from lmcache_hybrid.config.stores.base import folders_in
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.secret_files import read_key
from lmcache_hybrid.upstream.lmcache_home import take

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_hybrid.config.lmcache_config")

DEFAULT_CHUNK_SIZE = 256
STABLE_HASH = "sha256_cbor"
# How LMCache divides the folders of local_disk.
BY_GPU = "by_gpu"
# Keys of LMCache's extra_config.
_NODES_OF_GPUS, _DISK_THREADS = "gpu_to_numa_mapping", "disk_io_threads"
_BUCKETS = "histogram_bucket_"  # and a histogram's name
LAST_PORT = 65535
# Loggers of LMCache that write values while it loads its configuration.
LOGGERS_OF_VALUES = "lmcache.v1.config_base", "lmcache.integration.vllm.utils"


def load_lmcache_config(vllm_config: "VllmConfig", quiet: bool = False) -> "LMCacheEngineConfig":
    """Load LMCache's configuration from file, environment and ``lmcache.*`` extra config.

    Without any, LMCache's default applies: 5 GB in RAM.

    Args:
        quiet: leave out warnings, of a configuration that is loaded again elsewhere.

    Raises:
        ConfigError: the file that CONFIG_FILE names does not exist, or options, LMCache's and this
            package's, do not exist or have bad values: a sentence for each.
    """
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config
    from lmcache.v1.config_base import validate_and_set_config_value

    transfer = vllm_config.kv_transfer_config
    file, transfer_extra = os.environ.get(CONFIG_FILE), transfer.kv_connector_extra_config
    written = read_values(file, os.environ)
    extra = {
        key.removeprefix("lmcache."): (key, value)
        for key, value in transfer_extra.items()
        if key.startswith("lmcache.") and not key.startswith(OWN_PREFIX) and key != LOAD_LIMIT_KEY
    }
    # kv_connector_extra_config wins.
    written = {option: value for option, value in written.items() if option not in extra}
    own = [*without_prefix(transfer_extra), *own_options.problems(transfer_extra, os.environ)]
    if wrong := [*_problems({**written, **extra}, bool(own)), *own]:
        raise ConfigError(*wrong, *_unusable_key(transfer_extra))
    if not quiet:
        moot = taken_away(file, os.environ), unasked(file, os.environ, transfer_extra)
        for sentence in (*chain(*moot), *misspelt(os.environ)):
            logger.warning("%s", sentence)
    try:
        with _as_lmcache_may_log():
            # LMCache has one per process, but the values set here are this engine's.
            config = copy.deepcopy(lmcache_get_or_create_config())
    except (AssertionError, ValueError) as error:
        # LMCache may fail first on what is missing beside an option that is refused here.
        if refused := list(_refused(as_lmcache_reads(written))):
            raise ConfigError(*refused) from error
        raise
    except (AttributeError, TypeError) as error:
        where, url = written.get("remote_config_url", ("", None))
        if url:
            raise ConfigError(
                f"LMCache fails on the answer of the server that {where} names "
                f"({type(error).__name__}); have it answer with a table that has a list 'configs', "
                f"or remove {where}."
            ) from error
        raise ConfigError(
            f"LMCache fails on its configuration ({type(error).__name__}); correct the values of "
            "its file, also those that the environment takes the place of."
        ) from error
    for field, (key, value) in extra.items():
        # LMCache itself warns of a field that does not exist.
        if not validate_and_set_config_value(config, field, value) and hasattr(config, field):
            raise ConfigError(
                f"{key}={value!r} is not a value that LMCache's {field} takes; correct it or "
                "remove it from kv_connector_extra_config."
            )
        # As LMCache does for its file and the environment.
        getattr(config, "_user_set_keys", set()).add(field)
        if holds_password(value) and not quiet:
            logger.warning(
                "%s holds a password, which this machine's users see in the list of processes; "
                "put it into a file and name that in %s (S3: use AWS' own files or variables).",
                key,
                PASSWORD_FILE,
            )
    settle_empty(config)
    _leave_as_written(config, {**written, **extra})
    config._hybrid_trusted_owner = own_options.read_own_options(transfer_extra)[TRUSTED_OWNER_KEY]
    name_as_redis(config)
    hide_passwords(config)
    return config


def _leave_as_written(config: "LMCacheEngineConfig", values: Values) -> None:
    """Undo what LMCache sets beside ``enable_blending`` and ``enable_pd``. Mutates ``config``.

    These are refused; else the message would also blame the user for what LMCache set.
    """
    asked = as_lmcache_reads(values)
    if any(_refused(asked)) and not asked.get("save_unfull_chunk"):
        config.save_unfull_chunk = False


def _problems(values: Values, others: bool) -> Iterator[str]:
    """Yield :func:`.lmcache_values.problems`; where there are any, with options that are refused.

    Args:
        others: whether there are problems of other kinds.
    """
    sound: Values = {}
    for option, value in values.items():
        wrong = list(problems({option: value}))
        yield from wrong
        if not wrong:
            sound[option] = value
    if others or len(sound) < len(values):
        yield from _refused(as_lmcache_reads(sound))


def _unusable_key(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is wrong with a key file whose option is sound, if anything."""
    where, path = own_options.written(extra).get(KEY_FILE_KEY, ("", None))
    try:
        if path is not None:
            read_key(where, OWN_OPTIONS[KEY_FILE_KEY].parse(path))
    except ConfigError as error:
        return error.args
    except ValueError:  # no path, which is told already
        pass
    return ()


@contextmanager
def _as_lmcache_may_log() -> Iterator[None]:
    """Keep warnings of this package's options, and passwords, out of LMCache's log of values."""

    def is_not_ours(record: logging.LogRecord) -> bool:
        unknown = str(record.msg).startswith("Unknown configuration key") and record.args
        return not (isinstance(unknown, tuple) and own_options.is_own(str(unknown[0])))

    def without_passwords(record: logging.LogRecord) -> bool:
        vars(record).update(msg=without_secrets(record.getMessage()), args=())
        return True

    filters = is_not_ours, without_passwords
    loggers = [logging.getLogger(name) for name in LOGGERS_OF_VALUES]
    for theirs in loggers:
        for each in filters:
            theirs.addFilter(each)
    try:
        yield
    finally:
        for theirs in loggers:
            for each in filters:
                theirs.removeFilter(each)


def settle_lmcache_config(config: "LMCacheEngineConfig", block_size: int) -> None:
    """Refuse unsupported options, then set LMCache's chunk size to N. Mutates ``config``.

    Args:
        block_size: N in tokens.

    Raises:
        ConfigError: an option that cannot keep its meaning on a hybrid model.
    """
    if refused := refusals(config, block_size):
        raise ConfigError(*refused)
    _settle_chunk_size(config, block_size)
    moot = [name for name, option in OPTIONS.items() if option.moot]
    for name in moot:
        if getattr(config, name):
            logger.info(
                "Setting LMCache's %s from True to False: loads of a hybrid model are asynchronous "
                "already, beside the running requests.",
                name,
            )
    config.use_layerwise = config.enable_async_loading = False
    config.local_disk_path_sharding = BY_GPU  # LMCache opens no disk without one
    # Of its controller, which is refused; LMCache fails on one that is no rank.
    config.lmcache_worker_ids = None
    if config.numa_mode == "manual":
        # In JSON keys are texts, by which LMCache finds no GPU.
        nodes = config.extra_config[_NODES_OF_GPUS]
        config.extra_config[_NODES_OF_GPUS] = {int(gpu): node for gpu, node in nodes.items()}
    if config.pre_caching_hash_algorithm != STABLE_HASH:
        logger.info(
            "Setting pre_caching_hash_algorithm from %r to %r: keys of a hybrid model come from "
            "vLLM's block hashes, so PYTHONHASHSEED is not needed whatever LMCache says.",
            config.pre_caching_hash_algorithm,
            STABLE_HASH,
        )
        config.pre_caching_hash_algorithm = STABLE_HASH


def refusals(config: "LMCacheEngineConfig", block_size: int | None, ranks: int = 1) -> list[str]:
    """List what :func:`settle_lmcache_config` would refuse, one sentence each.

    Args:
        block_size: N in tokens; None skips the checks that need it.
        ranks: on this machine, each of which takes ``max_local_cpu_size``.
    """
    found: list[str] = []
    for check in _checks(config, block_size, ranks):
        try:
            check()
        except ConfigError as error:
            found += error.args
    return found


def _checks(
    config: "LMCacheEngineConfig", block_size: int | None, ranks: int
) -> Iterator[Callable[[], None]]:
    extra = config.extra_config or {}
    remote = places(config)
    own = {name for place in remote for name in place.kind.own_options}
    for name, option in OPTIONS.items():
        yield partial(_check_option, name, getattr(config, name, None), option)
        yield partial(_check_time, name, getattr(config, name, None), option)
    for name, option in EXTRA_OPTIONS.items():
        if name in extra and name not in own:
            yield partial(_check_option, f"extra_config.{name}", extra[name], option)
            # LMCache's health monitor pings remote stores only.
            if remote:
                yield partial(_check_number, f"extra_config.{name}", extra[name], option)
    yield partial(_check_numa, config)
    yield partial(_check_buckets, config)
    yield partial(_check_api_server, config, ranks)
    yield partial(_check_remote, config)
    yield partial(_check_memory, config, ranks)
    yield partial(_check_disk, config, ranks)
    yield partial(_check_policy, config)
    yield partial(_check_locations, config)
    if block_size is not None:
        yield partial(_check_chunk_size, config, block_size)


def _refused(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each option that is set and refused."""
    extra = values.get("extra_config") or {}
    written = [(name, values.get(name), each) for name, each in OPTIONS.items()]
    given = ((n, each) for n, each in EXTRA_OPTIONS.items() if n in extra)
    written += [(f"extra_config.{n}", extra[n], each) for n, each in given]
    for name, value, option in written:
        if option.refused:
            try:
                _check_option(name, value, option)
            except ConfigError as error:
                yield str(error)


def _check_option(name: str, value: Any, option: LMCacheOption) -> None:
    if option.refused and option.is_set(value):
        raise ConfigError(
            f"LMCache option {name}={shown(value)} does not work on a hybrid model: "
            f"{option.refused}."
        )


def _check_time(name: str, value: Any, option: LMCacheOption) -> None:
    # Written so that NaN is also refused.
    if option.above is not None and (value is None or not value > option.above):
        raise ConfigError(
            f"LMCache option {name}={value!r} leaves no time to wait; set it to a number of "
            f"{option.unit} above {option.above}, or remove it for LMCache's default."
        )
    if option.most is not None and value > option.most:
        raise ConfigError(
            f"LMCache option {name}={value!r} is longer than a timer takes; set it to "
            f"{option.most} {option.unit} or less, or remove it for LMCache's default."
        )


def _check_number(name: str, value: Any, option: LMCacheOption) -> None:
    """Refuse what LMCache would fail on, or never end, where it does not convert the value."""
    if option.unit and not (
        type(value) in (int, float)
        and (option.above is None or value > option.above)
        and (option.least is None or value >= option.least)
        and (option.most is None or value <= option.most)
    ):
        bound = f"above {option.above}" if option.above is not None else f"from {option.least}"
        most = f" to {option.most}" if option.most is not None else ""
        raise ConfigError(
            f"LMCache option {name}={value!r} is not a number of {option.unit} {bound}{most}; "
            "write one without quotes, or remove it for LMCache's default."
        )


def _check_numa(config: "LMCacheEngineConfig") -> None:
    """Refuse a ``numa_mode`` with which LMCache opens no store."""
    mode = config.numa_mode
    if mode not in (None, "auto", "manual"):
        raise ConfigError(
            f"LMCache option numa_mode={mode!r} is not a mode; write auto or manual, or remove it."
        )
    nodes = (config.extra_config or {}).get(_NODES_OF_GPUS)
    known = isinstance(nodes, dict) and all(
        str(gpu).isdecimal() and type(node) is int for gpu, node in nodes.items()
    )
    if mode == "manual" and not (nodes and known):
        raise ConfigError(
            f"LMCache option numa_mode='manual' has extra_config.{_NODES_OF_GPUS}={nodes!r}, which "
            "is no table of NUMA nodes by number of GPU; write one such as {0: 0, 1: 1}, or set "
            "numa_mode to auto."
        )


def _check_buckets(config: "LMCacheEngineConfig") -> None:
    """Refuse bounds of LMCache's histograms with which it does not start."""
    for name, bounds in (config.extra_config or {}).items():
        if not str(name).startswith(_BUCKETS) or bounds is None:
            continue
        try:  # as prometheus_client reads them
            read = [float(bound) for bound in bounds] if isinstance(bounds, (list, tuple)) else []
        except (TypeError, ValueError, OverflowError):
            read = []
        if read != sorted(read) or not any(map(math.isfinite, read)):
            raise ConfigError(
                f"LMCache option extra_config.{name}={bounds!r} is no list of rising numbers; "
                "write one such as [0.1, 0.5, 1], or remove it for LMCache's default."
            )


def _check_api_server(config: "LMCacheEngineConfig", ranks: int) -> None:
    """Refuse a first port of LMCache's internal API server with which one of them has none."""
    first = config.internal_api_server_port_start
    by_port = not config.internal_api_server_socket_path_prefix
    # LMCache adds nothing for the scheduler, 1 for rank 0, and so on.
    listed = config.internal_api_server_include_index_list or range(ranks + 1)
    last = LAST_PORT - max((index for index in listed if index <= ranks), default=0)
    if config.internal_api_server_enabled and by_port and not 0 < first <= last:
        raise ConfigError(
            f"LMCache option internal_api_server_port_start={first} is no port, or leaves too few "
            f"for the ranks; set it to a number from 1 to {last}, or remove it for LMCache's "
            "default."
        )


def _check_chunk_size(config: "LMCacheEngineConfig", block_size: int) -> None:
    chosen = config.chunk_size
    if chosen != DEFAULT_CHUNK_SIZE and chosen % block_size:
        raise ConfigError(
            f"LMCache option chunk_size={chosen} is not a multiple of this model's block size "
            f"{block_size}; remove it, or set it to {block_size}."
        )


def _settle_chunk_size(config: "LMCacheEngineConfig", block_size: int) -> None:
    if config.chunk_size != block_size:
        logger.info(
            "Setting LMCache's chunk_size from %d to the block size %d.",
            config.chunk_size,
            block_size,
        )
        config.chunk_size = block_size


def _check_policy(config: "LMCacheEngineConfig") -> None:
    known = take("v1.storage_backend.cache_policy", "POLICY_MAPPING")
    if str(config.cache_policy).upper() not in known:
        raise ConfigError(
            f"LMCache option cache_policy={config.cache_policy!r} is none of {', '.join(known)}; "
            "use one of them, or remove it for the one of this package."
        )


def _check_locations(config: "LMCacheEngineConfig") -> None:
    """Refuse a store_location, or only retrieve_locations, that keep no records."""
    backends, wrong = [place.backend for place in all_places(config)], {}
    if config.store_location and config.store_location not in backends:
        wrong["store_location"] = config.store_location
    # A missing one is harmless beside others: it is not asked.
    if config.retrieve_locations and not any(n in backends for n in config.retrieve_locations):
        wrong["retrieve_locations"] = config.retrieve_locations
    for option, value in wrong.items():
        raise ConfigError(
            f"LMCache option {option}={shown(value)} names no backend that keeps records here; "
            + (f"use {' or '.join(backends)}, or remove it." if backends else "remove it.")
        )


def _check_remote(config: "LMCacheEngineConfig") -> None:
    if (config.remote_url or config.remote_storage_plugins) and config.remote_serde is None:
        raise ConfigError(
            "LMCache option remote_serde=None opens no remote store; remove it, or write naive."
        )
    check_places(config)
    for option, folders in shared_folders(config):
        for folder in folders:
            check_folder(option, folder, trusted_owner(config))


def memory_of_the_machine(limit: float = math.inf) -> float:
    """Return the bytes of memory and swap space, or a container's ``limit`` if that is less.

    inf where neither is known. A container is normally given no swap space.
    """
    try:
        memory = psutil.virtual_memory().total
        return limit if limit < memory else float(memory + psutil.swap_memory().total)
    except (OSError, KeyError):  # no file descriptor left, or a /proc without some of it
        return limit


def _check_memory(config: "LMCacheEngineConfig", ranks: int) -> None:
    if config.max_local_cpu_size <= 0:
        raise ConfigError(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} leaves no memory to "
            "copy through; set it to a few GB."
        )
    # Huge pages are set aside for the machine, and do not count as the container's memory.
    limit = math.inf if config.local_cpu_use_hugepages else memory_limit()
    taken, whole = config.max_local_cpu_size * (1 << 30), memory_of_the_machine(limit)
    if ranks * taken > whole:
        each = "each rank" if ranks == 1 else f"each of {ranks} ranks"
        raise ConfigError(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} takes "
            f"{taken / 1e9:.1f} GB on {each}, more than the {whole / 1e9:.1f} GB that this "
            "machine or its container has; set it to less."
        )
    _check_disk_in_memory(config, ranks, ranks * taken, whole)


def _check_disk_in_memory(
    config: "LMCacheEngineConfig", ranks: int, taken: float, whole: float
) -> None:
    """Count files that lie in memory, as far as their file system lets them grow.

    Args:
        taken: bytes of all pools.
        whole: bytes of memory.
    """
    written = config.local_disk.split(",") if config.local_disk else ()
    named = [os.path.abspath(each.strip()) for each in written]
    # The last part of a path is made later, see check_folder.
    there = {each: each if os.path.isdir(each) else os.path.dirname(each) for each in named}
    kinds = {each: file_system_of(at) for each, at in there.items() if os.path.isdir(at)}
    in_memory = [each for each, kind in kinds.items() if kind in ("tmpfs", "ramfs")]
    # A total of 0 is no limit.
    places = [there[each] for each in in_memory]
    sizes = {os.stat(at).st_dev: shutil.disk_usage(at).total for at in places}
    room = sum(size or math.inf for size in sizes.values())
    files = min(room, ranks * (config.max_local_disk_size or 0) * (1 << 30))
    if taken + files > whole:
        raise ConfigError(
            f"LMCache option local_disk={in_memory[0]!r} is memory ({kinds[in_memory[0]]}), and "
            f"may grow to {files / 1e9:.1f} GB beside the {taken / 1e9:.1f} GB of "
            f"max_local_cpu_size, more than the {whole / 1e9:.1f} GB that this machine or its "
            f"container has; choose a disk, or set max_local_disk_size to less."
        )


def _check_disk(config: "LMCacheEngineConfig", ranks: int) -> None:
    if not config.local_disk:
        return
    if not (config.max_local_disk_size or 0) > 0:
        raise ConfigError(
            f"LMCache option max_local_disk_size={config.max_local_disk_size} turns local_disk "
            "off; set it to the GB you want to use."
        )
    if (sharding := config.local_disk_path_sharding) not in (None, BY_GPU):
        raise ConfigError(
            f"LMCache option local_disk_path_sharding={sharding!r} is none that LMCache knows; "
            f"write {BY_GPU}, or remove it."
        )
    threads = (config.extra_config or {}).get(_DISK_THREADS, 1)
    if type(threads) is not int or threads < 1:
        raise ConfigError(
            f"LMCache option extra_config.{_DISK_THREADS}={threads!r} is no number of threads for "
            "local_disk; write a whole number from 1 without quotes, or remove it."
        )
    folders = folders_in("LMCache option local_disk", config.local_disk)
    for folder in folders:
        check_folder("local_disk", folder, trusted_owner(config))
    disks = {os.stat(folder).st_dev: shutil.disk_usage(folder).total for folder in folders}
    there, wanted = sum(disks.values()), ranks * config.max_local_disk_size * (1 << 30)
    if wanted > there:
        logger.warning_once(
            "LMCache option max_local_disk_size=%s takes up to %.1f GB (%d ranks), more than the "
            "%.1f GB of the disk: it will be filled to its end, also for others. Set it to less.",
            config.max_local_disk_size,
            wanted / 1e9,
            ranks,
            there / 1e9,
        )
