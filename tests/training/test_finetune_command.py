"""The fine-tuning command with the kit's settings: what trains, with which slots it starts, where
sentinels stand.

Oracles: the checkpoint of the run before; the run that was never stopped; the texts with a sentinel
put in by hand.
"""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from moe import CheckpointError, ConfigError, STMoEForConditionalGeneration
from moe.checkpoint.integrity import latest_checkpoint
from moe.checkpoint.optimizer_state import load_optimizer_state
from moe.checkpoint.train_state import optimizer_tensors
from moe.checkpoint.writer import load_checkpoint
from moe.commands import finetune, pretrain
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.distributed.mesh import MeshConfig
from moe.models import select_parameters
from moe.models.parallelize import model_layouts
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from tests.training.tiny_run import pretrain_arguments, write_inputs

PAIRS = [
    (f"bakomi {'lan ' * (n % 3)}ter {n}", "su ver" if n % 2 else "ti on al") for n in range(41)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A finished pre-training run, pairs and a recipe."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = write_inputs(folder)
    paths["run"], paths["pairs"] = folder / "pretrain", folder / "pairs.jsonl"
    few = ("--training.steps", 4, "--training.checkpoint_every", 3, "--optim.cooldown_steps", 0)
    pretrain.main(pretrain_arguments(paths, paths["run"], *few))
    lines = [json.dumps({"inputs": one, "targets": other}) for one, other in PAIRS]
    paths["pairs"].write_text("\n".join(lines))
    return paths


def tune(inputs, out, *more, pretrained=None):
    model = pretrained or inputs["run"] / "model"
    paths = ("--pretrained", model, "--train", inputs["pairs"], "--out", out)
    few = ("--training.steps", 4, "--training.checkpoint_every", 2)
    words = ("--config", inputs["finetune.yaml"], *paths, *few, *more)
    finetune.main([str(word) for word in words])
    return out


def losses(out, name="train/loss"):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], repr(line[name])) for line in lines if name in line]


def model_of(out):
    return STMoEForConditionalGeneration.from_pretrained(out / "model")


def state_of(run, subset="all"):
    """Returns the optimizer's state at the end of a run, by `optimizer/NAME/KEY`."""
    model = model_of(run)
    select_parameters(model, subset)
    layouts = model_layouts(model, model.config, MeshConfig())
    optimizer = Adafactor(parameter_groups(model))
    load_checkpoint(latest_checkpoint(run / "checkpoints"), model, optimizer, layouts)
    return optimizer_tensors(model, optimizer, layouts)


@pytest.mark.slow
def test_a_part_of_the_model_trains_is_counted_and_resumes_bit_for_bit(inputs, tmp_path, capsys):
    straight = tune(inputs, tmp_path / "straight", "--parameters", "ffn")
    assert f"ffn: {4 * 3 * 16 * 24:,} of 27,936 parameters train" in capsys.readouterr().out
    before, after = (dict(model_of(run).named_parameters()) for run in (inputs["run"], straight))
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if ".feed_forward." in name}
    assert {key.split("/")[1] for key in state_of(straight, "ffn")} == moved

    stopped = tmp_path / "stopped"
    shutil.copytree(straight, stopped, ignore=shutil.ignore_patterns("model", "step_00000004"))
    tune(inputs, stopped, "--parameters", "ffn", "--resume")
    assert losses(stopped) == losses(straight)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        assert (stopped / "model" / file).read_bytes() == (straight / "model" / file).read_bytes()
    with pytest.raises(CheckpointError, match="parameters was 'ffn' and is 'all'"):
        tune(inputs, straight, "--resume")


# ---- slots ----


def test_kept_slots_are_those_of_the_run_before_for_what_trains(inputs):
    expected, model = state_of(inputs["run"]), model_of(inputs["run"])
    select_parameters(model, "moe")
    layouts = model_layouts(model, model.config, MeshConfig())
    optimizer = Adafactor(parameter_groups(model))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    load_optimizer_state(inputs["run"] / "checkpoints", model, optimizer, layouts, "adafactor")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = optimizer_tensors(model, optimizer, layouts)
    assert kept.keys() == {key for key in expected if key.split("/")[1] in trained}
    for key, value in kept.items():
        assert torch.equal(value, expected[key]), key
        # At 0 the first gradient would replace the moments.
        assert not key.endswith("/step") or int(value) == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.slow
def test_kept_slots_change_the_first_step_and_the_schedule_begins_anew(inputs, tmp_path):
    runs = {
        slots: tune(inputs, tmp_path / slots, "--optimizer_state", slots)
        for slots in ("keep", "reset")
    }
    kept, fresh = (losses(run) for run in runs.values())
    assert kept[0] == fresh[0]  # of the same weights
    assert kept[1] != fresh[1]
    assert losses(runs["keep"], "train/lr") == losses(runs["reset"], "train/lr")
    assert {int(v) for k, v in state_of(runs["keep"]).items() if k.endswith("/step")} == {4 + 4}
    assert {int(v) for k, v in state_of(runs["reset"]).items() if k.endswith("/step")} == {4}

    stopped = tmp_path / "stopped"
    shutil.copytree(runs["keep"], stopped, ignore=shutil.ignore_patterns("model", "step_00000004"))
    tune(inputs, stopped, "--optimizer_state", "keep", "--resume")
    assert losses(stopped) == kept


@pytest.mark.slow
def test_slots_that_cannot_be_kept_are_refused_with_the_way_out(inputs, tmp_path):
    alone, unfinished = tmp_path / "alone", tmp_path / "unfinished"
    shutil.copytree(inputs["run"] / "model", alone / "model")
    shutil.copytree(inputs["run"], unfinished, ignore=shutil.ignore_patterns("step_00000004"))
    keep = ("--optimizer_state", "keep")
    for run, more, message in (
        (alone, (), r"has no checkpoint whose .* --optimizer_state reset"),
        (unfinished, (), "step_00000003 is not from the last step, 4, but the model is"),
        (inputs["run"], ("--optim.optimizer", "adamw"), "state of adafactor, not of adamw"),
        (inputs["run"], ("--init", "scratch"), "'keep'; expected reset, since init is"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            tune(inputs, tmp_path / "run", *keep, *more, pretrained=run / "model")
    frozen = tune(inputs, tmp_path / "frozen", "--parameters", "attention")
    with pytest.raises(CheckpointError, match="no optimizer state of any parameter that trains"):
        tune(inputs, tmp_path / "run", *keep, "--parameters", "ffn", pretrained=frozen / "model")
    tune(inputs, tmp_path / "run", pretrained=alone / "model")  # the default needs the model alone


# ---- sentinels ----


@pytest.fixture(scope="module")
def with_sentinel(inputs, tmp_path_factory):
    return tune(inputs, tmp_path_factory.mktemp("one") / "run", "--data.sentinels", "one")


def test_a_model_tuned_with_a_sentinel_reads_and_writes_it_by_itself(inputs, with_sentinel):
    model = model_of(with_sentinel)
    tokenizer = AutoTokenizer.from_pretrained(with_sentinel / "model")
    first, plain = SpecialIds.of(tokenizer).first_sentinel, load_tokenizer(inputs["tokenizer"])
    texts = [one for one, _ in PAIRS[:5]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for text, ids, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        assert ids[mask == 1].tolist() == [*plain(text)["input_ids"][:-1], first, 1]
    assert tokenizer("ti on " * 9, truncation=True, max_length=7)["input_ids"][-2:] == [first, 1]
    tokens = model.generate(**batch, max_new_tokens=6)
    assert (tokens[:, 1] == first).all()
    assert "extra_id" not in str(tokenizer.batch_decode(tokens, skip_special_tokens=True))


@pytest.mark.slow
def test_a_sentinel_changes_what_is_learnt_and_can_be_left_off_again(
    inputs, with_sentinel, tmp_path
):
    without = tune(inputs, tmp_path / "none")
    assert losses(without) != losses(with_sentinel)
    again = tune(inputs, tmp_path / "again", pretrained=with_sentinel / "model")
    plain = load_tokenizer(inputs["tokenizer"])("su ver")["input_ids"]
    for out in (without, again):
        assert AutoTokenizer.from_pretrained(out / "model")("su ver")["input_ids"] == plain
        assert model_of(out).generation_config.forced_bos_token_id is None
