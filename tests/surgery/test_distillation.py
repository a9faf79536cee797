"""The loss of a student against formulas per token, and the teacher's probabilities in a file."""

import pytest
import torch

from moe.errors import ConfigError
from moe.surgery.distillation import (
    Distillation,
    DistillationSettings,
    TeacherSource,
    load_teacher,
    soft_cross_entropy,
    teacher_arrays,
    teacher_config,
)
from tests.models.tiny import tiny_batch, tiny_model


class Source:
    """Three batches with targets of other lengths."""

    batch_size = 4
    lengths = None
    fingerprint = "batches"

    def batch(self, step, rows=slice(None)):
        batch = tiny_batch(targets=7 + 2 * step, seed=step)
        return {name: tensor[rows] for name, tensor in batch.items()}


def distillation(hard_weight, soft_weight, temperature, teacher=None):
    settings = {"hard_weight": hard_weight, "soft_weight": soft_weight}
    return Distillation(DistillationSettings(**settings, temperature=temperature), teacher)


@pytest.mark.parametrize("temperature", [1, 2])
def test_the_loss_is_the_weighted_mean_over_targets(temperature):
    student, teacher = tiny_model(1), tiny_model(2)
    batch = tiny_batch()
    plain = student(**batch)
    output = distillation(0.75, 0.25, temperature, teacher)(
        student, batch, student.loss_counts(batch)
    )

    hard, soft, count = 0.0, 0.0, 0
    theirs = teacher(**batch).logits.detach()
    for row in range(4):
        for position in range(11):
            label = batch["labels"][row, position]
            if label == -100:
                continue
            log_q = plain.logits[row, position].log_softmax(-1)
            log_q_soft = (plain.logits[row, position] / temperature).log_softmax(-1)
            p = (theirs[row, position] / temperature).softmax(-1)
            hard -= log_q[label]
            soft -= temperature**2 * (p * log_q_soft).sum()
            count += 1
    rest = plain.loss - plain.ce_loss
    expected = rest + (0.75 * hard + 0.25 * soft) / count
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.ce_loss, hard / count)


def test_gradients_reach_the_student_alone_and_those_of_a_teacher_like_it_are_0():
    student, teacher = tiny_model(1), tiny_model(1)
    batch = tiny_batch()
    counts = student.loss_counts(batch)
    distillation(0.0, 1.0, 1.0, teacher)(student, batch, counts).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    with_teacher = student.lm_head.weight.grad.clone()
    student.zero_grad()
    distillation(0.0, 1e-9, 1.0, teacher)(student, batch, counts).loss.backward()
    torch.testing.assert_close(student.lm_head.weight.grad, with_teacher, atol=1e-6, rtol=0)


def test_unknown_tokens_count_as_one():
    """At n = 2 of 5, by hand: p = (1/2, 1/4, rest 1/4), q = (1/4, 1/8, rest 5/8)."""
    q = torch.tensor([[1 / 8, 1 / 4, 1 / 8, 1 / 4, 1 / 4]])
    p = torch.tensor([[1 / 2, 1 / 4]])
    loss = soft_cross_entropy(q.log(), p.log(), torch.tensor([[3, 2]]))
    numbers = torch.tensor([[1 / 4, 1 / 8, 5 / 8], [1 / 2, 1 / 4, 1 / 4]])
    torch.testing.assert_close(loss, -(numbers[0].log() * numbers[1]).sum())


def test_all_tokens_in_a_file_are_the_teacher_itself_for_any_rows_and_again_later(tmp_path):
    student = tiny_model(1)
    tiny_model(2).save_pretrained(tmp_path / "teacher")
    teacher = load_teacher(tmp_path / "teacher", "cpu")

    def arrays_of(top_n):
        settings = DistillationSettings(cached_batches=3, temperature=2.0, top_n=top_n)
        return teacher_arrays(teacher, Source(), settings)

    arrays = arrays_of(131)
    source = TeacherSource(Source(), arrays, 3)
    for step in (0, 2, 4):
        batch = source.batch(step)
        plain = Source().batch(step % 3)
        counts = student.loss_counts(plain)
        expected = distillation(0.5, 0.5, 2.0, teacher)(student, plain, counts)
        from_file = distillation(0.5, 0.5, 2.0)(student, batch, counts)
        torch.testing.assert_close(from_file.loss, expected.loss)
        for name, rows in source.batch(step, slice(1, 3)).items():
            assert torch.equal(rows, batch[name][1:3])
    assert source.fingerprint != TeacherSource(Source(), arrays, 2).fingerprint

    # Fewer tokens lose little where the teacher is sure.
    few = TeacherSource(Source(), arrays_of(5), 3)
    assert few.batch(0)["teacher_tokens"].shape == (4, 7, 5)
    loss = distillation(0.5, 0.5, 2.0)(student, few.batch(0), counts).loss
    assert 0 < loss < expected.loss
    with pytest.raises(ConfigError, match="top_n is 132"):
        arrays_of(132)


def test_a_teacher_drops_no_token_so_that_rows_do_not_depend_on_each_other(tmp_path):
    model = tiny_model(eval_capacity_factor=0.1)
    model.save_pretrained(tmp_path / "teacher")
    teacher = load_teacher(tmp_path / "teacher", "cpu")
    batch = tiny_batch()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    torch.testing.assert_close(teacher(**batch).logits[:1], teacher(**one).logits)
    tiny_model(
        router="expert_choice", decoder_router="switch", router_options=None, num_selected_experts=1
    ).save_pretrained(tmp_path / "choosers")
    with pytest.raises(ConfigError, match="router 'expert_choice', whose experts choose"):
        teacher_config(tmp_path / "choosers")
