# SPDX-License-Identifier: Apache-2.0
"""What a long benchmark shows on the terminal while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn


@contextmanager
def shown() -> Iterator[Progress]:
    """Bars with what has been done of how much, and for how long."""
    columns = Progress.get_default_columns()[:2]
    with Progress(SpinnerColumn(), *columns, MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        yield progress
