"""A run that is killed and resumed against one that was never stopped: bit for bit, as a user would
do it.
"""

import fcntl
import json
import re
import resource
import shutil
import signal
import time
from functools import partial

import pytest

import moe.training.step
from moe import CheckpointError, ConfigError, DataError
from moe.checkpoint.integrity import checkpoint_folders, first_damage
from moe.checkpoint.run_state import load_state
from moe.checksums import write_sums
from moe.commands import pretrain
from moe.kernels.product_choice import CHOICE_VARIABLE, fixed_choice
from moe.training.job_folder import claim_job
from moe.training.timeline import measure_goodput, read_timeline
from scripts import demo, transfer
from tests.processes import Command, run_command
from tests.training.tiny_checkpoints import content_of, flip_a_bit
from tests.training.tiny_run import pretrain_arguments, write_inputs

pytestmark = pytest.mark.slow  # all read a run that a process made

COMPARED = (
    "train/loss",
    "train/ce_loss",
    "train/grad_norm",
    "train/lr",
    "heldout/loss",
    "heldout/text_loss",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def here(inputs, out, *more):
    """Runs the command in this process."""
    pretrain.main(pretrain_arguments(inputs, out, *more))


def call(inputs, out, *more, **options):
    return run_command("stmoe", "pretrain", *pretrain_arguments(inputs, out, *more), **options)


def stop_when(is_reached, how, inputs, out, *more, **options):
    """Starts a run, stops it by a signal once something is reached, and returns how it ended."""
    run = Command("stmoe", ["pretrain", *pretrain_arguments(inputs, out, *more)], **options)
    run.wait_for(is_reached)
    run.send_signal(how)
    return run.finish()


def last_step(out):
    """Returns the step of the last whole line of metrics, 0 before the first."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def losses(out):
    """Returns the text of every compared number by step and name."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): repr(line[name])
        for line in lines
        for name in COMPARED
        if name in line
    }


@pytest.fixture(scope="module")
def unstopped(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unstopped") / "run"
    done = call(inputs, out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_killed_run_resumes_bit_for_bit(inputs, unstopped, tmp_path):
    out = tmp_path / "run"
    ended = stop_when(lambda: last_step(out) >= 17, signal.SIGKILL, inputs, out)
    assert ended.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (out / "model").exists()
    done = call(inputs, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(unstopped)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / "model" / file).read_bytes() == (unstopped / "model" / file).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_loses_no_step(inputs, unstopped, tmp_path, number):
    out = tmp_path / "run"
    seldom = ("--training.checkpoint_every", "1000")
    ended = stop_when(lambda: last_step(out) >= 3, number, inputs, out, *seldom)
    assert ended.returncode == 128 + number, ended.stderr
    assert "Stopped after step" in ended.stderr
    assert "with --resume goes on" in ended.stderr
    assert [folder.name for folder in checkpoint_folders(out / "checkpoints")] == [
        f"step_{last_step(out):08}"
    ]

    done = call(inputs, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(unstopped)


def test_a_run_keeps_the_libraries_of_its_checkpoint(inputs, tmp_path):
    out = tmp_path / "run"
    first = {CHOICE_VARIABLE: "onednn"}
    ended = stop_when(lambda: last_step(out) >= 3, signal.SIGTERM, inputs, out, environment=first)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr

    second = {CHOICE_VARIABLE: "blas"}
    done = call(inputs, out, "--resume", environment=second)
    assert done.returncode == 0, done.stderr
    newest = checkpoint_folders(out / "checkpoints")[-1]
    assert load_state(newest).products == fixed_choice("onednn")


def test_batches_made_ahead_change_no_number_of_a_run_that_is_stopped_and_goes_on_without(
    inputs, unstopped, tmp_path
):
    out = tmp_path / "run"
    workers = ("--data.workers", "1")
    ended = stop_when(lambda: last_step(out) >= 3, signal.SIGTERM, inputs, out, *workers)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr

    done = call(inputs, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(unstopped)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/data_wait_seconds"] > 0 for line in lines if "train/loss" in line)


def test_a_run_says_at_its_end_what_batches_and_evaluations_took(inputs, tmp_path):
    out = tmp_path / "run"
    steps = ("--training.steps", "13", "--training.evaluate_every", "7")
    done = call(inputs, out, *steps, "--data.workers", "1", "--training.probe_every", "7")
    assert done.returncode == 0, done.stderr
    shares = re.search(
        r"^13 steps in [\d.]+ s: a step waited for its batch in ([\d.]+)% of its time; "
        r"evaluations took ([\d.]+)% of all\.$",
        done.stdout,
        re.MULTILINE,
    )
    assert shares is not None, done.stdout
    assert all(0 < float(share) < 100 for share in shares.groups())

    # A held-out loss and a probe before the first step, after the seventh, and at the end.
    events = read_timeline(out)
    evaluations = [event for event in events if event.event == "evaluation"]
    assert [event.step for event in evaluations] == [0, 0, 7, 7, 13, 13]
    assert all(event.seconds > 0 for event in evaluations)
    goodput = measure_goodput(events)
    assert goodput.evaluation == pytest.approx(sum(event.seconds for event in evaluations))
    assert goodput.evaluation + goodput.useful + goodput.data_wait <= goodput.total


def test_a_second_signal_ends_a_run_at_once_and_leaves_a_folder_that_goes_on(
    inputs, unstopped, tmp_path
):
    number = signal.SIGINT
    out = tmp_path / "run"
    run = Command("stmoe", ["pretrain", *pretrain_arguments(inputs, out)])
    run.wait_for(lambda: last_step(out) >= 3)
    run.send_signal(number)
    run.send_signal(number)
    ended = run.finish()
    assert ended.returncode in (-number, 128 + number)  # both may arrive as one

    done = call(inputs, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(unstopped)


def test_kills_before_the_first_checkpoint_leave_a_folder_that_starts_cleanly(
    inputs, unstopped, tmp_path, capsys
):
    out = tmp_path / "run"
    end_of_wait = time.monotonic() + 0.02
    for is_reached in (
        lambda: time.monotonic() > end_of_wait,  # while it starts
        lambda: (out / ".stmoe-folder").exists(),
        lambda: last_step(out) >= 2,
    ):
        ended = stop_when(is_reached, signal.SIGKILL, inputs, out, "--resume")
        assert ended.returncode == -signal.SIGKILL, "the run ended before it could be killed"
        assert not list(out.glob("checkpoints/step_*"))

    here(inputs, out, "--resume")
    assert (
        f"{out} has no checkpoint yet: the run starts at its first step." in capsys.readouterr().err
    )
    assert losses(out) == losses(unstopped)


@pytest.fixture
def without_model(unstopped, tmp_path):
    """Copies the unstopped run as it was just before its model was written."""
    out = tmp_path / "run"
    shutil.copytree(
        unstopped,
        out,
        ignore=lambda folder, names: {"model"} if folder == str(unstopped) else set(),
    )
    return out


def test_a_run_killed_after_its_last_checkpoint_only_writes_the_model(
    inputs, unstopped, without_model
):
    here(inputs, without_model, "--resume")
    assert losses(without_model) == losses(unstopped)
    assert (without_model / "model/model.safetensors").read_bytes() == (
        unstopped / "model/model.safetensors"
    ).read_bytes()


def test_a_flipped_bit_in_the_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    inputs, unstopped, without_model, capsys
):
    newest = without_model / "checkpoints" / "step_00000040"
    flip_a_bit(newest / "__0_0.distcp")
    here(inputs, without_model, "--resume")
    said = capsys.readouterr().err
    assert f"warning: the checkpoint {newest} is damaged: __0_0.distcp has another SHA-256" in said
    assert "Going on from the newest whole one, step_00000035." in said
    assert losses(without_model) == losses(unstopped)
    assert first_damage(newest) is None
    weights = "model/model.safetensors"
    assert (without_model / weights).read_bytes() == (unstopped / weights).read_bytes()


def test_when_every_checkpoint_is_damaged_nothing_starts_anew_and_nothing_is_lost(
    inputs, without_model
):
    for path in checkpoint_folders(without_model / "checkpoints"):
        flip_a_bit(path / ".metadata")
    before = content_of(without_model)
    with pytest.raises(
        CheckpointError,
        match=r"Every checkpoint in .*checkpoints is damaged \(step_00000040: \.meta",
    ) as e:
        here(inputs, without_model, "--resume")
    assert "step_00000035: .metadata has another SHA-256" in str(e.value)
    assert "Restore the files from a copy, or remove " in str(e.value)
    assert content_of(without_model) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda model: flip_a_bit(model / "model.safetensors"),
            "model.safetensors has another SHA-256",
        ),
        (lambda model: (model / "tokenizer.json").unlink(), "the tokenizer is missing"),
        (lambda model: (model / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_a_model_that_is_not_whole_is_written_again(
    inputs, unstopped, tmp_path, capsys, damage, message
):
    out = tmp_path / "run"
    shutil.copytree(unstopped, out)
    damage(out / "model")
    here(inputs, out, "--resume")
    said = capsys.readouterr().err
    assert f"{out / 'model'} is not whole: {message}" in said
    assert ". It is written again.\n" in said
    assert content_of(out / "model") == content_of(unstopped / "model")
    assert losses(out) == losses(unstopped)


def test_a_damaged_model_without_checkpoints_is_not_replaced_by_a_run_from_the_start(
    inputs, unstopped, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(unstopped, out)
    shutil.rmtree(out / "checkpoints")
    here(inputs, out, "--resume")  # whole, and complete
    flip_a_bit(out / "model" / "model.safetensors")
    before = content_of(out)
    with pytest.raises(
        CheckpointError,
        match=r"model of this run is damaged: .* There is no checkpoint to write it",
    ):
        here(inputs, out, "--resume")
    assert content_of(out) == before


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused(inputs, without_model):
    beyond = without_model / "checkpoints" / "step_00000099"
    (without_model / "checkpoints" / "step_00000040").rename(beyond)
    state = json.loads((beyond / "state.json").read_text())
    (beyond / "state.json").write_text(json.dumps({**state, "step": 99}))
    (beyond / "SHA256SUMS").unlink()
    write_sums(beyond)
    with pytest.raises(
        CheckpointError,
        match=r"step_00000099 is of step 99, and the run ends at training\.steps, 40",
    ):
        here(inputs, without_model, "--resume")


@pytest.mark.parametrize("kind", ["model", "job"])
def test_a_run_is_not_mixed_with_what_is_something_else(inputs, unstopped, tmp_path, kind):
    folder = tmp_path / kind
    if kind == "job":
        claim_job(folder)
    else:
        shutil.copytree({**inputs, "model": unstopped / "model"}[kind], folder)
    before = content_of(folder)
    with pytest.raises(
        DataError, match=f"{kind} holds a {kind}, and a training run would be mixed with it"
    ):
        here(inputs, folder, "--resume")
    assert content_of(folder) == before


def test_a_job_is_not_mixed_with_a_run(unstopped):
    before = content_of(unstopped)
    options = ["--out", str(unstopped), "--resume"]
    for begin in (
        lambda: claim_job(unstopped),
        lambda: demo.main(options),
        lambda: transfer.main(options),
    ):
        with pytest.raises(
            DataError, match="run holds a training run, and a job would be mixed with it"
        ):
            begin()
    assert content_of(unstopped) == before


def test_a_complete_run_is_kept(inputs, unstopped, capsys):
    before = {
        path: path.stat().st_mtime_ns
        for path in unstopped.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    here(inputs, unstopped, "--resume")
    assert "is complete" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_second_run_in_the_same_folder_is_refused_without_a_traceback(inputs, unstopped):
    refused = call(inputs, unstopped)
    assert refused.returncode == 2
    assert "already holds a run. Give --resume" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_by_name(inputs, unstopped, without_model, finished):
    with pytest.raises(
        CheckpointError, match=r"optim\.lr was 0\.2 and is 0\.3; training\.steps was 40 and is 50"
    ):
        here(
            inputs,
            unstopped if finished else without_model,
            *("--resume", "--optim.lr", "0.3", "--training.steps", "50"),
        )


def test_another_writer_is_refused(inputs, without_model):
    with (without_model / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="Another process trains in"):
            here(inputs, without_model, "--resume")


def test_weights_are_never_saved_after_a_gradient_that_is_not_finite(inputs, tmp_path, monkeypatch):
    out, clip, calls = tmp_path / "run", moe.training.step.clip_gradient, iter(range(100))

    def spoilt(*arguments):
        norm = clip(*arguments)
        return norm if next(calls) < 13 else norm * float("nan")

    monkeypatch.setattr(moe.training.step, "clip_gradient", spoilt)
    with pytest.raises(CheckpointError, match=r"loss is \d.* gradient's norm nan at step 14"):
        here(inputs, out)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000007"]
    assert not (out / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.vocab_size", "200"), "model.vocab_size is 200, but the tokenizer"),
        (("--model.num_experst", "8"), "Did you mean 'model.num_experts'"),
    ],
)
def test_what_does_not_go_together_is_one_message(inputs, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        here(inputs, tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_takes_no_more_ends_in_one_message_and_keeps_what_was_there(inputs, tmp_path):
    out, limit = tmp_path / "run", 40_000
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    ended = call(inputs, out, prepare=full)
    assert ended.returncode == 2, ended.stderr
    assert "a file reached the largest size allowed while writing" in ended.stderr
    assert "step_00000007" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list((out / "checkpoints").iterdir()) == []
    assert last_step(out) == 14  # it is written while training goes on; the next one hears of it
    assert call(inputs, out, "--resume").returncode == 0
