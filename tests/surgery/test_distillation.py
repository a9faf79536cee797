"""The loss of a student against formulas per token, and the teacher that it is measured by."""

import pytest
import torch

from moe.errors import ConfigError
from moe.surgery.distillation import (
    Distillation,
    DistillationSettings,
    load_teacher,
    teacher_config,
)
from tests.models.tiny import tiny_batch, tiny_model


def distillation(hard_weight, soft_weight, temperature, teacher):
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
    output.loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


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
