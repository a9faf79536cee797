"""The fine-tuning kit. Oracles: which module a parameter lies in; the run that keeps everything;
counting by hand.
"""

import re

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from moe import ConfigError, STMoEForConditionalGeneration, lora_config
from moe.models import select_parameters
from moe.models.attention import Attention, RelativePositionBias
from moe.models.blocks import FeedForward
from moe.models.trainable_parameters import SUBSETS
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.sparse.layer import SparseFeedForward
from moe.training.build import build_model
from moe.training.callback import RouterStatsCallback
from moe.training.finetuning import finetuning_config, finetuning_overrides
from moe.training.recipe import FinetuneRecipe, OptimRecipe, TrainingRecipe
from moe.training.step import train_step
from tests.models.tiny import DENSE, tiny_batch, tiny_model
from tests.training.tiny_trainer import make_trainer


def inside(model, *kinds):
    """Returns the names of the parameters in modules of these kinds."""
    modules = [
        (prefix, module) for prefix, module in model.named_modules() if isinstance(module, kinds)
    ]
    return {
        f"{prefix}.{name}" for prefix, module in modules for name, _ in module.named_parameters()
    }


def members(model, subset):
    """Returns by the modules what should train."""
    everything = {name for name, _ in model.named_parameters()}
    sparse = inside(model, SparseFeedForward)
    return {
        "all": everything,
        "non_moe": everything - sparse,
        "moe": sparse,
        "attention": inside(model, Attention, RelativePositionBias),
        "ffn": inside(model, FeedForward),
        "router_frozen": {name for name in everything if ".router." not in name},
    }[subset]


def trains(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved_since(before, model):
    parameters = model.named_parameters()
    return {name for name, value in parameters if not torch.equal(value, before[name])}


def test_a_subset_is_what_lies_in_its_modules_and_is_counted():
    for fields in ({}, {"expert_bias": "additive", "tie_word_embeddings": True}):
        model = tiny_model(**fields)
        for subset in SUBSETS:  # an earlier choice leaves nothing behind
            selection = select_parameters(model, subset)
            trained, total = sum(selection.trainable.values()), sum(selection.total.values())
            assert trains(model) == members(model, subset)
            assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert total == model.config.num_parameters() == sum(selection.total.values())

            title, *lines = str(selection).splitlines()
            assert title.startswith(f"{subset}: {trained:,} of {total:,} parameters train (")
            for kind, line in zip(selection.total, lines, strict=True):
                state = "trains" if selection.trainable[kind] else "frozen"
                assert line.split() == [kind, f"{selection.total[kind]:,}", state]


def test_the_encoder_alone_has_subsets_too():
    model = tiny_model()
    assert select_parameters(model.get_encoder(), "moe").trainable["experts"] > 0
    assert all(
        name.startswith("model.decoder") or ".sparse_feed" in name or "lm_head" in name
        for name in trains(model)
    )


def test_a_subset_that_is_unknown_or_does_nothing_is_refused():
    for fields, subset, message in (
        ({}, "non-moe", "'non-moe'. Did you mean 'non_moe'? Known: all, non_moe,"),
        (DENSE, "moe", "'moe' holds experts and router, and this model has none"),
        (DENSE, "non_moe", "'non_moe' freezes experts and router, and this model has none"),
    ):
        model = tiny_model(**fields)
        with pytest.raises(ConfigError, match=re.escape(message)):
            select_parameters(model, subset)
        assert trains(model) == members(model, "all")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_not_a_model_to_choose_from():
    from peft import get_peft_model

    with pytest.raises(
        ConfigError, match="got a PeftModelForSeq2SeqLM; expected a model of this library"
    ):
        select_parameters(get_peft_model(tiny_model(), lora_config(tiny_model())), "all")


def updated(subset, **fields):
    """Returns a model of which a subset took one step, its optimizer, and the weights before."""
    model = tiny_model(**fields).train()
    select_parameters(model, subset)
    before = copy_of(model)
    recipe = FinetuneRecipe(optim=OptimRecipe(lr=0.01), training=TrainingRecipe(batch_size=4))
    optimizer = Adafactor(parameter_groups(model))
    train_step(model, optimizer, recipe, tiny_batch(), 0)
    return model, optimizer, before


def test_an_update_moves_the_subset_and_nothing_else():
    for subset in SUBSETS:
        model, optimizer, before = updated(subset, dropout_rate=0.1)
        moved = moved_since(before, model)
        assert moved == members(model, subset)
        with_state = {id(parameter) for parameter in optimizer.state}
        assert with_state == {id(p) for name, p in model.named_parameters() if name in moved}


def loads_counted(model):
    return [bool(layer.router.load_steps.any()) for layer in model.sparse_layers()]


@pytest.mark.filterwarnings("ignore:The reporters of report_to")
def test_a_frozen_router_keeps_its_balancing_biases_under_the_trainers_callback_too(tmp_path):
    fields = {"router": "bias_balanced", "router_options": None}
    for subset, moves in (("all", True), ("non_moe", False)):
        assert loads_counted(updated(subset, **fields)[0]) == [moves, moves]

    model = tiny_model(**fields)
    select_parameters(model, "router_frozen")
    make_trainer(tmp_path, model, callbacks=[RouterStatsCallback()], max_steps=1).train()
    assert loads_counted(model) == [False, False]


# ---- transformers' trainer ----


def examples():
    batch = tiny_batch(batch=8)
    return [{name: values[row] for name, values in batch.items()} for row in range(8)]


def run_trainer(model, folder, steps):
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=examples())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


TRAINER_WARNINGS = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)


@TRAINER_WARNINGS
def test_under_transformers_trainer_frozen_parameters_get_no_gradient_and_stay(tmp_path):
    model = tiny_model()
    with_gradient = set()
    select_parameters(model, "ffn")
    before = copy_of(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, n=name: with_gradient.add(n))
    run_trainer(model, tmp_path, steps=2)
    moved = moved_since(before, model)
    assert moved == with_gradient == members(model, "ffn")
    assert all(p.grad is None for name, p in model.named_parameters() if name not in moved)


@TRAINER_WARNINGS
def test_under_transformers_trainer_adapters_learn_and_the_base_stays(tmp_path):
    from peft import get_peft_model

    base = tiny_model()
    before = copy_of(base)
    losses = run_trainer(get_peft_model(base, lora_config(base)), tmp_path, steps=10)
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
    after = {
        name.replace(".base_layer", ""): parameter
        for name, parameter in base.named_parameters()
        if "lora" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(parameter, before[name]) for name, parameter in after.items())


# ---- settings of the model ----


def tuned(folder, **changes):
    """Returns a saved model with the settings of fine-tuning, read both ways: by a recipe and by
    from_pretrained.
    """
    overrides = finetuning_overrides(**changes)
    model = STMoEForConditionalGeneration.from_pretrained(folder, **overrides)
    config = finetuning_config(folder, FinetuneRecipe(model=changes))
    assert config.to_dict().items() >= overrides.items()
    for name in overrides:
        assert getattr(model.config, name) == getattr(config, name)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(
        router_options={"second_expert_policy": "all"}, expert_dropout_rate=0.0
    ).save_pretrained(folder)
    return folder


OFF = {"dropout_rate": 0.0, "expert_dropout_rate": 0.0}


def output(model, training=True, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.train(training)(**tiny_batch())


def test_dropout_and_expert_dropout_act_in_training_only_and_apart(saved):
    plain = tuned(saved, **OFF)
    assert torch.equal(output(plain).logits, output(plain, seed=1).logits)
    expected = output(plain, training=False).logits
    for changes in ({}, {**OFF, "dropout_rate": 0.1}, {**OFF, "expert_dropout_rate": 0.4}):
        model = tuned(saved, **changes)
        assert not torch.equal(output(model).logits, output(model, seed=1).logits), changes
        assert torch.equal(output(model, training=False).logits, expected)
        if not changes:
            assert (model.config.dropout_rate, model.config.expert_dropout_rate) == (0.1, 0.4)
            rates = [layer.config.expert_dropout_rate for layer in model.sparse_layers()]
            assert rates == [0.4, 0.4]


def test_capacity_overrides_act_in_training_and_in_evaluation_apart(saved):
    def dropped(capacity_factor, eval_capacity_factor):
        """Returns the dropped tokens of a training and an evaluation pass."""
        factors = {"capacity_factor": capacity_factor, "eval_capacity_factor": eval_capacity_factor}
        model = tuned(saved, **OFF, min_expert_capacity=1, **factors)
        routers = [output(model, training).encoder_router_outputs[0] for training in (True, False)]
        return [float(router.stats.dropped_tokens) for router in routers]

    in_training, none = dropped(0.25, 7.0)
    also_none, in_evaluation = dropped(7.0, 0.25)
    assert in_training > 0 and in_evaluation > 0
    assert [none, also_none] == dropped(None, None) == [0, 0]


def test_the_auxiliary_loss_is_on_by_default_and_off_by_its_weight(saved):
    on, off = (
        output(tuned(saved, **OFF, **changes))
        for changes in ({}, {"load_balance_loss_weight": 0.0})
    )
    assert float(on.load_balance_loss) > 0
    assert float(off.loss) == pytest.approx(
        float(on.loss) - 0.01 * float(on.load_balance_loss), abs=1e-6
    )
    assert torch.equal(on.logits, off.logits)


def test_overrides_of_the_architecture_and_unknown_ones_are_refused():
    with pytest.raises(ConfigError, match=r"capacity_facter is not .*mean 'capacity_factor'"):
        finetuning_overrides(capacity_facter=2.0)
    with pytest.raises(
        ConfigError, match=r"model\.d_model would change the weights.* init scratch"
    ):
        finetuning_overrides(d_model=3)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is not a setting"):
        FinetuneRecipe(init="scratch", model={"vocab_size": 3})


def test_fresh_weights_may_have_another_architecture(saved):
    changes = {"num_experts": 5, "d_ff": 24}
    recipe = FinetuneRecipe(init="scratch", model=changes)
    config = finetuning_config(saved, recipe)
    model = build_model(recipe, config, "cpu").model
    assert (model.config.num_experts, model.config.d_ff) == (5, 24)
    assert model.config.d_model == finetuning_config(saved, FinetuneRecipe()).d_model
