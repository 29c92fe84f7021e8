# SPDX-License-Identifier: Apache-2.0
"""States rounded to eight bits, and the table of what that changes."""

import pytest
import torch

from benchmarks.eight_bits import __main__ as eight_bits
from benchmarks.eight_bits.rounding import KINDS, _sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_states_are_near_and_few(dtype):
    state = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    largest = state.float().abs().amax(-1, keepdim=True)
    for name, within in (("int8", 0.5 / 127), ("float8", 0.5 / 14)):
        rounded = KINDS[name](state)
        assert rounded.shape == state.shape
        apart = (rounded - state.float()).abs() / largest
        assert 0 < apart.max() <= 1.001 * within, name
        for row in (rounded / largest).reshape(-1, 64):
            assert len(row.unique()) <= 256


def test_a_row_of_zeros_stays_zeros():
    state = torch.zeros(2, 8)
    state[1] = torch.arange(8)
    for kind in KINDS.values():
        assert not kind(state)[0].any() and kind(state)[1, 7] == 7


def test_sizes_count_a_scale_for_each_row():
    class Layer:
        kv_cache = (torch.zeros(9, 4, 16, dtype=torch.bfloat16), torch.zeros(9, 2, 3, 8))

    assert _sizes({"a": Layer, "b": Layer}) == {
        "exact": 2 * (4 * 16 * 2 + 2 * 3 * 8 * 4),
        "eight bits": 2 * (4 * 16 + 2 * 3 * 8 + 4 * (4 + 2 * 3)),
    }


def test_the_table_counts_changed_tokens():
    asked = {
        "exact": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "int8": [[0.5, 0.1, 0.0], [0.25, 0.3, 1.0]],
    }
    differences = {kind: eight_bits._summary(values) for kind, values in asked.items()}
    sizes = {"exact": 4000, "eight bits": 1100}
    found = {"block_size": 16, "bytes": sizes, "differences": differences}
    text = eight_bits.table({"prompts": 2, "families": {"granite4": found}})
    assert "| granite4 | exact | 4,000 | 0 | 0 | 0 of 2 |" in text
    assert "| granite4 | int8 | 1,100 | 0.5 | 0.2 | 1 of 2 |" in text


def test_a_difference_is_over_all_tokens():
    known = {"1": -0.1, "2": -2.0, "3": -4.0}
    assert eight_bits._difference(known, known) == [0, 0, 0]
    other = {"1": -0.4, "2": -0.2, "3": -4.0}
    assert eight_bits._difference(known, other) == pytest.approx([1.8, 0.7, 1])
