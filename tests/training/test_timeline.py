"""What the seconds of a run went into, on timelines whose sums can be made by hand."""

import atexit
import time
from contextlib import closing

import pytest
import torch

from moe import DataError
from moe.commands import goodput as command
from moe.commands import pretrain
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.parsing import read_json_lines
from moe.training.build import BuiltModel
from moe.training.metrics import METRICS_FILE, MetricsWriter
from moe.training.recipe import Recipe, TrainingRecipe
from moe.training.reporter import Reporter
from moe.training.run import Run
from moe.training.timeline import (
    TIMELINE_FILE,
    Timeline,
    TimelineEvent,
    measure_goodput,
    read_timeline,
)
from tests.models.tiny import tiny_batch, tiny_model
from tests.training.one_step import train_step
from tests.training.tiny_run import pretrain_arguments, write_inputs


def start(time, step=0, loading=0.0):
    return TimelineEvent("start", time, step, seconds=loading)


def steps(time, step, num, seconds, **waits):
    return TimelineEvent("steps", time, step, num_steps=num, seconds=seconds, **waits)


def evaluation(time, step, seconds):
    return TimelineEvent("evaluation", time, step, seconds=seconds)


def end(time, step):
    return TimelineEvent("end", time, step)


KILLED = [start(0.0), steps(10.0, 5, 5, 10.0), steps(20.0, 10, 5, 10.0)]
STARTED = [start(0.0, loading=7.0), evaluation(9.0, 0, 2.0)]
WAITED = [steps(20.0, 5, 5, 10.0, data_wait=0.5), steps(40.0, 15, 10, 10.0, data_wait=1.5)]
UNDISTURBED = [*STARTED, *WAITED, evaluation(46.0, 15, 6.0), end(48.0, 15), end(50.0, 15)]
HEALED = [evaluation(41.0, 0, 1.0), steps(44.5, 15, 2, 3.0, healing=1.0, healed=1, lost=0.5)]
TIMELINES = {
    # The process exits two seconds after the end of its run.
    "undisturbed": (
        UNDISTURBED,
        {"useful": 18.0, "loading": 7.0, "data_wait": 2.0, "evaluation": 8.0, "other": 15.0},
    ),
    "killed after a checkpoint of step 7": (
        [*KILLED, start(40.0, step=7), steps(46.0, 10, 3, 6.0)],
        {"useful": 20.0, "redone": 6.0, "down": 20.0},
    ),
    "killed again without a checkpoint": (
        [*KILLED, start(21.0, step=7), steps(23.0, 9, 2, 2.0), start(24.0)],
        {"redone": 22.0, "down": 2.0},
    ),
    "a process starts before the last one has gone": (
        [start(0.0), steps(5.0, 1, 1, 5.0), start(4.0, step=1)],
        {"useful": 5.0},
    ),
    # The checkpoint of the group is of step 0, and it takes over the state after step 13.
    "healed": (
        [*KILLED, start(40.0), *HEALED, steps(45.5, 16, 1, 1.0, meeting=0.25)],
        {
            **{"useful": 22.75, "down": 20.0, "evaluation": 1.0},
            **{"meeting": 0.25, "healing": 1.0, "lost": 0.5},
        },
    ),
}


@pytest.mark.parametrize(("events", "expected"), TIMELINES.values(), ids=TIMELINES)
def test_the_seconds_in_each_state_are_those_summed_by_hand(events, expected):
    goodput = measure_goodput(events)
    assert {state: value for state, value in goodput.seconds.items() if value} == expected
    assert goodput.total == events[-1].time - events[0].time
    assert goodput.steps == events[-1].step
    assert goodput.starts == sum(event.event == "start" for event in events)


def test_shares_are_of_all_seconds_and_that_of_waiting_of_the_seconds_of_steps():
    goodput = measure_goodput(UNDISTURBED)
    assert (goodput.share("useful"), goodput.share("evaluation")) == (18 / 50, 8 / 50)
    assert goodput.data_wait_share == 2 / 20
    nothing = measure_goodput([start(1.0)])
    assert (nothing.share("useful"), nothing.data_wait_share) == (0.0, 0.0)


def test_a_process_counts_from_its_start_to_its_exit(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    few = ("--training.steps", 2, "--optim.cooldown_steps", 0)
    words = pretrain_arguments(write_inputs(tmp_path), tmp_path / "run", *few)
    pretrain.main(words, process_start=time.time() - 20)
    for function in at_exit:
        function()

    events = read_timeline(tmp_path / "run")
    assert [event.event for event in events[-2:]] == ["end", "end"]
    goodput = measure_goodput(events)
    assert 20 < goodput.seconds["loading"] < goodput.total
    assert goodput.seconds["useful"] > 0
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.total)


def test_a_timeline_grows_over_the_processes_of_a_run_and_outlives_torn_lines(tmp_path, capsys):
    first = [steps(1.0, 2, 2, 0.75, data_wait=0.125, meeting=0.0625), evaluation(2.0, 2, 0.375)]
    second = [steps(3.0, 3, 2, 4.0, data_wait=1.0)]
    for step, events in ((0, first), (1, second)):
        timeline = Timeline(tmp_path / TIMELINE_FILE, step)
        for event in events:
            timeline.append(event)
        timeline.end()
        with (tmp_path / TIMELINE_FILE).open("a") as file:
            file.write('{"event": "steps", "time"')

    events = read_timeline(tmp_path)
    kinds = ["start", "steps", "evaluation", "end", "start", "steps", "end"]
    assert [event.event for event in events] == kinds
    assert [event.step for event in events] == [0, 2, 2, 2, 1, 3, 3]
    assert [events[1], events[2], events[5]] == [*first, *second]

    # The process tells of itself, the command of all processes.
    said = timeline.summary()
    assert said.startswith("2 steps in ") and "in 25.0% of its time; evaluations took 0.0%" in said
    command.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert f"{tmp_path}: 3 steps in" in text
    assert "started 2 times" in text and "goodput " in text and "evaluating" in text
    assert "A step waited for its batch in 23.7% of its time." in text  # 1.125 of 4.75


def test_a_line_counts_the_steps_since_the_last_one_and_their_seconds_alone(tmp_path):
    recipe = Recipe(training=TrainingRecipe(batch_size=4, steps=4, log_every=2))
    model = tiny_model()
    metrics = train_step(model, Adafactor(parameter_groups(model)), recipe, tiny_batch(), 0)
    metrics = metrics._replace(tokens=torch.tensor(6))
    with closing(MetricsWriter(tmp_path, 0)) as writer:
        run = Run(tmp_path, recipe, BuiltModel(model, {}, None), None, None, None)
        reporter = Reporter(run, writer, "train", 0)
        for step in range(1, 5):
            reporter.report_step(step, metrics, seconds=step, data_wait=step / 4)

    lines = [event[3:6] for event in read_timeline(tmp_path) if event.event == "steps"]
    assert lines == [(2, 1 + 2, 0.75), (2, 3 + 4, 1.75)]
    speeds = [
        line["train/tokens_per_second"] for _, line in read_json_lines(tmp_path / METRICS_FILE)
    ]
    assert speeds == [12 / 3, 12 / 7]


def test_ranks_that_do_not_write_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Timeline(None, 0).end()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_timeline_is_named(tmp_path):
    with pytest.raises(DataError, match=r"timeline\.jsonl.*version has trained"):
        read_timeline(tmp_path)
    for text, noun in (
        ("", "is empty"),
        ('{"event": "stop", "time": 1, "step": -1}\n\n', "line 1"),
    ):
        (tmp_path / TIMELINE_FILE).write_text(text)
        with pytest.raises(DataError, match=rf"timeline\.jsonl.*{noun}"):
            read_timeline(tmp_path)


def test_lines_are_never_appended_to_a_file_behind_a_link(tmp_path):
    (tmp_path / "mine").write_text("half a line")
    (tmp_path / TIMELINE_FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link, and the file behind it would be changed"):
        Timeline(tmp_path / TIMELINE_FILE, 0)
    assert (tmp_path / "mine").read_text() == "half a line"
