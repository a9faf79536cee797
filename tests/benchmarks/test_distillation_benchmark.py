"""The table of the distillation benchmark: the share of a teacher's advantage that students keep."""

import pytest

from benchmarks.surgery.distillation import _rows


@pytest.mark.parametrize(("alone", "retained"), [([5.0, 6.0], 0.5), ([5.0, 3.0], None)])
def test_a_share_is_kept_only_of_an_advantage_with_every_seed(alone, retained):
    losses = {"teacher": [4.0], "alone": alone, "mean, teacher": [4.5, 5.0]}
    _, _, student = _rows(losses, before={"mean, teacher": 7.0})
    assert student["retained"] == retained
