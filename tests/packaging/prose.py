# SPDX-License-Identifier: Apache-2.0
"""python -m tests.packaging.prose: proselint over the pages, with the checks that lie beside it.

proselint reads ``.proselintrc.json`` from the folder that it is started in.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    root = HERE.parents[1]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    command = [str(Path(sys.executable).with_name("proselint")), "-o", "compact", "check"]
    return subprocess.run([*command, *map(str, sorted(pages))], cwd=HERE).returncode


if __name__ == "__main__":
    sys.exit(main())
