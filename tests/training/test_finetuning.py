"""The fine-tuning kit. Oracles: which module a parameter lies in; the run that keeps everything;
counting by hand.
"""

import re

import pytest
import torch

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
from tests.models.tiny import DENSE, tiny_batch, tiny_model
from tests.training.one_step import train_step
from tests.training.tiny_trainer import make_trainer

WHOLE = SUBSETS.keys() - {"new_experts"}
"""Subsets of whole parameters; see tests/surgery/test_prefix_experts.py for rows of them."""


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
    adapters = {name for name in everything if ".lora_" in name}
    if subset == "lora":
        return adapters
    with_adapters = {
        "all": everything,
        "non_moe": everything - sparse,
        "moe": sparse,
        "attention": inside(model, Attention, RelativePositionBias),
        "ffn": inside(model, FeedForward),
        "router_frozen": {name for name in everything if ".router." not in name},
    }
    return with_adapters[subset] - adapters


def trains(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved_since(before, model):
    parameters = model.named_parameters()
    return {name for name, value in parameters if not torch.equal(value, before[name])}


def test_a_subset_is_what_lies_in_its_modules_and_is_counted():
    for fields in ({}, {"expert_bias": "additive", "num_shared_experts": 1}):
        model = tiny_model(**fields)
        model.add_adapter(lora_config(model))
        for subset in WHOLE:  # an earlier choice leaves nothing behind
            selection = select_parameters(model, subset)
            trained, total = sum(selection.trainable.values()), sum(selection.total.values())
            assert trains(model) == members(model, subset)
            assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
            of_adapters = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
            assert total == model.config.num_parameters() + of_adapters

            title, *lines = str(selection).splitlines()
            assert title.startswith(f"{subset}: {trained:,} of {total:,} parameters train (")
            for kind, line in zip(selection.total, lines, strict=True):
                state = "trains" if selection.trainable[kind] else "frozen"
                assert line.split() == [kind, f"{selection.total[kind]:,}", state]


def test_a_subset_that_is_unknown_or_does_nothing_is_refused():
    for fields, subset, message in (
        ({}, "non-moe", "'non-moe'. Did you mean 'non_moe'? Known: all, non_moe,"),
        (DENSE, "moe", "'moe' holds experts and router, and this model has none"),
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
    if subset == "lora":
        model.add_adapter(lora_config(model, init_lora_weights=False))
    select_parameters(model, subset)
    before = copy_of(model)
    recipe = FinetuneRecipe(optim=OptimRecipe(lr=0.01), training=TrainingRecipe(batch_size=4))
    optimizer = Adafactor(parameter_groups(model))
    train_step(model, optimizer, recipe, tiny_batch(), 0)
    return model, optimizer, before


def test_an_update_moves_the_subset_and_nothing_else():
    for subset in WHOLE:
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


# ---- settings of the model ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(expert_dropout_rate=0.0).save_pretrained(folder)
    return folder


def test_a_recipe_and_from_pretrained_give_a_model_the_same_settings(saved):
    for changes in ({}, {"expert_dropout_rate": 0.0, "capacity_factor": 0.25}):
        overrides = finetuning_overrides(**changes)
        model = STMoEForConditionalGeneration.from_pretrained(saved, **overrides)
        config = finetuning_config(saved, FinetuneRecipe(model=changes))
        expected = {"dropout_rate": 0.1, "expert_dropout_rate": 0.4, **changes}
        assert overrides == expected
        assert config.to_dict().items() >= expected.items() <= model.config.to_dict().items()
        rates = [layer.config.expert_dropout_rate for layer in model.sparse_layers()]
        assert rates == [expected["expert_dropout_rate"]] * 2


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
