"""A run that is killed and resumed against one that was never stopped: bit for bit, as a user would
do it.
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
from functools import partial

import pytest

import moe.training.step
from moe import CheckpointError, ConfigError, DataError
from moe.checkpoint.integrity import checkpoint_folders, visible_damage
from moe.checkpoint.run_state import load_state
from moe.commands import pretrain
from moe.kernels.product_choice import CHOICE_VARIABLE, fixed_choice
from moe.training.seeds import claim_job
from moe.training.timeline import measure_goodput, read_timeline
from scripts import demo
from tests.processes import Command, run_command
from tests.training.tiny_checkpoints import content_of, flip_a_bit
from tests.training.tiny_run import pretrain_arguments, write_inputs

pytestmark = pytest.mark.slow  # all read a run that a process made

TRAINING = {"train/loss", "train/ce_loss", "train/grad_norm", "train/lr"}
TABLES = {"heldout/unigram", "heldout/bigram", "heldout/trigram"}
COMPARED = TRAINING | TABLES | {"heldout/loss", "heldout/text_loss", "heldout/shuffled_encoder"}
STEPS = 21  # with checkpoints after 7, 14 and 21, of which the last two stay
LAST = "step_00000021"
SHORT_FIRST = (
    "--data.noise_density",
    0.5,
    "--data.short_steps",
    10,
    "--data.short_inputs_length",
    8,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def arguments(inputs, out, *more):
    return pretrain_arguments(inputs, out, "--training.steps", STEPS, *SHORT_FIRST, *more)


def here(inputs, out, *more):
    """Runs the command in this process."""
    pretrain.main(arguments(inputs, out, *more))


def stop_when(is_reached, how, inputs, out, *more, **options):
    """Starts a run, stops it by a signal once something is reached, and returns how it ended."""
    run = Command("stmoe", ["pretrain", *arguments(inputs, out, *more)], **options)
    run.wait_for(is_reached)
    run.send_signal(how)
    return run.finish()


def lines_of(out):
    """Returns the whole lines of metrics."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(out):
    """Returns the step of the last whole line of metrics, 0 before the first."""
    lines = lines_of(out)
    return lines[-1]["step"] if lines else 0


def losses(out):
    """Returns the text of every compared number by step and name."""
    numbers = {}
    for line in lines_of(out):
        for name in COMPARED & line.keys():
            numbers[line["step"], name] = repr(line[name])
    return numbers


@pytest.fixture(scope="module")
def unstopped(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unstopped") / "run"
    here(inputs, out)
    return out


def test_a_killed_run_resumes_bit_for_bit(inputs, unstopped, tmp_path):
    out = tmp_path / "run"
    ended = stop_when(lambda: last_step(out) >= 9, signal.SIGKILL, inputs, out)
    assert ended.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (out / "model").exists()

    here(inputs, out, "--resume")
    assert losses(out) == losses(unstopped)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert (out / "model" / file).read_bytes() == (unstopped / "model" / file).read_bytes()


def test_a_run_that_is_asked_to_end_loses_no_step_and_may_go_on_without_batches_made_ahead(
    inputs, unstopped, tmp_path
):
    out = tmp_path / "run"
    more = ("--training.checkpoint_every", "1000")
    ended = stop_when(lambda: last_step(out) >= 3, signal.SIGINT, inputs, out, *more)
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert "Stopped after step" in ended.stderr
    assert "with --resume continues" in ended.stderr
    (checkpoint,) = checkpoint_folders(out / "checkpoints")
    assert checkpoint.name == f"step_{last_step(out):08}"

    here(inputs, out, "--resume")
    assert losses(out) == losses(unstopped)


def test_a_run_keeps_the_libraries_of_its_checkpoint(inputs, tmp_path):
    out = tmp_path / "run"
    first = {CHOICE_VARIABLE: "onednn"}
    ended = stop_when(lambda: last_step(out) >= 3, signal.SIGTERM, inputs, out, environment=first)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr

    words = arguments(inputs, out, "--resume")
    done = run_command("stmoe", "pretrain", *words, environment={CHOICE_VARIABLE: "blas"})
    assert done.returncode == 0, done.stderr
    newest = checkpoint_folders(out / "checkpoints")[-1]
    assert load_state(newest).products == fixed_choice("onednn")


def test_a_run_says_at_its_end_how_good_it_is_and_what_batches_and_evaluations_took(
    inputs, tmp_path, capsys
):
    out = tmp_path / "run"
    every = ("--training.evaluate_every", "3")
    pretrain.main(
        pretrain_arguments(
            inputs, out, "--training.steps", "5", "--optim.cooldown_steps", "0", *every
        )
    )
    printed = capsys.readouterr().out
    shares = re.search(
        r"^5 steps in [\d.]+ s: a step waited for its batch in ([\d.]+)% of its time; "
        r"evaluations took ([\d.]+)% of all\.$",
        printed,
        re.MULTILINE,
    )
    assert shares is not None
    assert all(0 < float(share) < 100 for share in shares.groups())

    # The loss next to n-gram tables is in the model card too.
    sentence = re.search(
        r"^Held-out loss: \d\.\d\d nats per masked token, .*trigram \d\.\d\d.*\.$",
        printed,
        re.MULTILINE,
    )
    assert sentence is not None
    assert sentence.group() in (out / "model/README.md").read_text()

    # Only the last evaluation shuffles the encoder's inputs.
    shuffled = [line["step"] for line in lines_of(out) if "heldout/shuffled_encoder" in line]
    assert shuffled == [5]

    # A held-out loss before the first step, after the third, and at the end.
    events = read_timeline(out)
    evaluations = [event for event in events if event.event == "evaluation"]
    assert [event.step for event in evaluations] == [0, 3, 5]
    assert all(event.seconds > 0 for event in evaluations)
    goodput = measure_goodput(events)
    seconds = sum(event.seconds for event in evaluations)
    assert goodput.seconds["evaluation"] == pytest.approx(seconds)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.total)


def test_kills_before_the_first_checkpoint_leave_a_folder_that_starts_cleanly(
    inputs, unstopped, tmp_path, capsys
):
    out = tmp_path / "run"
    for is_reached in (lambda: (out / ".stmoe-folder").exists(), lambda: last_step(out) >= 2):
        ended = stop_when(is_reached, signal.SIGKILL, inputs, out, "--resume")
        assert ended.returncode == -signal.SIGKILL, "the run ended before it could be killed"
        assert not list(out.glob("checkpoints/step_*"))

    here(inputs, out, "--resume")
    said = capsys.readouterr().err
    assert f"{out} has no checkpoint yet: the run starts at its first step." in said
    assert losses(out) == losses(unstopped)


@pytest.fixture
def without_model(unstopped, tmp_path):
    """Copies the unstopped run as it was just before its model was written."""
    out = tmp_path / "run"
    shutil.copytree(unstopped, out)
    shutil.rmtree(out / "model")
    return out


def test_a_torn_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    inputs, unstopped, without_model, capsys
):
    newest = without_model / "checkpoints" / LAST
    os.truncate(newest / "__0_0.distcp", 1000)
    here(inputs, without_model, "--resume")
    said = capsys.readouterr().err
    assert "warning: going on from step_00000014" in said
    assert f"{newest} is damaged: __0_0.distcp has 1,000 bytes" in said
    assert losses(without_model) == losses(unstopped)
    assert visible_damage(newest) is None
    assert content_of(without_model / "model") == content_of(unstopped / "model")


def test_when_every_checkpoint_is_damaged_nothing_starts_anew_and_nothing_is_lost(
    inputs, without_model
):
    for path in checkpoint_folders(without_model / "checkpoints"):
        os.truncate(path / ".metadata", 1000)
    before = content_of(without_model)
    with pytest.raises(CheckpointError, match="Restore the files from a copy, or remove ") as e:
        here(inputs, without_model, "--resume")
    for step in (LAST, "step_00000014"):
        assert f"{step} is damaged: .metadata has 1,000 bytes" in str(e.value)
    assert content_of(without_model) == before


def test_a_model_that_is_not_whole_is_written_again(inputs, unstopped, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unstopped, out)
    for damage, message in (
        (
            lambda: flip_a_bit(out / "model/model.safetensors"),
            "model.safetensors has another SHA-256",
        ),
        (lambda: (out / "model/config.json").unlink(), "config.json is missing"),
    ):
        damage()
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
    with pytest.raises(CheckpointError, match="There is no checkpoint to write it"):
        here(inputs, out, "--resume")
    assert content_of(out) == before


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused(inputs, without_model):
    state_file = without_model / "checkpoints" / LAST / "state.json"
    state_file.write_text(json.dumps({**json.loads(state_file.read_text()), "step": 99}))
    with pytest.raises(CheckpointError, match=r"is from step 99, .* at training\.steps, 21"):
        here(inputs, without_model, "--resume")


def test_a_run_a_model_and_a_job_are_not_mixed(inputs, unstopped, tmp_path):
    shutil.copytree(unstopped / "model", tmp_path / "model")
    claim_job(tmp_path / "job")
    before = content_of(tmp_path), content_of(unstopped)
    for kind in ("model", "job"):
        with pytest.raises(DataError, match=f"{kind} holds a {kind}, and a training run would be"):
            here(inputs, tmp_path / kind, "--resume")
    options = ["--out", str(unstopped), "--resume"]
    for begin in (lambda: claim_job(unstopped), lambda: demo.main(options)):
        with pytest.raises(DataError, match="run holds a training run, and a job would be mixed"):
            begin()
    assert (content_of(tmp_path), content_of(unstopped)) == before


def test_a_complete_run_is_kept_and_a_second_one_is_not_begun(inputs, unstopped, capsys):
    files = [path for path in unstopped.rglob("*") if path.is_file() and path.name != ".lock"]
    before = [path.stat().st_mtime_ns for path in files]
    here(inputs, unstopped, "--resume")
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"already holds a run\. Use --resume"):
        here(inputs, unstopped)
    assert [path.stat().st_mtime_ns for path in files] == before


def test_other_settings_are_refused_by_name(inputs, unstopped, without_model):
    changes = ("--optim.lr", "0.3", "--training.steps", "50")
    for out in (unstopped, without_model):
        with pytest.raises(
            CheckpointError,
            match=r"optim\.lr was 0\.2 and is 0\.3; training\.steps was 21 and is 50",
        ):
            here(inputs, out, "--resume", *changes)


def test_a_run_killed_after_its_last_checkpoint_only_writes_the_model_whatever_settings_are_gone(
    inputs, unstopped, without_model, tmp_path
):
    newest = checkpoint_folders(without_model / "checkpoints")[-1]
    state = json.loads((newest / "state.json").read_text())
    state["recipe"]["training"] |= {"probe_every": 200, "probe_batches": 4}
    (newest / "state.json").write_text(json.dumps(state))
    here(inputs, without_model, "--resume")
    assert losses(without_model) == losses(unstopped)
    assert content_of(without_model / "model") == content_of(unstopped / "model")

    # A recipe file must drop them.
    old = tmp_path / "old.yaml"
    old.write_text("training:\n  probe_every: 0\n")
    with pytest.raises(ConfigError, match=r"no setting 'training.probe_every'.* Remove it"):
        here(inputs, without_model, "--resume", "--config", str(old))


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


def test_a_vocabulary_that_is_not_the_tokenizers_is_refused_before_anything_is_written(
    inputs, tmp_path
):
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 200, but the tokenizer"):
        here(inputs, tmp_path / "run", "--model.vocab_size", "200")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_takes_no_more_ends_in_one_message_and_keeps_what_was_there(inputs, tmp_path):
    out = tmp_path / "run"
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (40_000, 40_000))
    ended = run_command("stmoe", "pretrain", *arguments(inputs, out), prepare=full)
    assert ended.returncode == 2, ended.stderr
    assert "a file reached the largest size allowed while writing" in ended.stderr
    assert "step_00000007" in ended.stderr
    assert list((out / "checkpoints").iterdir()) == []
    assert last_step(out) == 14  # it is written while training goes on; the next one hears of it
    here(inputs, out, "--resume")
    assert last_step(out) == STEPS
