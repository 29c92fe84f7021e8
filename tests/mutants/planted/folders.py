# SPDX-License-Identifier: Apache-2.0
"""Several folders of ``local_disk``, and whose they are."""

from tests.mutants.defect import Defect, one

DISK = "lmcache_hybrid/storage/disk/backend.py"

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
        "        self.dict[file.key].path = file.path\n",
        "",
    ),
    one(
        "a second file of a record counts nowhere",
        DISK,
        "        if file.key is None or file.key in self.dict:\n",
        "        if file.key is None:\n",
    ),
    one(
        "a full disk evicts records from another one",
        DISK,
        "for key, entry in index.items() if entry.path not in but}",
        "for key, entry in index.items()}",
    ),
    one(
        "a full disk evicts other files from another one",
        DISK,
        "(path for path in self._strangers if path not in but)",
        "(path for path in self._strangers)",
    ),
    one(
        "one record is evicted twice for the same room",
        DISK,
        "        index.pop(candidates[0], None)\n",
        "",
    ),
    one(
        "prompts in the second folder are forgotten",
        "lmcache_hybrid/storage/disk/prompts_file.py",
        "PromptsFile(next(kept, folders[0]), entries)",
        "PromptsFile(folders[0], entries)",
    ),
)
