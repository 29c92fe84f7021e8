# SPDX-License-Identifier: Apache-2.0
"""Several folders of ``local_disk``, and whose they are."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/storage/disk/backend.py": {
        "what lies in the other folders of local_disk is forgotten": (
            "        folders = _different(self.path, *folders)\n",
            "        folders = [self.path]\n",
        ),
        "a folder that the list names twice counts twice": (
            "        folders = _different(self.path, *folders)\n",
            "        folders = [self.path, *folders]\n",
        ),
        "a record elsewhere is read where it is not": (
            "DiskCacheMetadata(file.path, file.size, ",
            "DiskCacheMetadata(self.path_of(key), file.size, ",
        ),
        "a second file of a record counts nowhere": gone(
            "            if key in self.dict:\n                return False\n"
        ),
    },
    "lmcache_hybrid/storage/disk/limited_index.py": {
        "a full disk evicts records from another one": (
            "if entry.path in but] if but else []",
            "if not but] if but else []",
        ),
        "what stays on another disk can never be evicted again": (
            "            entry.unpin()\n",
            "            entry.is_pinned\n",
        ),
    },
    "lmcache_hybrid/storage/disk/other_files.py": {
        "a full disk evicts other files from another one": (
            "(path for path in self.strangers if path not in but)",
            "(path for path in self.strangers)",
        ),
    },
    "lmcache_hybrid/config/folders.py": {
        "a trusted owner's folder may be written to by anybody": never(
            "        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n"
        ),
        "a trusted owner's folder may be written to by its group": (
            "        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n",
            "        if status.st_mode & stat.S_IWOTH:\n",
        ),
        "whoever owns a folder is trusted once somebody is": (
            "        if status.st_uid != trusted:\n",
            "        if trusted is None:\n",
        ),
        "folders of data-parallel engines have no trusted owner": (
            '        check_folder("local_disk", folder, trusted_owner(config))\n',
            '        check_folder("local_disk", folder)\n',
        ),
    },
    "lmcache_hybrid/config/lmcache_config.py": {
        "the trusted owner is not told to whoever checks folders": (
            "    config._hybrid_trusted_owner = own_options.",
            "    own_options.",
        ),
        "folders of plugins and URLs have no trusted owner": (
            "            check_folder(option, folder, trusted_owner(config))\n",
            "            check_folder(option, folder)\n",
        ),
    },
    "lmcache_hybrid/config/own_options.py": {
        "a trusted owner who is no user is nobody": (
            "    except (KeyError, ValueError):\n",
            "    except (KeyError, ValueError):\n        return -1\n    except ArithmeticError:\n",
        ),
    },
    "lmcache_hybrid/storage/tiers/disk.py": {
        "a second engine in a folder of local_disk is not told": passes(
            "            self._warn_of_others()\n"
        ),
        "each rank of an engine takes the others for another engine": (
            "        if opening.metadata.worker_id == 0 and",
            "        if",
        ),
        "an engine that ends keeps its folder": passes("        self._use.release()\n"),
    },
    "lmcache_hybrid/tools/doctor/backends.py": {
        "the doctor locks a folder as its engine does": (", visit=True)", ")"),
    },
    "lmcache_hybrid/storage/folder/folder_use.py": {
        "the doctor creates a lock on NFS that the engine's user may not write": (
            "        return FolderLock(folder, ENGINE_LOCK).is_held()\n",
            "        return not FolderLock(folder, ENGINE_LOCK).hold()\n",
        ),
        "the doctor does not see on NFS that an engine uses a folder": (
            "        return FolderLock(folder, ENGINE_LOCK).is_held()\n",
            "        return False\n",
        ),
        "on NFS nobody is told of another engine": (
            "            return self._file.hold()\n",
            "            return True\n",
        ),
        "an engine that starts again is not told of the one that stayed": passes(
            "            _share(number)\n"
        ),
        "a forked child keeps the folder of an engine that has ended": (
            "            fcntl.flock(number, fcntl.LOCK_UN)",
            "            pass",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
