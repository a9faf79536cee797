"""Fine-tuning with transformers' Seq2SeqTrainer against one whole batch, the model itself, and a
run left alone.

Weights of the auxiliary losses are large and labels ragged, so that a factor too many or too few
shows.
"""

import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import TensorBoardCallback

from moe import ConfigError, STMoEForConditionalGeneration
from moe.training.callback import RouterStatsCallback
from tests.models.tiny import tiny_model
from tests.training.test_router_health import with_dead_expert
from tests.training.tiny_trainer import HEAVY, LEARNS, examples, make_trainer, tokenizer, train

STATISTICS = ("load_balance_loss", "router_z_loss", "fraction_dropped", "entropy", "load_cv")
STATISTICS += ("max_over_mean", "dead_experts")
NAMES = {f"router/{stack}/{name}" for stack in ("encoder", "decoder") for name in STATISTICS}
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def assert_same_run(ours, theirs, atol):
    (parameters, lines), (expected, expected_lines) = ours, theirs
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=atol, msg=name)
    for line, expected_line in zip(lines, expected_lines, strict=True):
        # The Trainer adds losses up in float32.
        assert line == pytest.approx(expected_line, rel=max(1e-6, atol))


# ---- however a batch is cut ----

CUTS = {
    "one by one": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "every second block checkpointed": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"every_n_layers": 2},
    },
}
CHECKPOINTED = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "activation_checkpointing": True,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_a_batch_cut_into_micro_batches_gives_the_same_losses_and_weights(whole, tmp_path, cut):
    before = tiny_model(**HEAVY).double().state_dict()
    assert max(float((whole[0][name] - before[name]).abs().max()) for name in before) > 1e-3
    assert_same_run(train(tmp_path, **CUTS[cut]), whole, 1e-10)


@pytest.mark.slow
def test_so_it_does_in_float32_with_dropped_tokens_smoothed_labels_and_adamw(tmp_path):
    changes = {**HEAVY, "group_size": 1, "label_smoothing": 0.1, "min_expert_capacity": 1}
    settings = {"pad_to_multiple_of": 13, "optim": "adamw_torch", "max_grad_norm": 1.0}
    whole = train(tmp_path / "whole", tiny_model(**changes), **settings)
    cut = train(tmp_path / "cut", tiny_model(**changes), **settings, **CHECKPOINTED)
    assert whole[1][0]["router/encoder/fraction_dropped"] > 0
    assert_same_run(cut, whole, 1e-5)


def test_groups_of_several_sequences_keep_their_losses_while_no_micro_batch_cuts_them(tmp_path):
    settings = {"pad_to_multiple_of": 13, "data": examples(16), "max_steps": 1}
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    models = [tiny_model(**HEAVY, group_size=26).double() for _ in range(2)]
    whole = train(tmp_path / "whole", models[0], **settings)
    assert_same_run(train(tmp_path / "cut", models[1], **settings, **cut), whole, 1e-10)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_reentrant_activation_checkpointing_is_refused_by_its_old_name_too(tmp_path):
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, **reentrant)
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        trainer.train()


# ---- what is logged ----


def test_the_log_holds_the_parts_of_the_loss_and_exact_statistics_of_all_updates_since_the_last(
    tmp_path,
):
    model = tiny_model(**HEAVY, group_size=1).double()
    trainer = make_trainer(
        tmp_path,
        model,
        callbacks=[RouterStatsCallback()],
        learning_rate=0.0,
        logging_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        eval_dataset=examples(5),
    )
    seen = []
    hook = model.register_forward_hook(lambda _, __, output: seen.append(output))
    trainer.train()
    hook.remove()
    line = trainer.state.log_history[0]
    assert line.keys() >= NAMES | {"loss", "ce_loss", "z_loss", "grad_norm", "learning_rate"}
    assert {type(line[name]) for name in NAMES | {"ce_loss", "z_loss"}} == {float}

    def mean(name):
        return sum(float(getattr(output, name).detach()) for output in seen) / 3

    assert len(seen) == 12
    for name in ("loss", "ce_loss", "z_loss"):
        assert line[name] == pytest.approx(mean(name), rel=1e-6)
    weights = {"ce_loss": 1, "z_loss": 0.5, "load_balance_loss": 3, "router_z_loss": 2}
    parts = sum(weight * mean(name) for name, weight in weights.items())
    assert line["loss"] == pytest.approx(parts, rel=1e-6)
    for stack in ("encoder", "decoder"):
        stats = [getattr(output, f"{stack}_router_outputs")[0].stats for output in seen]
        total = stats[0]
        for more in stats[1:]:
            total = total + more
        expected = total.summary()
        for name in STATISTICS:
            assert line[f"router/{stack}/{name}"] == pytest.approx(expected[name], rel=1e-9), name


def test_evaluation_adds_nothing_to_the_log_of_training_and_the_model_is_left_as_it_was(tmp_path):
    runs = []
    for evaluate in (False, True):
        settings = {"eval_strategy": "steps", "eval_steps": 1} if evaluate else {}
        model = tiny_model(**HEAVY, group_size=1, output_router_logits=False).double()
        trainer = make_trainer(
            tmp_path,
            model,
            callbacks=[RouterStatsCallback()],
            eval_dataset=examples(5),
            logging_steps=2,
            max_steps=2,
            **settings,
        )
        trainer.train()
        runs.append([line for line in trainer.state.log_history if "loss" in line])
        assert not model._forward_hooks and not model._forward_pre_hooks
        assert not model.config.output_router_logits
    assert runs[0] == runs[1]
    assert runs[0][0].keys() >= NAMES


def test_a_reporter_behind_the_callback_has_its_numbers_and_one_before_it_is_warned_of(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make_trainer(tmp_path, callbacks=[RouterStatsCallback(), TensorBoardCallback()]).train()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    expected = {f"train/{name}" for name in NAMES | {"loss", "ce_loss", "z_loss"}}
    assert set(board.Tags()["scalars"]) >= expected
    assert [event.step for event in board.Scalars("train/router/encoder/entropy")] == [1, 2, 3]

    trainer = make_trainer(
        tmp_path, callbacks=[RouterStatsCallback()], report_to="tensorboard", max_steps=1
    )
    with pytest.warns(
        UserWarning, match=r"callbacks=\[RouterStatsCallback\(\), TensorBoardCallback\(\)\]"
    ):
        trainer.train()


def test_the_callback_refuses_a_model_of_another_library():
    with pytest.raises(ConfigError, match="RouterStatsCallback was given to a Trainer of Linear"):
        RouterStatsCallback().on_train_begin(None, None, None, model=torch.nn.Linear(2, 3))


@pytest.mark.slow
def test_a_router_that_learns_of_its_load_learns_once_an_update(tmp_path):
    def model():
        return tiny_model(**{**HEAVY, **LEARNS}, group_size=1, capacity_factor=None).double()

    whole = train(tmp_path, model())
    steps = [value for name, value in whole[0].items() if name.endswith("load_steps")]
    assert len(steps) == 2 and all(0 < value.abs().max() <= 3 for value in steps)
    assert_same_run(train(tmp_path, model(), **CHECKPOINTED), whole, 1e-10)


# ---- settings of the Trainer ----


@pytest.mark.slow
def test_a_resumed_run_ends_bit_for_bit_like_one_left_alone_and_its_checkpoint_is_a_model(tmp_path):
    settings = {
        "max_steps": 4,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
    }

    def trainer(out):
        model = tiny_model(**{**HEAVY, **LEARNS}, dropout_rate=0.1)
        return make_trainer(out, model, callbacks=[RouterStatsCallback()], **settings)

    alone = trainer(tmp_path)
    alone.train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal_weights(resumed.model, alone.model)
    logs = [[line for line in run.state.log_history if "loss" in line] for run in (resumed, alone)]
    assert logs[0] == logs[1]

    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-4")
    assert_equal_weights(loaded, alone.model)


def assert_equal_weights(model, expected):
    weights = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_predictions_are_what_the_model_generates_and_the_loss_is_that_of_the_batch(tmp_path):
    seen = {}

    def metrics(prediction):
        seen["ids"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"rows": len(prediction.predictions)}

    model, data = tiny_model(**HEAVY, group_size=1, eval_capacity_factor=None), examples(5)
    trainer = make_trainer(
        tmp_path,
        model,
        eval_dataset=data,
        compute_metrics=metrics,
        predict_with_generate=True,
        generation_max_length=9,
        per_device_eval_batch_size=5,
    )
    result = trainer.evaluate()
    assert result["eval_rows"] == 5
    batch = trainer.data_collator([dict(row) for row in data])
    mask = batch["attention_mask"]
    expected = model.generate(batch["input_ids"], attention_mask=mask, max_length=9)
    assert seen["ids"][:, : expected.shape[1]].tolist() == expected.tolist()
    assert result["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert trainer.predict(data).predictions.tolist() == seen["ids"].tolist()


def test_the_examples_of_the_guide_run_as_written(tmp_path, monkeypatch, capsys):
    guide = Path("docs/guides/finetune.md").read_text(encoding="utf-8")
    blocks = [
        code
        for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
        if "Seq2SeqTrainer" in code
    ]
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("runs/demo/model")
    tokenizer().save_pretrained("runs/demo/model")
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    printed = capsys.readouterr().out
    assert "router/encoder/entropy" in printed and "'ce_loss'" in printed and "eval_loss" in printed


def test_with_a_loss_of_the_users_own_the_callback_logs_the_routers_part(tmp_path):
    weightless = dict.fromkeys(
        ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight"), 0.0
    )
    callbacks = [RouterStatsCallback()]
    trainer = make_trainer(tmp_path, tiny_model(**weightless), callbacks=callbacks, max_steps=1)
    collate = trainer.data_collator

    def with_decoder_mask(rows):
        batch = collate(rows)
        return batch | {"decoder_attention_mask": (batch["labels"] != -100).long()}

    def loss(output, labels, num_items_in_batch):
        return output.logits.square().mean()

    trainer.data_collator, trainer.compute_loss_func = with_decoder_mask, loss
    trainer.train()
    (logged,) = [line for line in trainer.state.log_history if "loss" in line]
    assert "router/decoder/load_cv" in logged and "ce_loss" not in logged


def test_the_callback_warns_of_an_expert_that_is_dead(tmp_path, caplog):
    model = tiny_model(**HEAVY)
    with_dead_expert(model.sparse_layers()[0].router.gate)
    settings = {"learning_rate": 0.0, "max_steps": 12, "data": examples(96)}
    make_trainer(tmp_path, model, callbacks=[RouterStatsCallback()], **settings).train()
    texts = [record.getMessage() for record in caplog.records]
    dead = [text for text in texts if "are dead" in text]
    assert len(dead) == 1 and "1 of 7 experts of encoder 1" in dead[0]
