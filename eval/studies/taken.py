"""Runs that another study has made, on this machine or on another one, taken over instead of repeated.

Comes after `outcomes`, before `report`. So several machines share the seeds of a study, and two
studies share an arm.
"""

import json
from collections.abc import Sequence

from eval.studies.analysis import StudyResult
from eval.studies.outcomes import TAKEN_FILE, TakenRun
from eval.studies.runs import StudyRun
from eval.studies.scheduler import mark_complete
from moe.files import write_text
from moe.parsing import to_json


def take_runs(runs: Sequence[StudyRun], result: StudyResult) -> list[StudyRun]:
    """Takes over what another study's runs of the same settings came to, and returns these runs.

    The settings are all but the text: it is for the user to know that both studies read the same.
    A run that has begun here goes on here.

    Args:
        runs: The runs of this study.
        result: The result of the other study.
    """
    outcomes = {}
    for outcome in result.outcomes:
        if outcome.digest:
            outcomes[outcome.digest] = outcome

    taken = []
    for run in runs:
        if run.digest not in outcomes or run.folder.exists():
            continue
        outcome = outcomes[run.digest]
        size = result.sizes.get(outcome.arm)

        # The names are this study's; whoever took it before says where it is from.
        source = outcome.taken_from or result.command
        outcome = outcome._replace(arm=run.arm, value=run.value, taken_from=source)
        content = json.dumps(to_json(TakenRun(outcome, size)), indent=1)
        write_text(run.folder / TAKEN_FILE, content + "\n")
        mark_complete(
            run,
            has_diverged=outcome.has_diverged,
            seconds=outcome.seconds,
            cpu_seconds=outcome.cpu_seconds,
        )
        taken.append(run)
    return taken
