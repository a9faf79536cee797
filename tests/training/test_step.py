"""One update: independent of how the batch is cut, and a function of seed and step."""

import dataclasses

import pytest
import torch

from moe import ConfigError
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.training.build import build_model
from moe.training.metrics import step_values
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from tests.models.tiny import DENSE, tiny_batch, tiny_model
from tests.training.one_step import train_step


def recipe(**training) -> Recipe:
    return Recipe(
        optim=OptimRecipe(schedule="constant", lr=0.01, warmup_steps=0, max_grad_norm=0.5),
        training=TrainingRecipe(steps=5, batch_size=4, **training),
    )


def updated(model, settings, steps=2):
    optimizer = Adafactor(parameter_groups(model))
    metrics = [
        train_step(model, optimizer, settings, tiny_batch(seed=step), step) for step in range(steps)
    ]
    return metrics, [p.detach().clone() for p in model.parameters()]


def assert_same_weights(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


BIASES = {"router": "bias_balanced", "router_options": None}


@pytest.mark.parametrize(
    ("micro", "changes"),
    [
        (1, {}),
        (2, {"balance_scope": "global", "load_balance_loss_weight": 3.0}),
        (1, {"balance_scope": "ranks", "convention": "mesh_tensorflow"}),
        (2, {"convention": "flaxformer"}),
        (1, BIASES),
    ],
    ids=str,
)
def test_the_update_does_not_depend_on_how_the_batch_is_cut(changes, micro):
    models = [tiny_model(group_size=13, **changes).double().train() for _ in range(2)]
    whole, expected = updated(models[0], recipe())
    parts, actual = updated(models[1], recipe(micro_batch_size=micro))
    assert_same_weights(actual, expected)
    for a, b in zip(parts, whole, strict=True):
        assert step_values(a, 1.0) == pytest.approx(step_values(b, 1.0), abs=1e-12)


def test_a_cut_that_changes_the_groups_is_refused_with_the_numbers():
    message = r"4 rows of 13 and 11 tokens .* groups of 2 and 2 .* 1 rows .*group_size to 13"
    with pytest.raises(ConfigError, match=message):
        updated(tiny_model(group_size=26).train(), recipe(micro_batch_size=1))


# The convention also averages them over layers.
NO_ROUTER_LOSSES = {"load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}


def test_where_a_sequence_is_a_group_any_cut_gives_the_update_of_groups_of_one_sequence():
    by_size = {"group_size": 13, "expert_capacity": 2, **NO_ROUTER_LOSSES}
    by_scope = {"group_size": 4096, "expert_capacity": 2, "convention": "switch"}
    by_scope |= NO_ROUTER_LOSSES
    _, expected = updated(tiny_model(**by_size).double().train(), recipe(), steps=1)
    for micro in (None, 1):
        model = tiny_model(**by_scope).double().train()
        _, actual = updated(model, recipe(micro_batch_size=micro), steps=1)
        assert_same_weights(actual, expected)


def test_a_dense_model_is_cut_anyhow():
    models = [tiny_model(**DENSE, group_size=26).double().train() for _ in range(2)]
    _, whole = updated(models[0], recipe(), steps=1)
    _, parts = updated(models[1], recipe(micro_batch_size=1), steps=1)
    assert_same_weights(parts, whole)


def test_randomness_is_a_function_of_seed_and_step():
    changes = {"dropout_rate": 0.3, "router_options": {"second_expert_policy": "random"}}
    (first, *_), weights = updated(tiny_model(**changes).train(), recipe())
    torch.manual_seed(99)
    _, again = updated(tiny_model(**changes).train(), recipe())
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    (other, *_), _ = updated(tiny_model(**changes).train(), dataclasses.replace(recipe(), seed=1))
    assert float(first.ce_loss) != float(other.ce_loss)
    model = tiny_model(**changes).train()
    later = train_step(model, Adafactor(parameter_groups(model)), recipe(), tiny_batch(seed=0), 1)
    assert float(first.ce_loss) != float(later.ce_loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
def test_passes_are_compiled_when_the_recipe_says_so():
    # That compiled passes give the same numbers is tested in tests/models/.
    for compiled in (False, True):
        model = build_model(recipe(compile=compiled), tiny_model().config, "cpu").model
        assert (model._compiled_call_impl is not None) == compiled


def test_a_wide_balance_scope_is_not_the_mean_over_its_parts():
    def loss(scope):
        model = tiny_model(group_size=13, balance_scope=scope).train()
        return updated(model, recipe(), steps=1)[0][0].loss.item()

    assert loss("group") != pytest.approx(loss("global"), abs=1e-6)


def test_biases_move_against_the_load_of_the_whole_update():
    model = tiny_model(group_size=13, **BIASES).train()
    router = model.sparse_layers()[0].router
    load = model(**tiny_batch(seed=0)).encoder_router_outputs[0].stats.expert_load.double()
    updated(model, recipe(micro_batch_size=1), steps=1)
    assert torch.equal(router.load_steps, (load.mean() - load).sign().long())
    assert router.load_steps.any()


def test_bfloat16_computes_in_autocast_and_keeps_float32_weights():
    (metrics,), weights = updated(tiny_model().train(), recipe(precision="bfloat16"), steps=1)
    assert all(weight.dtype == torch.float32 for weight in weights)
    (exact,), _ = updated(tiny_model().train(), recipe(), steps=1)
    assert float(metrics.ce_loss) != float(exact.ce_loss)
    assert float(metrics.ce_loss) == pytest.approx(float(exact.ce_loss), rel=0.02)


def test_the_backward_pass_runs_outside_autocast_so_that_the_routers_gradient_is_not_rounded():
    for micro in (None, 2):
        model, passes = tiny_model(group_size=13).train(), []

        def observe(parameter, passes=passes):
            is_rounded = torch.equal(parameter.grad, parameter.grad.bfloat16().float())
            passes.append((torch.is_autocast_enabled("cpu"), is_rounded))

        gate = model.sparse_layers()[0].router.gate
        gate.register_post_accumulate_grad_hook(observe)
        updated(model, recipe(precision="bfloat16", micro_batch_size=micro), steps=1)
        assert set(passes) == {(False, False)}


def test_metrics_have_the_public_names():
    (metrics,), _ = updated(tiny_model().train(), recipe(), steps=1)
    router = "load_balance_loss router_z_loss fraction_dropped entropy load_cv max_over_mean"
    train = "loss ce_loss grad_norm lr tokens_per_second"
    expected = {f"train/{name}" for name in train.split()}
    for stack in ("encoder", "decoder"):
        expected |= {f"router/{stack}/{name}" for name in (*router.split(), "dead_experts")}
    expected |= {"router/max_vio_p50", "router/max_vio_p95"}
    assert set(step_values(metrics, 7.0)) == expected

    batch = tiny_batch()
    num_tokens = int(batch["attention_mask"].sum() + (batch["labels"] != -100).sum())
    assert int(metrics.tokens) == num_tokens
