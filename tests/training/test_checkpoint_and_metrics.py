"""Checkpoints are whole or absent; metrics lose nothing but a torn line; held-out numbers against a loop."""

import errno
import math
from collections import Counter

import pytest
import torch

from moe import CheckpointError, DataError
from moe.data.storage import read_json_lines
from moe.data.tokenizer import SpecialIds
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.training import checkpoint
from moe.training.checkpoint import (
    RunState,
    check_same_run,
    latest_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
)
from moe.training.heldout import HeldOut, evaluate_held_out, unigram_entropy
from moe.training.metrics import MetricsWriter
from tests.models.tiny import tiny_batch, tiny_model


def trained(seed=0, **changes):
    model = tiny_model(seed, **changes).train()
    optimizer = Adafactor(parameter_groups(model), lr=0.01)
    model(**tiny_batch()).loss.backward()
    optimizer.step()
    return model, optimizer


def state(step, **changes):
    return RunState(**{"step": step, "fingerprint": "abc", "recipe": {"optim": {"lr": 0.1}}, **changes})


def save(folder, step, keep=2, **changes):
    model, optimizer = trained(**changes)
    return model, optimizer, save_checkpoint(folder, model, optimizer, state(step), keep=keep)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_moments_come_back_exactly(tmp_path, tied):
    model, optimizer, path = save(tmp_path, 7, tie_word_embeddings=tied)
    other, other_optimizer = trained(seed=1, tie_word_embeddings=tied)
    load_checkpoint(path, other, other_optimizer)
    assert load_state(path) == state(7)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_optimizer.state[b][name]))


def test_only_the_newest_stay(tmp_path):
    for step in (1, 2, 30):
        path = save(tmp_path, step)[2]
    assert latest_checkpoint(tmp_path) == path
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000030"]


@pytest.mark.parametrize(
    "damage", ["no state", "torn state", "odd state", "missing file", "short file", "partial sibling"]
)
def test_a_torn_checkpoint_is_never_picked_up(tmp_path, damage):
    good, torn = save(tmp_path, 1)[2], save(tmp_path, 2)[2]
    if damage == "no state":
        (torn / "state.json").unlink()
    elif damage == "torn state":
        (torn / "state.json").write_text('{"step": 2')
    elif damage == "odd state":
        (torn / "state.json").write_text('{"step": 2, "sizes": [1]}')
    elif damage == "missing file":
        (torn / "optimizer.pt").unlink()
    elif damage == "short file":
        content = (torn / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(content[:-1])
    else:
        torn.rename(tmp_path / ".step_00000002.partial")
    assert latest_checkpoint(tmp_path) == good


def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(tmp_path, monkeypatch):
    good = save(tmp_path, 1)[2]
    before = {file.name: file.read_bytes() for file in good.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert {file.name: file.read_bytes() for file in good.iterdir()} == before


def test_a_checkpoint_of_another_model_is_refused_with_a_list(tmp_path):
    path = save(tmp_path, 1, d_ff=37)[2]
    model, optimizer = trained()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        CheckpointError, match=r"14 of another shape: .*down_proj\.weight \(29, 37\) instead of \(29, 31\).*9 more"
    ):
        load_checkpoint(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    deeper, deeper_optimizer = trained(num_decoder_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.decoder\.blocks\.1"):
        load_checkpoint(path, deeper, deeper_optimizer)


def test_other_settings_and_other_data_are_refused_by_name(tmp_path):
    check_same_run(tmp_path, state(1), state(1, recipe={"optim": {"lr": 0.2}}), frozenset({"optim.lr"}))
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.1 and is 0\.2"):
        check_same_run(tmp_path, state(1), state(1, recipe={"optim": {"lr": 0.2}}), frozenset())
    with pytest.raises(CheckpointError, match=r"other data .fingerprint abc, now xyz"):
        check_same_run(tmp_path, state(1), state(1, fingerprint="xyz"), frozenset())


def test_metrics_resume_without_later_and_torn_lines(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 0.1 * step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with MetricsWriter(tmp_path, 2) as writer:
        writer.write(3, {"train/loss": 9.0})
    assert [line["train/loss"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [0.1, 0.2, 9.0]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: 'nonsense'"):
        read_json_lines(tmp_path / "metrics.jsonl")


def test_a_line_without_a_step_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"train/loss": 2.0}\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 has no step"):
        MetricsWriter(tmp_path, 2)


def test_a_run_whose_metrics_were_removed_goes_on(tmp_path):
    with MetricsWriter(tmp_path, 5) as writer:
        writer.write(6, {"train/loss": 1.0})
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 6, "train/loss": 1.0}]


class Batches:
    batch_size, fingerprint = 4, "x"

    def batch(self, step):
        return tiny_batch(seed=step)


def test_held_out_numbers_equal_a_loop_over_tokens():
    model, ids = tiny_model().train(), SpecialIds(pad=0, eos=1, first_sentinel=130, num_sentinels=40)
    numbers = evaluate_held_out(model, HeldOut(Batches(), 2, ids))
    assert model.training
    model.eval()
    losses, text_losses, tokens, hits = [], [], [], []
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
                    tokens.append(label)
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    assert numbers["heldout/loss"] == pytest.approx(sum(losses) / len(losses))
    assert numbers["heldout/text_loss"] == pytest.approx(sum(text_losses) / len(text_losses))
    assert numbers["heldout/unigram_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert numbers["heldout/token_accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_the_entropy_of_two_equal_tokens_is_ln_2():
    assert unigram_entropy(torch.tensor([5, 9, 9, 5])) == pytest.approx(math.log(2))
