# SPDX-License-Identifier: Apache-2.0
"""Which records of a folder go, how many, and who deletes them."""

from tests.mutants.defect import always, each_of, gone

MISTAKES = {
    "lmcache_hybrid/storage/folder/cleaner.py": {
        "of several stores in folders only one is cleaned": (
            "        for _, folders in shared_folders(config):\n",
            "        for _, folders in shared_folders(config)[:1]:\n",
        ),
        "each file of another user's is told of": gone("            self._told = True\n"),
        "one user's engine keeps those of others from cleaning": (
            "        if done.kept_bytes:\n",
            "        if done.kept_bytes < 0:\n",
        ),
        "files that may not be deleted keep a folder over its limit": (
            "        except PermissionError:\n            done.kept_bytes += file.taken\n",
            "        except PermissionError:\n",
        ),
        "what a killed engine had begun to write stays": (
            "            if file.unfinished:\n",
            "            if not file.path:\n",
        ),
        "without limits nobody looks for what a killed engine left": (
            "        if not self._limits:\n            return True\n",
            "        if not self._limits:\n            return False\n",
        ),
        "a file of another user's ends a round of the cleaner": (
            "        except PermissionError:",
            "        except NotADirectoryError:",
        ),
        "the limit of a folder is not looked at": (
            "        if limit is None or left <= limit:\n",
            "        if limit is None or left:\n",
        ),
        "a folder within its limit is cleaned": (
            "        if limit is None or left <= limit:\n",
            "        if limit is None:\n",
        ),
        "what went by age is deleted by size once more": (
            "done.found - done.deleted_bytes - done.kept_bytes\n        if",
            "done.found - done.kept_bytes\n        if",
        ),
        "a folder is looked through every minute": (
            "        if self._skip < 0:\n            return True\n",
            "        if self._skip < SKIPPED_ROUNDS:\n            return True\n",
        ),
        "what other programs delete hides for ever what engines write": (
            "        self._skip -= 1\n",
            "        self._skip -= self._skip < 1\n",
        ),
        "a wrong clock empties a folder in one round": (
            "        return self.deleted >= MOST_DELETED\n",
            "        return self.deleted >= MOST_DELETED << 30\n",
        ),
        "a wrong clock empties a folder in rounds without a pause": (
            "                self._closing.wait(self._pause)\n",
            "                not self._skip or self._closing.wait(self._pause)\n",
        ),
        "a folder that was away is not cleaned any more": (
            "                    error,\n                )\n            self._lock.release()\n",
            "                    error,\n                )\n            raise\n",
        ),
    },
    "lmcache_hybrid/storage/folder/record_files.py": {
        "another user's files cost this one's records": (
            "foreign = not deletes_all and status.st_uid != os.geteuid()",
            "foreign = False",
        ),
        "foreign files are deleted": (
            "            if key_of(file.name, *wanted) is None and not is_temporary(file.name):\n",
            "            if not file.name.endswith(wanted):\n",
        ),
        "links and pipes of a record's name are deleted": (
            "            if stat.S_ISREG(status.st_mode):\n",
            "            if not stat.S_ISDIR(status.st_mode):\n",
        ),
        "files that are being written are deleted": (
            "        return young and self.path.endswith(TEMPORARY)\n",
            "        return young and self.path.endswith(DATA + TEMPORARY)\n",
        ),
    },
    "lmcache_hybrid/storage/folder/lock_file.py": {
        "a private file that is linked to is opened for the group": (
            " or status.st_nlink > 1:\n",
            ":\n",
        ),
        "a lock file of another user's is made anew and refused": (
            "            number = os.open(self._path, flags | os.O_RDONLY)\n",
            "            raise\n",
        ),
        "who may lock is not who may read": (
            "            number = os.open(self._path, flags, MODE)\n",
            "            number = os.open(self._path, flags, 0o600)\n",
        ),
        "two processes clean one folder at once": (
            "fcntl.LOCK_EX | fcntl.LOCK_NB)\n            # Somebody",
            "fcntl.LOCK_SH | fcntl.LOCK_NB)\n            # Somebody",
        ),
        "a lock file that was deleted still counts": (
            "            return os.path.samestat(os.fstat(number), os.lstat(self._path))\n"
            "        except FileNotFoundError:\n            return False\n",
            "            return os.path.samestat(os.fstat(number), os.lstat(self._path))\n"
            "        except FileNotFoundError:\n            return True\n",
        ),
    },
    "lmcache_hybrid/storage/folder/least_used.py": {
        "the newest records go first": (
            "return int(record.used // MINUTE)",
            "return -int(record.used // MINUTE)",
        ),
        "of a prompt the beginning goes first": (
            "return -header.boundary, -header.kind",
            "return header.boundary, -header.kind",
        ),
        "at one boundary the page goes before the state": (
            "return -header.boundary, -header.kind",
            "return -header.boundary, header.kind",
        ),
        "all records of the last minute go": (
            "        elif used == minute and its == depth and rest > 0:\n",
            "        elif used == minute:\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/remote.py": {
        "a hit is not marked": (
            "            self._connector.used(keys)\n",
            "            self._connector.used(keys[:0])\n",
        ),
    },
    "lmcache_hybrid/storage/folder/file_uses.py": {
        "every hit writes to the folder": always("            if key not in self._marked:\n"),
        "a hit is marked once and never again": (
            "        if minute != self._minute:\n",
            "        if not self._minute:\n",
        ),
    },
    "lmcache_hybrid/config/folders.py": {
        "a limit of gigabytes is one of bytes": (
            "max(1, int(size * (1 << 30)))",
            "max(1, int(size))",
        ),
        "a limit of a folder is taken for a Redis": (
            "    if limits and not shared_folders(config):\n",
            "    if limits and config.remote_url is None:\n",
        ),
    },
    "lmcache_hybrid/tools/cli/purge.py": {
        "a purge down to a size counts only what meets its other conditions": (
            "show(map(judge, store.entries())))",
            "show(self._meeting(store)))",
        ),
        "a purge down to a size takes what is being written": (
            "if v.status != Status.UNFINISHED)",
            "if v.status != Status.GONE)",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
