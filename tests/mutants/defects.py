# SPDX-License-Identifier: Apache-2.0
"""Defects that the fast tests must find, in the order in which they are planted."""

import importlib
import pkgutil

from tests.mutants import planted
from tests.mutants.defect import Defect

# ``DEFECTS`` of every module in planted/.
DEFECTS: tuple[Defect, ...] = tuple(
    defect
    for module in pkgutil.iter_modules(planted.__path__, f"{planted.__name__}.")
    for defect in importlib.import_module(module.name).DEFECTS
)
