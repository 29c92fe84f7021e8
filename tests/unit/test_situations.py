# SPDX-License-Identifier: Apache-2.0
"""The table of what users set; tests/e2e/test_situations.py tries its rows on engines."""

from collections import Counter

from tests.situations import PAGE, situations, written


def test_the_page_has_the_rows() -> None:
    """``python -m tests.situations`` writes them."""
    page = PAGE.read_text()
    assert page == written(page)


def test_each_row_says_what_it_must() -> None:
    rows = situations()
    assert [title for title, times in Counter(row.set for row in rows).items() if times > 1] == []
    for row in rows:
        assert row.outcome in ("hits", "refused", "off"), row
        assert row.outcome == "hits" or (row.words and row.fix), row
