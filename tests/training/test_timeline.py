"""What the seconds of a run went into, on timelines whose sums can be made by hand."""

import subprocess
import sys
import time

import pytest

from moe import DataError
from moe.commands import goodput as command
from moe.distributed.replica_groups import ReplicaSeconds
from moe.training.timeline import (
    TIMELINE_FILE,
    Timeline,
    TimelineEvent,
    measure_goodput,
    read_timeline,
)
from tests.training.tiny_run import pretrain_arguments, write_inputs


def start(time, step=0):
    return TimelineEvent("start", time, step)


def steps(time, step, num, seconds, **waits):
    return TimelineEvent("steps", time, step, num_steps=num, seconds=seconds, **waits)


def test_a_run_that_nothing_disturbs_has_only_steps_and_what_lies_between_them():
    goodput = measure_goodput(
        [start(100.0), steps(111.0, 5, 5, 10.0, data_wait=1.0), steps(123.0, 10, 5, 10.0)]
    )
    assert (goodput.steps, goodput.starts, goodput.total) == (10, 1, 23.0)
    assert (goodput.useful, goodput.data_wait, goodput.other) == (19.0, 1.0, 3.0)
    assert goodput.share == pytest.approx(19 / 23)


def evaluation(time, step, seconds):
    return TimelineEvent("evaluation", time, step, seconds=seconds)


def test_the_shares_of_evaluations_and_of_waiting_for_batches():
    events = [start(0.0), evaluation(3.0, 0, 2.0), steps(13.0, 5, 5, 10.0, data_wait=0.5)]
    events += [steps(33.0, 15, 10, 10.0, data_wait=1.5), evaluation(40.0, 15, 6.0)]
    goodput = measure_goodput(events)
    assert (goodput.useful, goodput.evaluation, goodput.other) == (18.0, 8.0, 12.0)
    assert goodput.evaluation_share == 8 / 40
    assert goodput.data_wait_share == 2 / 20


def test_all_seconds_from_the_start_of_a_process_to_its_exit_count():
    # Seven seconds of imports and loading, a step, a checkpoint, and five seconds to exit; twice.
    goodput = measure_goodput(
        [
            TimelineEvent("start", 0.0, 0, seconds=7.0),
            steps(10.0, 1, 1, 3.0),
            TimelineEvent("end", 15.0, 1),
            TimelineEvent("start", 20.0, 1, seconds=7.0),
            steps(30.0, 2, 1, 3.0),
            TimelineEvent("end", 34.0, 2),
            TimelineEvent("end", 35.0, 2),
        ]
    )
    assert (goodput.steps, goodput.starts, goodput.total) == (2, 2, 35.0)
    assert (goodput.loading, goodput.useful, goodput.down, goodput.other) == (14.0, 6.0, 5.0, 10.0)
    assert goodput.share == pytest.approx(6 / 35)


def test_a_process_that_starts_before_the_last_one_has_gone_leaves_nobody_waiting():
    goodput = measure_goodput([start(0.0), steps(5.0, 1, 1, 5.0), start(4.0, step=1)])
    assert goodput.down == 0.0


@pytest.mark.slow
def test_the_goodput_of_a_command_is_that_of_all_its_seconds(tmp_path):
    inputs = write_inputs(tmp_path)
    few = ("--training.steps", 2, "--optim.cooldown_steps", 0)
    words = ["-m", "stmoe", "pretrain", *pretrain_arguments(inputs, tmp_path / "run", *few)]
    started = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    seconds = time.monotonic() - started

    events = read_timeline(tmp_path / "run")
    assert [event.event for event in events[-2:]] == ["end", "end"]
    goodput = measure_goodput(events)
    assert 0.5 * seconds < goodput.total < seconds  # Python's own start and end are not in it
    assert goodput.loading > 0
    parts = goodput[goodput._fields.index("useful") :]
    assert sum(parts) + goodput.other == pytest.approx(goodput.total)


def test_shares_of_nothing_are_zero():
    goodput = measure_goodput([start(1.0)])
    assert (goodput.share, goodput.evaluation_share, goodput.data_wait_share) == (0.0, 0.0, 0.0)


def test_steps_behind_the_checkpoint_of_a_restart_are_lost_work():
    # Killed after step 10 with a checkpoint of step 7; twenty seconds until the next start.
    events = [start(0.0), steps(10.0, 5, 5, 10.0), steps(20.0, 10, 5, 10.0)]
    goodput = measure_goodput([*events, start(40.0, step=7), steps(46.0, 10, 3, 6.0)])
    assert (goodput.starts, goodput.down) == (2, 20.0)
    assert goodput.redone == pytest.approx(3 / 5 * 10)
    assert goodput.useful == pytest.approx(10 + 2 / 5 * 10 + 6)
    assert goodput.other == pytest.approx(0)


def test_a_restart_at_the_first_step_takes_all_again_however_often():
    goodput = measure_goodput(
        [start(0.0), steps(5.0, 5, 5, 5.0), start(6.0), steps(8.0, 2, 2, 2.0), start(9.0)]
    )
    assert (goodput.useful, goodput.redone, goodput.down) == (0.0, 7.0, 2.0)


def test_a_replica_group_that_was_healed_has_lost_no_work():
    # Its own checkpoint is of step 0; the others had done 13 steps when it came back.
    healed = steps(18.0, 15, 2, 3.0, healing=1.0, healed=1, lost=0.5)
    goodput = measure_goodput([start(0.0), steps(10.0, 10, 10, 10.0), start(15.0), healed])
    assert (goodput.useful, goodput.redone) == (12.0, 0.0)
    assert (goodput.healing, goodput.lost, goodput.down) == (1.0, 0.5, 5.0)


def test_a_group_that_evaluates_before_it_is_healed_has_lost_no_work():
    events = [start(0.0), evaluation(1.0, 0, 1.0), steps(11.0, 10, 10, 10.0)]
    events += [start(15.0), evaluation(16.0, 0, 1.0)]
    goodput = measure_goodput([*events, steps(19.0, 15, 2, 3.0, healing=1.0, healed=1)])
    assert (goodput.useful, goodput.redone, goodput.evaluation) == (12.0, 0.0, 2.0)


def test_a_timeline_grows_over_the_processes_of_a_run_and_outlives_torn_lines(tmp_path, capsys):
    timeline = Timeline(tmp_path / TIMELINE_FILE, 0)
    timeline.count_step(0.25, 0.125)
    timeline.count_step(0.5, 0.0)
    timeline.write(2, ReplicaSeconds(meeting=0.0625))
    timeline.write_evaluation(2, 0.375)
    timeline.end()
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('{"event": "steps", "time"')
    Timeline(tmp_path / TIMELINE_FILE, 1)
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('{"event": "ste')

    events = read_timeline(tmp_path)
    kinds = ["start", "steps", "evaluation", "end", "start"]
    assert [event.event for event in events] == kinds
    assert [event.step for event in events] == [0, 2, 2, 2, 1]
    assert events[1][3:7] == (2, 0.75, 0.125, 0.0625)
    assert events[2].seconds == 0.375

    command.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert f"{tmp_path}: 1 steps in" in text
    assert "started 2 times" in text
    assert "goodput " in text
    assert "A step waited for its batch in 16.7% of its time." in text  # 0.125 of 0.75
    assert "evaluating" in text


def test_a_timeline_knows_the_seconds_of_its_own_process(tmp_path):
    Timeline(tmp_path / TIMELINE_FILE, 0).write_evaluation(0, 5.0)

    timeline = Timeline(tmp_path / TIMELINE_FILE, 7)
    timeline.write_evaluation(7, 0.5)
    timeline.count_step(2.0, 0.5)
    timeline.write(8, ReplicaSeconds())
    timeline.count_step(4.0, 1.0)
    timeline.write(9, ReplicaSeconds())

    goodput = timeline.goodput()
    assert (goodput.steps, goodput.starts, goodput.down) == (2, 1, 0.0)
    assert (goodput.useful, goodput.data_wait, goodput.evaluation) == (4.5, 1.5, 0.5)
    assert 0 < goodput.total < 60


def test_ranks_that_do_not_write_write_nothing(tmp_path):
    timeline = Timeline(None, 0)
    timeline.count_step(1.0, 0.0)
    timeline.write(1, ReplicaSeconds())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_timeline_is_named(tmp_path):
    with pytest.raises(DataError, match=r"timeline\.jsonl.*version has trained"):
        read_timeline(tmp_path)
    for text, message in (
        ("", r"timeline\.jsonl is empty"),
        ('{"event": "stop", "time": 1, "step": 0}\n\n', "line 1.*event"),
        ('{"event": "start", "time": 1, "step": -1}\n\n', "line 1.*step"),
    ):
        (tmp_path / TIMELINE_FILE).write_text(text)
        with pytest.raises(DataError, match=message):
            read_timeline(tmp_path)


def test_lines_are_never_appended_to_a_file_behind_a_link(tmp_path):
    (tmp_path / "mine").write_text("half a line")
    (tmp_path / TIMELINE_FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link, and the file behind it would be changed"):
        Timeline(tmp_path / TIMELINE_FILE, 0)
    assert (tmp_path / "mine").read_text() == "half a line"
