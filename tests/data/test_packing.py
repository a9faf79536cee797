"""Packing. Oracle: counting what fits by hand; the rows of SeqIO are in tests/conformance."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.packing import fill_row, pack_rows


def test_an_example_that_does_not_fit_on_one_side_closes_the_row_on_both():
    examples = [([7] * 3, [8]), ([7] * 4, [8] * 2), ([7], [8] * 3), ([7] * 2, [8])]
    # Rows of 7 and 5: 3+4 inputs fill the first, though targets have room; the third example then
    # starts a row.
    assert pack_rows(examples, 7, 5) == [[0, 1], [2, 3]]
    # With 3 targets a row, the third example fills its row alone.
    assert pack_rows(examples, 7, 3) == [[0, 1], [2], [3]]


sizes = st.lists(st.tuples(st.integers(1, 11), st.integers(1, 5)), min_size=1, max_size=40)


@settings(max_examples=50)
@given(sizes)
def test_every_example_stands_in_one_row_in_order_and_no_row_overflows(sizes):
    rows = pack_rows([([3] * inputs, [5] * targets) for inputs, targets in sizes], 11, 5)
    assert [index for row in rows for index in row] == list(range(len(sizes)))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        used = np.sum([sizes[index] for index in row], axis=0)
        assert (used <= (11, 5)).all()
        # A row is closed only when the next example would not have fitted.
        if following is not None:
            assert (used + sizes[following[0]] > (11, 5)).any()


def test_segments_are_numbered_from_one_and_padding_is_zero():
    tokens, segments = fill_row([[7, 1], [5, 5, 1]], 7, padding=0)
    assert tokens.tolist() == [7, 1, 5, 5, 1, 0, 0]
    assert segments.tolist() == [1, 1, 2, 2, 2, 0, 0]
