# SPDX-License-Identifier: Apache-2.0
"""Decides whether RAM, a disk or the limit of a folder is too small for a model."""

import math
from typing import TYPE_CHECKING

from lmcache_hybrid.config.own_options import MAX_SIZE_KEY
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.sizes import GIB, KIB, size_text

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_hybrid.config.options import Options

# No record takes more beside its pages and a thousandth of them: header, and padding to 4 KiB.
BESIDE_PAGES = 8 * KIB


def check_sizes(config: "LMCacheEngineConfig", largest: int, block: int, groups: int) -> None:
    """Refuse stores too small for any hit.

    Every copy goes through the CPU pool, which needs room for two records. A hit needs the records
    of one block at least, one for each group.

    Args:
        largest: bytes of the largest group's block.
        block: bytes of one block of all groups.

    Raises:
        ConfigError: ``max_local_cpu_size`` or ``max_local_disk_size`` is too small for this model.
    """
    wrong = []
    if 2 * largest > config.max_local_cpu_size * GIB:
        wrong.append(
            f"LMCache option max_local_cpu_size={config.max_local_cpu_size} is too small: one "
            f"block of this model takes {size_text(largest)}; set it to "
            f"{max(1, round(8 * largest / GIB))} GB or more."
        )
    taken = _taken(block, groups)
    if config.local_disk and 0 < config.max_local_disk_size * GIB < taken:
        wrong.append(
            f"LMCache option max_local_disk_size={config.max_local_disk_size} is too small: the "
            f"records of one block of this model take {size_text(taken)} on each rank, so none "
            f"would be hit there; set it to {math.ceil(1000 * taken / GIB) / 1000} or more, or "
            "remove local_disk."
        )
    if wrong:
        raise ConfigError(*wrong)


def check_folder_limit(options: "Options", block: int, groups: int) -> None:
    """Refuse a limit of shared folders with which the cleaner would delete every record.

    Args:
        block, groups: see :func:`check_sizes`.

    Raises:
        ConfigError: ``lmcache.hybrid_fs_max_size_gb`` is too small for this model.
    """
    limit, taken = options.folder_limits.max_bytes, _taken(block, groups)
    if limit is not None and limit < taken:
        raise ConfigError(
            f"{options.names[MAX_SIZE_KEY]}={limit / GIB:.4g} is too small: the records of one "
            f"block of this model take {size_text(taken)} on each rank, and all would be deleted "
            f"soon; set it to {math.ceil(1000 * taken / GIB) / 1000} or more, or remove it."
        )


def _taken(block: int, groups: int) -> int:
    return block + block // 1000 + groups * BESIDE_PAGES
