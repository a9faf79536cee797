"""stmoe distill from end to end: a student of a tiny teacher, resumed, on pairs, and on two ranks."""

import json
import shutil

import pytest
import torch
import yaml
from transformers import T5ForConditionalGeneration

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.commands import convert, distill, pretrain
from moe.errors import CheckpointError, ConfigError, DataError
from tests.processes import start_torchrun
from tests.training.tiny_run import MODEL, pretrain_arguments, write_inputs

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    paths = write_inputs(tmp_path_factory.mktemp("inputs"))
    recipe = yaml.safe_load(paths["pretrain.yaml"].read_text())
    recipe["model"] = {**MODEL, "sparse_dense_stacking": False, "dropout_rate": 0.0}
    recipe["training"] |= {"steps": 12, "evaluate_every": 12}
    paths["pretrain.yaml"].write_text(yaml.safe_dump(recipe))
    run = paths["texts"].parent / "teacher"
    pretrain.main(pretrain_arguments(paths, run))
    paths["teacher"] = run / "model"

    # A student's recipe has no architecture.
    del recipe["model"]
    recipe["optim"] = {"schedule": "constant", "lr": 0.01, "warmup_steps": 2}
    recipe["training"] |= {"steps": STEPS, "checkpoint_every": 3}
    paths["distill.yaml"] = paths["texts"].parent / "distill.yaml"
    paths["distill.yaml"].write_text(yaml.safe_dump(recipe))
    return paths


def arguments(inputs, out, *more):
    names = ("--config", inputs["distill.yaml"], "--teacher", inputs["teacher"], "--out", out)
    return [str(part) for part in (*names, *more)]


def distilled(inputs, out, *more):
    """Returns the losses of a run on the corpus."""
    distill.main(arguments(inputs, out, "--corpus", inputs["corpus"], *more))
    return losses(out)


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_a_student_starts_as_the_aligned_mean_and_converts_to_a_t5(inputs, tmp_path, capsys):
    losses = distilled(inputs, tmp_path / "run")
    assert sorted(losses) == list(range(1, STEPS + 1))
    printed = capsys.readouterr().out
    assert "layers in place of experts start as 'aligned_mean'" in printed
    assert "greedy answers that changed" in printed

    model = tmp_path / "run/model"
    config = STMoEConfig.from_pretrained(model)
    report = json.loads((model / "surgery.json").read_text())
    before = STMoEConfig.from_pretrained(inputs["teacher"]).num_parameters()
    assert report["sizes"][0][1:] == [before, config.num_parameters()]
    assert config.num_experts == 0 and report["effects"]["loss"][1] > 0
    student = STMoEForConditionalGeneration.from_pretrained(model).eval()
    words = ["--from", model, "--to", tmp_path / "t5", "--format", "t5"]
    convert.main([str(word) for word in words])
    t5 = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5").eval()
    ids = torch.arange(5, 25).reshape(2, 10)
    torch.testing.assert_close(
        t5(input_ids=ids, labels=ids).logits, student(input_ids=ids, labels=ids).logits
    )

    # A complete run is left as it is; another loss is another run.
    distilled(inputs, tmp_path / "run", "--resume")
    with pytest.raises(DataError, match="already holds a run"):
        distilled(inputs, tmp_path / "run")
    with pytest.raises(CheckpointError, match="hard_weight"):
        distilled(inputs, tmp_path / "run", "--resume", "--distillation.hard_weight", "0.5")
    other = tmp_path / "other"
    shutil.copytree(inputs["teacher"], other)
    teacher = STMoEForConditionalGeneration.from_pretrained(other)
    teacher.lm_head.weight.data *= 2
    teacher.save_pretrained(other)
    with pytest.raises(CheckpointError, match="data"):
        distilled({**inputs, "teacher": other}, tmp_path / "run", "--resume")


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_one_that_was_not(inputs, tmp_path):
    settings = ["--distillation.init", "best"]
    out = tmp_path / "run"
    whole = distilled(inputs, out, *settings)
    weights = (out / "model/model.safetensors").read_bytes()

    # As a kill after step 3 leaves it.
    shutil.rmtree(out / "model")
    shutil.rmtree(out / f"checkpoints/step_{STEPS:08}")
    assert distilled(inputs, out, *settings, "--resume") == whole
    assert (out / "model/model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_a_student_of_its_own_architecture_learns_from_pairs(inputs, tmp_path, capsys):
    """The teacher itself is the student."""
    pairs = [{"inputs": f"ba ko {i}", "targets": "mi ter"} for i in range(20)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    recipe = yaml.safe_load(inputs["distill.yaml"].read_text())
    recipe["data"] = {"inputs_length": 16, "targets_length": 8}
    recipe["model"] = {"dropout_rate": 0.0, "expert_dropout_rate": 0.0}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(recipe))
    paths = {**inputs, "distill.yaml": tmp_path / "pairs.yaml"}
    more = ["--train", file, "--student", inputs["teacher"], "--training.steps", "2"]
    distill.main(arguments(paths, tmp_path / "run", *more))
    assert STMoEConfig.from_pretrained(tmp_path / "run/model").num_experts == MODEL["num_experts"]
    report = json.loads((tmp_path / "run/model/surgery.json").read_text())
    assert report["sizes"][0][1] == report["sizes"][0][2]
    assert not (tmp_path / "run/student").exists()

    distill.main(arguments(paths, tmp_path / "dense", "--train", file, "--training.steps", "2"))
    assert STMoEConfig.from_pretrained(tmp_path / "dense/model").num_experts == 0


@pytest.mark.slow
def test_two_ranks_are_one_process(inputs, tmp_path):
    alone = distilled(inputs, tmp_path / "alone")
    words = arguments(inputs, tmp_path / "two", "--corpus", inputs["corpus"])
    words += ["--mesh.dp_shard", "2", "--training.micro_batch_size", "2"]
    ended = start_torchrun(2, "stmoe", "distill", *words).finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(tmp_path / "two") == pytest.approx(alone, abs=1e-5)


def test_what_does_not_fit_is_refused_before_any_text_is_read(inputs, tmp_path):
    def refuse(match, *more, **replaced):
        with pytest.raises(ConfigError, match=match):
            distill.main(arguments({**inputs, **replaced}, tmp_path / "run", *more))

    corpus = ("--corpus", inputs["corpus"])
    refuse("one of --corpus and --train to train on, got none")
    refuse("got both", *corpus, "--train", "pairs.jsonl")
    refuse("soft_weight is 0", *corpus, "--distillation.soft_weight", "0")
    refuse("init is 'worst'; expected one of random", *corpus, "--distillation.init", "worst")

    # Models of another vocabulary, or without experts.
    config = STMoEConfig.from_pretrained(inputs["teacher"])
    other = tmp_path / "other"
    STMoEForConditionalGeneration(config.replaced(vocab_size=233)).save_pretrained(other)
    refuse("has 233 tokens .* has 230", *corpus, "--student", other)
    dense = {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
    STMoEForConditionalGeneration(config.replaced(**dense)).save_pretrained(tmp_path / "dense")
    refuse("num_experts is 0", *corpus, teacher=tmp_path / "dense")
    assert not (tmp_path / "run").exists()
