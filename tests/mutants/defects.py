# SPDX-License-Identifier: Apache-2.0
"""Defects that the fast tests must find, in the order in which they are planted."""

from tests.mutants.defect import Defect
from tests.mutants.planted import devices, layouts, operation, serving

DEFECTS: tuple[Defect, ...] = (
    *serving.DEFECTS,
    *operation.DEFECTS,
    *layouts.DEFECTS,
    *devices.DEFECTS,
)
