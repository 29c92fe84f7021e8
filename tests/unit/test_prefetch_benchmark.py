# SPDX-License-Identifier: Apache-2.0
"""The table of first tokens after a prefetch; its engines are those of benchmarks.performance."""

import json

from benchmarks.prefetch import __main__ as prefetch


def test_the_page_gets_medians_and_the_median_of_quotients(tmp_path):
    (tmp_path / "generated").mkdir()
    out = tmp_path / "generated" / "prefetch.json"
    times = {
        "prefetched": [0.1, 0.22, 0.3],
        "from RAM": [0.1, 0.2, 0.4],
        "from the store": [0.5, 0.4, 0.4],
    }
    out.write_text(json.dumps({"seconds": {"disk": times}}))
    page = tmp_path / "steering.md"
    page.write_text("before\n<!-- prefetch:begin -->\nold\n<!-- prefetch:end -->\nafter\n")
    prefetch.main(out, render_only=True)
    text = page.read_text()
    assert "| disk | prefetched | 220.0 | 100.0 to 300.0 | 1.00 |" in text
    assert "| disk | from RAM | 200.0 | 100.0 to 400.0 | 1.00 |" in text
    assert "| disk | from the store | 400.0 | 400.0 to 500.0 | 2.00 |" in text
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
