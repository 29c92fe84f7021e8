# SPDX-License-Identifier: Apache-2.0
"""Which records of a folder go, how many, and who deletes them."""

from tests.mutants.defect import one

CLEANER = "lmcache_hybrid/storage/folder/cleaner.py"
LEAST_USED = "lmcache_hybrid/storage/folder/least_used.py"
FILES = "lmcache_hybrid/storage/folder/record_files.py"
LOCK = "lmcache_hybrid/storage/folder/folder_lock.py"
USES = "lmcache_hybrid/storage/folder/file_uses.py"
PURGE = "lmcache_hybrid/tools/cli/purge.py"
LIMITS = "lmcache_hybrid/config/folders.py"

DEFECTS = (
    one(
        "of several stores in folders only one is cleaned",
        CLEANER,
        "        for _, folders in shared_folders(config):\n",
        "        for _, folders in shared_folders(config)[:1]:\n",
    ),
    one(
        "another user's files cost this one's records",
        FILES,
        "foreign = not deletes_all and status.st_uid != os.geteuid()",
        "foreign = False",
    ),
    one(
        "each file of another user's is told of",
        CLEANER,
        "            self._told = True\n",
        "",
    ),
    one(
        "one user's engine keeps those of others from cleaning",
        CLEANER,
        "        if done.kept_bytes:\n",
        "        if done.kept_bytes < 0:\n",
    ),
    one(
        "files that may not be deleted keep a folder over its limit",
        CLEANER,
        "        except PermissionError:\n            done.kept_bytes += file.taken\n",
        "        except PermissionError:\n",
    ),
    one(
        "a private file that is linked to is opened for the group",
        LOCK,
        " or status.st_nlink > 1:\n",
        ":\n",
    ),
    one(
        "a lock file of another user's is made anew and refused",
        LOCK,
        "            number = os.open(self._path, flags | os.O_RDONLY)\n",
        "            raise\n",
    ),
    one(
        "who may lock is not who may read",
        LOCK,
        "            number = os.open(self._path, flags, MODE)\n",
        "            number = os.open(self._path, flags, 0o600)\n",
    ),
    one(
        "what a killed engine had begun to write stays",
        CLEANER,
        "            if file.unfinished:\n",
        "            if not file.path:\n",
    ),
    one(
        "without limits nobody looks for what a killed engine left",
        CLEANER,
        "        if not self._limits:\n            return True\n",
        "        if not self._limits:\n            return False\n",
    ),
    one(
        "a file of another user's ends a round of the cleaner",
        CLEANER,
        "        except PermissionError:",
        "        except NotADirectoryError:",
    ),
    one(
        "the newest records go first",
        LEAST_USED,
        "return int(record.used // MINUTE)",
        "return -int(record.used // MINUTE)",
    ),
    one(
        "of a prompt the beginning goes first",
        LEAST_USED,
        "return -header.boundary, -header.kind",
        "return header.boundary, -header.kind",
    ),
    one(
        "at one boundary the page goes before the state",
        LEAST_USED,
        "return -header.boundary, -header.kind",
        "return -header.boundary, header.kind",
    ),
    one(
        "all records of the last minute go",
        LEAST_USED,
        "        elif used == minute and its == depth and rest > 0:\n",
        "        elif used == minute:\n",
    ),
    one(
        "the limit of a folder is not looked at",
        CLEANER,
        "        if limit is None or left <= limit:\n",
        "        if limit is None or left:\n",
    ),
    one(
        "a folder within its limit is cleaned",
        CLEANER,
        "        if limit is None or left <= limit:\n",
        "        if limit is None:\n",
    ),
    one(
        "what went by age is deleted by size once more",
        CLEANER,
        "done.found - done.deleted_bytes - done.kept_bytes\n        if",
        "done.found - done.kept_bytes\n        if",
    ),
    one(
        "foreign files are deleted",
        FILES,
        "            if key_of(file.name, *wanted) is None and not is_temporary(file.name):\n",
        "            if not file.name.endswith(wanted):\n",
    ),
    one(
        "links and pipes of a record's name are deleted",
        FILES,
        "            if stat.S_ISREG(status.st_mode):\n",
        "            if not stat.S_ISDIR(status.st_mode):\n",
    ),
    one(
        "files that are being written are deleted",
        FILES,
        "        return young and self.path.endswith(TEMPORARY)\n",
        "        return young and self.path.endswith(DATA + TEMPORARY)\n",
    ),
    one(
        "two processes clean one folder at once",
        LOCK,
        "fcntl.LOCK_EX | fcntl.LOCK_NB)\n            # Somebody",
        "fcntl.LOCK_SH | fcntl.LOCK_NB)\n            # Somebody",
    ),
    one(
        "a lock file that was deleted still counts",
        LOCK,
        "            return os.path.samestat(os.fstat(number), os.lstat(self._path))\n"
        "        except FileNotFoundError:\n            return False\n",
        "            return os.path.samestat(os.fstat(number), os.lstat(self._path))\n"
        "        except FileNotFoundError:\n            return True\n",
    ),
    one(
        "a folder is looked through every minute",
        CLEANER,
        "        if self._skip < 0:\n            return True\n",
        "        if self._skip < SKIPPED_ROUNDS:\n            return True\n",
    ),
    one(
        "what other programs delete hides for ever what engines write",
        CLEANER,
        "        self._skip -= 1\n",
        "        self._skip -= self._skip < 1\n",
    ),
    one(
        "a wrong clock empties a folder in one round",
        CLEANER,
        "        return self.deleted >= MOST_DELETED\n",
        "        return self.deleted >= MOST_DELETED << 30\n",
    ),
    one(
        "a wrong clock empties a folder in rounds without a pause",
        CLEANER,
        "                self._closing.wait(self._pause)\n",
        "                not self._skip or self._closing.wait(self._pause)\n",
    ),
    one(
        "a folder that was away is not cleaned any more",
        CLEANER,
        "                    error,\n                )\n            self._lock.release()\n",
        "                    error,\n                )\n            raise\n",
    ),
    one(
        "a hit is not marked",
        "lmcache_hybrid/storage/tiers/remote.py",
        "            self._connector.used(keys)\n",
        "            self._connector.used(keys[:0])\n",
    ),
    one(
        "every hit writes to the folder",
        USES,
        "            if key not in self._marked:\n",
        "            if True:\n",
    ),
    one(
        "a hit is marked once and never again",
        USES,
        "        if minute != self._minute:\n",
        "        if not self._minute:\n",
    ),
    one(
        "a limit of gigabytes is one of bytes",
        LIMITS,
        "max(1, int(size * (1 << 30)))",
        "max(1, int(size))",
    ),
    one(
        "a limit of a folder is taken for a Redis",
        LIMITS,
        "    if limits and not shared_folders(config):\n",
        "    if limits and config.remote_url is None:\n",
    ),
    one(
        "a purge down to a size counts only what meets its other conditions",
        PURGE,
        "show(map(judge, store.entries())))",
        "show(self._meeting(store)))",
    ),
    one(
        "a purge down to a size takes what is being written",
        PURGE,
        "if v.status != Status.UNFINISHED)",
        "if v.status != Status.GONE)",
    ),
)
