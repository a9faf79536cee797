"""No malformed input ends in a traceback, a hang, a silent acceptance or damage, whichever door it
comes to.
"""

import pytest

from tests.doors.cases import door_names
from tests.doors.driver import BAD
from tests.doors.trials import outcomes_of


@pytest.mark.slow
@pytest.mark.parametrize("door", door_names())
def test_malformed_input_is_refused_in_clear_words_and_harms_nothing(door, workspace):
    outcomes = outcomes_of(door, workspace)
    wrong = [str(outcome) for outcome in outcomes if outcome.kind in BAD]
    assert not wrong, f"{len(wrong)} of {len(outcomes)} cases:\n" + "\n".join(wrong)
