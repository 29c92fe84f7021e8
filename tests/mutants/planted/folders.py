# SPDX-License-Identifier: Apache-2.0
"""Several folders of ``local_disk``, and whose they are."""

from tests.mutants.defect import Defect, one

DISK = "lmcache_hybrid/storage/disk/backend.py"
INDEX = "lmcache_hybrid/storage/disk/limited_index.py"
OTHERS = "lmcache_hybrid/storage/disk/other_files.py"
FOLDERS = "lmcache_hybrid/config/folders.py"
OPTIONS = "lmcache_hybrid/config/lmcache_config.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "what lies in the other folders of local_disk is forgotten",
        DISK,
        "        folders = _different(self.path, *folders)\n",
        "        folders = [self.path]\n",
    ),
    one(
        "a folder that the list names twice counts twice",
        DISK,
        "        folders = _different(self.path, *folders)\n",
        "        folders = [self.path, *folders]\n",
    ),
    one(
        "a record elsewhere is read where it is not",
        DISK,
        "DiskCacheMetadata(file.path, file.size, ",
        "DiskCacheMetadata(self.path_of(key), file.size, ",
    ),
    one(
        "a second file of a record counts nowhere",
        DISK,
        "            if key in self.dict:\n                return False\n",
        "",
    ),
    one(
        "a full disk evicts records from another one",
        INDEX,
        "if entry.path in but] if but else []",
        "if not but] if but else []",
    ),
    one(
        "a full disk evicts other files from another one",
        OTHERS,
        "(path for path in self.strangers if path not in but)",
        "(path for path in self.strangers)",
    ),
    one(
        "what stays on another disk can never be evicted again",
        INDEX,
        "            entry.unpin()\n",
        "            entry.is_pinned\n",
    ),
    one(
        "a trusted owner's folder may be written to by anybody",
        FOLDERS,
        "        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n",
        "        if False:\n",
    ),
    one(
        "a trusted owner's folder may be written to by its group",
        FOLDERS,
        "        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n",
        "        if status.st_mode & stat.S_IWOTH:\n",
    ),
    one(
        "whoever owns a folder is trusted once somebody is",
        FOLDERS,
        "        if status.st_uid != trusted:\n",
        "        if trusted is None:\n",
    ),
    one(
        "the trusted owner is not told to whoever checks folders",
        OPTIONS,
        "    config._hybrid_trusted_owner = own_options.",
        "    own_options.",
    ),
    one(
        "a trusted owner who is no user is nobody",
        "lmcache_hybrid/config/own_options.py",
        "    except (KeyError, ValueError):\n",
        "    except (KeyError, ValueError):\n        return -1\n    except ArithmeticError:\n",
    ),
    one(
        "folders of plugins and URLs have no trusted owner",
        OPTIONS,
        "            check_folder(option, folder, trusted_owner(config))\n",
        "            check_folder(option, folder)\n",
    ),
    one(
        "folders of data-parallel engines have no trusted owner",
        "lmcache_hybrid/config/parallel.py",
        '        check_folder("local_disk", folder, trusted_owner(config))\n',
        '        check_folder("local_disk", folder)\n',
    ),
    one(
        "a second engine in a folder of local_disk is not told",
        "lmcache_hybrid/storage/tiers/disk.py",
        "            self._warn_of_others()\n",
        "            pass\n",
    ),
    one(
        "each rank of an engine takes the others for another engine",
        "lmcache_hybrid/storage/tiers/disk.py",
        "        if opening.metadata.worker_id == 0 and",
        "        if",
    ),
    one(
        "the doctor locks a folder as its engine does",
        "lmcache_hybrid/tools/doctor/backends.py",
        ", visit=True)",
        ")",
    ),
    one(
        "the doctor creates a lock on NFS that the engine's user may not write",
        "lmcache_hybrid/storage/folder/folder_use.py",
        "        return FolderLock(folder, ENGINE_LOCK).is_held()\n",
        "        return not FolderLock(folder, ENGINE_LOCK).hold()\n",
    ),
    one(
        "the doctor does not see on NFS that an engine uses a folder",
        "lmcache_hybrid/storage/folder/folder_use.py",
        "        return FolderLock(folder, ENGINE_LOCK).is_held()\n",
        "        return False\n",
    ),
    one(
        "on NFS nobody is told of another engine",
        "lmcache_hybrid/storage/folder/folder_use.py",
        "            return self._file.hold()\n",
        "            return True\n",
    ),
    one(
        "an engine that ends keeps its folder",
        "lmcache_hybrid/storage/tiers/disk.py",
        "        self._use.release()\n",
        "        pass\n",
    ),
    one(
        "an engine that starts again is not told of the one that stayed",
        "lmcache_hybrid/storage/folder/folder_use.py",
        "            _share(number)\n",
        "            pass\n",
    ),
    one(
        "a forked child keeps the folder of an engine that has ended",
        "lmcache_hybrid/storage/folder/folder_use.py",
        "            fcntl.flock(number, fcntl.LOCK_UN)",
        "            pass",
    ),
)
