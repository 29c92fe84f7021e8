# SPDX-License-Identifier: Apache-2.0
import ast
from pathlib import Path

import pytest

from tests.mutants.defects import DEFECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_planted_defect_applies_to_this_tree(defect):
    """Its text is there exactly once, and what it leaves is Python."""
    for file, old, new in defect.edits:
        text = (ROOT / file).read_text()
        assert text.count(old) == 1, f"{file} holds {text.count(old)} times {old!r}"
        ast.parse(text.replace(old, new))


def test_names_of_planted_defects_differ():
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))
