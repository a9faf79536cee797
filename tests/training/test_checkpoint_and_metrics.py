"""Checkpoints are whole or absent; metrics lose nothing but a torn line; held-out numbers against a
loop.
"""

import errno
import threading
from contextlib import closing

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe import CheckpointError, DataError
from moe.checkpoint.integrity import latest_checkpoint
from moe.checkpoint.run_state import check_same_run, load_state
from moe.checkpoint.writer import CheckpointWriter
from moe.data.ngrams import loss_sentence
from moe.data.tokenizer import SpecialIds
from moe.parsing import read_json_lines
from moe.training.heldout_loss import HeldOut, evaluate_held_out
from moe.training.metrics import MetricsWriter, last_value
from tests.models.tiny import tiny_batch, tiny_model
from tests.training.tiny_checkpoints import (
    adafactor,
    assert_same,
    content_of,
    layouts,
    load,
    save,
    state,
    take_step,
    trained,
)

VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "with a buffer": {"router": "bias_balanced", "router_options": None},
    "as many hidden units as gates and inputs": {"d_model": 62},  # 2 F = D
    "adamw": {"build": lambda model: torch.optim.AdamW(model.parameters())},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_weights_and_moments_come_back_exactly(tmp_path, variant):
    model, optimizer, path = save(tmp_path, 7, **variant)
    other, other_optimizer = trained(seed=1, **variant)
    if variant.get("router") is None:  # else the optimizer has made other steps already
        other_optimizer = variant.get("build", adafactor)(other)
    load(path, other, other_optimizer)
    assert load_state(path)[:3] == state(7)[:3]
    assert_same(model, optimizer, other, other_optimizer)
    take_step(model, optimizer)
    take_step(other, other_optimizer)
    assert_same(model, optimizer, other, other_optimizer)


def test_training_goes_on_while_a_checkpoint_is_written_without_changing_it(tmp_path, monkeypatch):
    (model, optimizer), go_on, real = trained(), threading.Event(), torch.save
    same, same_optimizer = trained()

    def late(*arguments, **options):
        assert go_on.wait(300)
        real(*arguments, **options)

    monkeypatch.setattr(torch, "save", late)
    with CheckpointWriter(tmp_path, keep=2) as writer:
        path = writer.save(model, optimizer, layouts(model), state(1))
        take_step(model, optimizer)
        assert not path.exists()
        go_on.set()
    other = tiny_model(2)
    other_optimizer = adafactor(other)
    load(path, other, other_optimizer)
    assert_same(same, same_optimizer, other, other_optimizer)


def test_a_parameter_that_never_had_a_gradient_starts_fresh(tmp_path):
    model, optimizer = trained()
    unused = model.lm_head.weight
    del optimizer.state[unused]
    with CheckpointWriter(tmp_path, keep=2) as writer:
        path = writer.save(model, optimizer, layouts(model), state(1))
    other, other_optimizer = trained(seed=1)
    load(path, other, other_optimizer)
    assert other.lm_head.weight not in other_optimizer.state
    assert len(other_optimizer.state) == len(optimizer.state)


def test_only_the_newest_stay(tmp_path):
    for step in (1, 2, 30):
        path = save(tmp_path, step)[2]
    assert latest_checkpoint(tmp_path) == path
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000030"]


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(tmp_path, monkeypatch):
    save(tmp_path, 1)
    before = content_of(tmp_path)
    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_00000002'") as raised:
        save(tmp_path, 2)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert content_of(tmp_path) == before


def test_an_error_of_the_run_counts_more_than_one_of_the_checkpoint_it_left(tmp_path, monkeypatch):
    model, optimizer = trained()
    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(KeyError, match="first"), CheckpointWriter(tmp_path, keep=2) as writer:
        writer.save(model, optimizer, layouts(model), state(1))
        raise KeyError("first")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_it_was_replacing_comes_back(tmp_path):
    good, replaced = save(tmp_path, 1)[2], save(tmp_path, 2)[2]
    for step in (2, 3):
        work = tmp_path / f".step_{step:08d}.12345678.partial"
        (work / "partial").mkdir(parents=True)
        (tmp_path / f".step_{step:08d}.lock").touch()
        (work / "partial" / "__0_0.distcp").write_text("half")
    replaced.rename(tmp_path / ".step_00000002.12345678.partial" / "replaced")
    with CheckpointWriter(tmp_path, keep=2):
        pass
    assert sorted(tmp_path.iterdir()) == [good, replaced]


def test_files_of_the_user_that_have_the_names_of_leftovers_stay(tmp_path):
    (tmp_path / ".step_00000002.partial").write_text("years of work")
    (tmp_path / ".step_00000003.partial").mkdir()
    (tmp_path / ".step_00000003.partial" / "thesis.txt").write_text("years of work")
    (tmp_path / ".step_00000004.partial").symlink_to(tmp_path / ".step_00000003.partial")
    before = set(tmp_path.rglob("*"))
    for step in (2, 3, 4):
        target = save(tmp_path, step, keep=1)[2]
    assert set(tmp_path.rglob("*")) - {target, *target.rglob("*")} == before


def test_something_else_in_the_place_of_a_checkpoint_is_left_alone(tmp_path):
    other = tmp_path / "step_00000001" / "thesis.txt"
    other.parent.mkdir()
    other.write_text("years of work")
    with pytest.raises(DataError, match=r"step_00000001 exists and holds something else"):
        save(tmp_path, 1)
    assert other.read_text() == "years of work"


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_a_list(tmp_path):
    path = save(tmp_path, 1, d_ff=37)[2]
    message = r"14 of another shape: .*down_proj\.weight \(29, 37\) instead of \(29, 31\).*9 more"
    with pytest.raises(CheckpointError, match=message):
        load(path, *trained())

    path = save(tmp_path, 2)[2]
    with pytest.raises(CheckpointError, match=r"unexpected: model\.decoder\.blocks\.1"):
        load(path, *trained(num_decoder_layers=1))
    model, optimizer = trained(seed=1, build=VARIANTS["adamw"]["build"])
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=r"another optimizer.*missing: .*/exp_avg"):
        load(path, model, optimizer)
    assert all(map(torch.equal, model.parameters(), weights))


def test_shards_and_indexes_that_cannot_be_read_are_one_message(tmp_path):
    model, optimizer, path = save(tmp_path, 1)
    shards = path / "__0_0.distcp"
    shards.write_bytes(b"x" * shards.stat().st_size)
    with pytest.raises(CheckpointError, match="could not be read: rank 0 failed with "):
        load(path, model, optimizer)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: .*No such file.*\.metadata"):
        load(path, model, optimizer)


def test_other_settings_and_other_data_are_refused_by_name(tmp_path):
    check_same_run(
        tmp_path, state(1), state(1, recipe={"optim": {"lr": 0.2}}), frozenset({"optim.lr"})
    )
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.1 and is 0\.2"):
        check_same_run(tmp_path, state(1), state(1, recipe={"optim": {"lr": 0.2}}), frozenset())
    with pytest.raises(CheckpointError, match=r"other data .fingerprint 'abc', now 'xyz'"):
        check_same_run(tmp_path, state(1), state(1, fingerprint="xyz"), frozenset())


def numbers_of(folder, name="train/loss"):
    return [
        (line["step"], line[name])
        for _, line in read_json_lines(folder / "metrics.jsonl", torn_end=True)
    ]


def test_metrics_resume_without_later_and_torn_lines(tmp_path):
    with closing(MetricsWriter(tmp_path, 0)) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 0.5 * step, "train/lr": 2.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')
    assert numbers_of(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    with closing(MetricsWriter(tmp_path, 2)) as writer:
        writer.write(3, {"train/loss": 7.0})
    assert numbers_of(tmp_path) == [(1, 0.5), (2, 1.0), (3, 7.0)]
    assert events_of(tmp_path / "tensorboard") == {
        "train/loss": [(1, 0.5), (2, 1.0), (3, 7.0)],
        "train/lr": [(1, 2.0), (2, 2.0)],
    }


def events_of(folder):
    """Returns what TensorBoard shows: (step, value) by name."""
    board = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in board.Scalars(name)]
        for name in board.Tags()["scalars"]
    }


def test_metrics_that_are_something_else_are_one_message_and_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for content, message in (
        (b'{"step": 1}\n{"loss": 2.0}\n{"step": 2}\n', "line 2 has no step"),
        (b"[1]\n[2]\n", ""),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"metrics\.jsonl.*{message}"):
            MetricsWriter(tmp_path, 2)
        assert path.read_bytes() == content


class Batches:
    batch_size, fingerprint, lengths = 4, "x", None

    def batch(self, step, rows):
        return {name: value[rows] for name, value in tiny_batch(seed=step).items()}


def test_a_sentence_says_which_tables_the_model_beats():
    tables = {"unigram": 6.0, "bigram": 4.5, "trigram": 4.0}
    for loss, verdict in (
        (6.5, "worse than unigram 6.00, bigram 4.50, trigram 4.00"),
        (5.0, "better than unigram 6.00; worse than bigram 4.50, trigram 4.00"),
    ):
        assert f"token, {verdict} (n-gram tables" in loss_sentence(loss, tables)
    assert loss_sentence(loss, {}).endswith(" nats per masked token.")


def test_the_last_value_of_a_metric_is_read(tmp_path):
    with closing(MetricsWriter(tmp_path, 0)) as writer:
        for step in (0, 7):
            writer.write(step, {"heldout/text_loss": 5.0 - step / 8})
            writer.write(step, {"train/loss": 3.0})
    assert last_value(tmp_path / "metrics.jsonl", "heldout/text_loss") == 4.125
    assert last_value(tmp_path / "metrics.jsonl", "heldout/loss") is None


def test_held_out_numbers_equal_a_loop_over_tokens():
    model = tiny_model().train()
    ids = SpecialIds(pad=0, eos=1, first_sentinel=130, num_sentinels=40)
    numbers = evaluate_held_out(model, HeldOut(Batches(), 2, ids, {"bigram": 4.5}))
    assert model.training
    model.eval()
    losses, text_losses, hits = [], [], []
    for step in range(2):
        batch = tiny_batch(seed=step)
        logits = model(**batch).logits.double()
        for row, labels in enumerate(batch["labels"].tolist()):
            for position, label in enumerate(labels):
                if label == -100:
                    continue
                loss = (logits[row, position].logsumexp(0) - logits[row, position, label]).item()
                losses.append(loss)
                hits.append(int(logits[row, position].argmax()) == label)
                if 1 < label <= 90:
                    text_losses.append(loss)
    assert numbers["heldout/loss"] == pytest.approx(sum(losses) / len(losses))
    assert numbers["heldout/text_loss"] == pytest.approx(sum(text_losses) / len(text_losses))
    assert numbers["heldout/bigram"] == 4.5
    assert numbers["heldout/token_accuracy"] == pytest.approx(sum(hits) / len(hits))
    assert "heldout/shuffled_encoder" not in numbers


def test_the_shuffled_encoder_gives_the_decoder_the_outputs_of_another_batch():
    model = tiny_model()
    held_out = HeldOut(Batches(), 1, SpecialIds(pad=0, eos=1, first_sentinel=200, num_sentinels=1))
    numbers = evaluate_held_out(model, held_out, shuffled=True)

    # All labels are text here.
    labels = tiny_batch(seed=0)["labels"]
    other = tiny_batch(seed=1)
    mask = other["attention_mask"]
    memory = model.get_encoder()(other["input_ids"], attention_mask=mask)
    output = model(encoder_outputs=memory, attention_mask=mask, labels=labels)
    logits = output.logits.transpose(1, 2)  # [B, V, T]
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert numbers["heldout/shuffled_encoder"] == pytest.approx(expected)
    assert numbers["heldout/shuffled_encoder"] != pytest.approx(numbers["heldout/text_loss"])

    # A decoder that ignores the encoder has the same loss.
    with torch.no_grad():
        for block in model.get_decoder().blocks:
            block.cross_attention.o_proj.weight.zero_()
    numbers = evaluate_held_out(model, held_out, shuffled=True)
    assert numbers["heldout/shuffled_encoder"] == numbers["heldout/text_loss"]
