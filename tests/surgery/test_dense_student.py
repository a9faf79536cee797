"""A dense student of a sparse teacher: identities with the teacher, and what has no place in it."""

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.convert.formats import convert_checkpoint
from moe.errors import ConfigError, DataError
from moe.sparse.editing import sparse_layers
from moe.surgery.dense_student import (
    dense_obstacles,
    dense_student_checkpoint,
    mean_gates,
    student_config,
)
from moe.surgery.upcycle import Upcycling, upcycle_checkpoint
from tests.models.tiny import DENSE, UL2_AND_UMT5, tiny_batch, tiny_model
from tests.surgery.tiny_prefixes import MK, add_prefixes, parent_model

NEAR = {"atol": 1e-5, "rtol": 1e-5}


def logits_of(model, batch=None):
    batch = batch or tiny_batch()
    with torch.no_grad():
        return model(**batch).logits[batch["labels"] != -100]


def student_of(folder, init, seed=0):
    """Returns the student of the model in a folder, whose gates are measured on one batch."""
    teacher = STMoEForConditionalGeneration.from_pretrained(folder).eval()
    target = folder.parent / f"{folder.name}_{init}"
    target.mkdir()
    dense_student_checkpoint(folder, target, init, mean_gates(teacher, [tiny_batch()]), seed)
    return STMoEForConditionalGeneration.from_pretrained(target).eval()


@pytest.mark.parametrize(
    ("granularity", "fields"),
    [(1, {}), (2, {"expert_bias": "multiplicative"}), (3, {"sparse_dense_stacking": True})],
)
def test_from_dense_to_sparse_and_back_is_the_identity(tmp_path, granularity, fields):
    dense = tiny_model(**DENSE, **UL2_AND_UMT5, d_ff=36)
    dense.save_pretrained(tmp_path / "dense")
    (tmp_path / "sparse").mkdir()
    upcycling = Upcycling(num_experts=5, granularity=granularity, fields=fields)
    upcycle_checkpoint(tmp_path / "dense", tmp_path / "sparse", upcycling)
    for init in ("mean", "aligned_mean", "best"):
        student = student_of(tmp_path / "sparse", init)
        torch.testing.assert_close(logits_of(student), logits_of(dense), **NEAR)
        assert student.config.num_experts == (1 if dense_obstacles(student.config) else 0)
    if granularity < 3:
        assert student.state_dict().keys() == dense.state_dict().keys()
        (tmp_path / "t5").mkdir()
        convert_checkpoint(tmp_path / "sparse_best", tmp_path / "t5", form="t5")


@pytest.mark.parametrize("stacking", [False, True])
def test_a_student_has_no_experts_of_a_prefix(tmp_path, stacking):
    teacher = add_prefixes(parent_model(sparse_dense_stacking=stacking), [MK])
    teacher.save_pretrained(tmp_path / "teacher")
    student = student_of(tmp_path / "teacher", "best")
    assert student.config.num_experts == int(stacking) and student.config.prefix_experts is None


def test_the_aligned_mean_of_shuffled_experts_is_the_teacher_where_the_mean_is_not(tmp_path):
    dense = tiny_model(**DENSE)
    dense.save_pretrained(tmp_path / "dense")
    (tmp_path / "copies").mkdir()
    upcycle_checkpoint(tmp_path / "dense", tmp_path / "copies", Upcycling(num_experts=5))
    teacher = STMoEForConditionalGeneration.from_pretrained(tmp_path / "copies")
    for layer in sparse_layers(teacher).values():
        experts = layer.experts
        for expert in range(5):
            order = torch.randperm(31)
            both = torch.cat([order, 31 + order])
            experts.gate_up_proj.data[expert] = experts.gate_up_proj.data[expert][both]
            experts.down_proj.data[expert] = experts.down_proj.data[expert][:, order]
    teacher.save_pretrained(tmp_path / "shuffled")
    torch.testing.assert_close(logits_of(teacher.eval()), logits_of(dense), **NEAR)
    aligned = student_of(tmp_path / "shuffled", "aligned_mean")
    torch.testing.assert_close(logits_of(aligned), logits_of(dense), **NEAR)
    mean = student_of(tmp_path / "shuffled", "mean")
    assert (logits_of(mean) - logits_of(dense)).abs().max() > 0.01


def test_gates_that_do_not_sum_to_1_scale_the_output(tmp_path):
    """With a router that prefers no expert, the gate of a Switch is 1 / E for all tokens."""
    switch = {"router": "switch", "router_options": None, "num_selected_experts": 1}
    dropless = {"eval_capacity_factor": None, "router_initializer_std": 1e-9}
    teacher = tiny_model(**switch, **dropless, sparse_dense_stacking=False)
    for layer in sparse_layers(teacher).values():
        for weight in layer.experts.parameters():
            weight.data[:] = weight.data[0]
    teacher.save_pretrained(tmp_path / "switch")
    for gates in mean_gates(teacher, [tiny_batch()]).values():
        assert gates.sum() == pytest.approx(1 / 7, abs=1e-6)
    student = student_of(tmp_path / "switch", "best")
    torch.testing.assert_close(logits_of(student), logits_of(teacher), atol=1e-4, rtol=1e-4)


def test_random_layers_depend_on_the_seed_alone_and_the_rest_is_the_teachers(tmp_path):
    teacher = tiny_model(sparse_dense_stacking=False)
    teacher.save_pretrained(tmp_path / "sparse")
    first = student_of(tmp_path / "sparse", "random").state_dict()
    (tmp_path / "again").mkdir()
    config = dense_student_checkpoint(tmp_path / "sparse", tmp_path / "again", "random", {}, 3)
    again = STMoEForConditionalGeneration.from_pretrained(tmp_path / "again").state_dict()
    assert (config.num_experts, config.num_parameters()) == (
        0,
        sum(map(torch.numel, first.values())),
    )
    before = teacher.state_dict()
    for name, weight in first.items():
        source = name.replace(".feed_forward_norm.", ".sparse_norm.")
        is_new = name not in before and source not in before
        assert torch.equal(weight, again[name]) != is_new, name
        if not is_new:
            assert torch.equal(weight, before[name if name in before else source])


def test_what_has_no_place_in_a_dense_block_is_kept_as_one_expert_and_named(tmp_path):
    config = tiny_model(expert_d_ff=23).config
    stacked, width = dense_obstacles(config)
    assert "2 of its 5 blocks" in stacked and "23 hidden units, and d_ff is 31" in width
    student = student_config(config)
    assert (student.num_experts, student.expert_d_ff) == (1, 23)
    tiny_model().save_pretrained(tmp_path / "stacked")
    student_of(tmp_path / "stacked", "mean")
    (tmp_path / "t5").mkdir()
    with pytest.raises(ConfigError, match="it has 1 experts"):
        convert_checkpoint(tmp_path / "stacked_mean", tmp_path / "t5", form="t5")


def test_a_dense_teacher_and_a_text_without_tokens_are_refused():
    with pytest.raises(ConfigError, match="num_experts is 0"):
        student_config(tiny_model(**DENSE).config)
    with pytest.raises(ConfigError, match="additive biases"):
        student_config(tiny_model(expert_bias="additive").config)
    with pytest.raises(ConfigError, match="num_shared_experts of the teacher is 1; expected 0"):
        student_config(tiny_model(num_shared_experts=1).config)
    batch = tiny_batch()
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(DataError, match="token"):
        mean_gates(tiny_model(), [empty])
