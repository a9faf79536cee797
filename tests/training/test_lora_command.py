"""Fine-tuning adapters by the command, from floats and from quantized experts.

Oracles: plain PEFT on the same base; PEFT's own merge; the weights before the run; the run that was
never stopped.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import stmoe
from moe import CheckpointError, ConfigError, STMoEForConditionalGeneration
from moe.checkpoint.index import read_shapes
from moe.checkpoint.loading import load_model
from moe.commands import distill, finetune
from moe.convert.formats import open_checkpoint
from moe.data.tokenizer import train_tokenizer
from moe.kernels.quantized_weight import QuantizedWeight
from moe.training.build import build_model
from moe.training.command import build_recipe
from moe.training.recipe import FinetuneRecipe
from tests.models.tiny import tiny_batch, tiny_model
from tests.processes import Command, start_torchrun
from tests.training.test_finetune_command import losses
from tests.training.test_own_pairs import PAIRS, WORDS, write_pairs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
load = STMoEForConditionalGeneration.from_pretrained
KINDS = {"floats": (), "8 bits": ("--bits", 8), "4 bits": ("--bits", 4, "--group-size", 16)}
FEW = ["--training.steps", 6, "--training.evaluate_every", 3, "--training.checkpoint_every", 2]
FEW += ["--optim.cooldown_steps", 0, "--training.batch_size", 4]


def words(inputs, out, *more, pretrained=None):
    paths = ["--pretrained", pretrained or inputs["floats"], "--train", inputs["pairs"]]
    recipe = ["--config", "finetune_lora", "--lora.rank", 3]
    argv = [*recipe, *paths, "--out", out, *FEW, *more]
    return [str(word) for word in argv]


def tune(*arguments, **options):
    finetune.main(words(*arguments, **options))
    return arguments[1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model in floats, 8 and 4 bits, and pairs."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = {name: folder / name for name in KINDS} | {"pairs": folder / "pairs.jsonl"}
    train_tokenizer([" ".join([*WORDS, "ti"] * 9)], 131, paths["floats"])
    sizes = {"num_experts": 4, "num_heads": 4, "d_model": 48, "d_ff": 32, "group_size": 16}
    tiny_model(vocab_size=131, **sizes).save_pretrained(paths["floats"])
    for name, options in KINDS.items():
        if options:
            argv = ["quantize", "--from", paths["floats"], "--to", paths[name], *options]
            stmoe.main([str(word) for word in argv])
    write_pairs(paths["pairs"], PAIRS)
    return paths


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """A run from each kind of model."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: tune(inputs, folder / name, pretrained=inputs[name]) for name in KINDS}


def logits(model):
    with torch.no_grad():
        return model(**tiny_batch(seed=5)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_keeps_adapters_alone_which_plain_peft_reads_and_a_conversion_merges(
    inputs, runs, tmp_path, kind
):
    for folder in (runs[kind] / "model", runs[kind] / "best" / "model"):
        stored = load_file(folder / "adapter_model.safetensors")
        assert all(".lora_A." in name or ".lora_B." in name for name in stored)
        assert not list(folder.glob("model*.safetensors"))
        adapted = "cross_attention, experts, self_attention"
        card = (folder / "README.md").read_text()
        assert f"LoRA of rank 3 on {adapted} of `{inputs[kind]}`" in card
    assert any(tensor.any() for name, tensor in stored.items() if "lora_B" in name)

    # The same model by plain PEFT; the recipe has no capacity in evaluation.
    model = load(runs[kind] / "model")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    base = load(inputs[kind], eval_capacity_factor=None)
    before = logits(base)
    plain = PeftModel.from_pretrained(base, runs[kind] / "model")
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-6)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    others = [load_model(runs[kind] / "model"), load(runs[kind], subfolder="model")]
    others.append(AutoModelForSeq2SeqLM.from_pretrained(runs[kind] / "model"))
    if kind == "floats":
        mapped = load_model(runs[kind] / "model", mmap=True)  # at other addresses
        torch.testing.assert_close(logits(mapped), logits(model), rtol=0, atol=1e-5)
    for other in others:
        assert torch.equal(logits(other), logits(model))
    dropping = load(runs[kind] / "model", eval_capacity_factor=0.25)
    assert dropping.config.eval_capacity_factor == 0.25
    assert not torch.equal(logits(dropping), logits(model))

    # Merged, quantized experts are floats.
    target = tmp_path / "merged"
    stmoe.main(["convert", "--from", str(runs[kind] / "model"), "--to", str(target)])
    merged = load(target)
    assert merged.config.expert_quantization is None
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert (target / "tokenizer.json").is_file()
    if kind == "floats":
        for name, parameter in plain.merge_and_unload().named_parameters():
            assert torch.equal(parameter, merged.get_parameter(name)), name


def test_what_trains_is_printed_and_a_checkpoint_holds_nothing_else(inputs, tmp_path, capsys):
    run = tune(inputs, tmp_path / "run", "--lora.attention", "false")
    # Two layers, 4 experts, rank 3: A and B of [64, 48] and [48, 32].
    number = 2 * 4 * 3 * (48 + 64 + 32 + 48)
    printed = capsys.readouterr().out
    assert f"lora: {number:,} of" in printed
    assert ["adapters", f"{number:,}", "trains"] in map(str.split, printed.splitlines())
    shapes = read_shapes(run / "checkpoints" / "step_00000006")
    assert shapes and all(".lora_" in name for name in shapes)
    assert any(name.startswith("optimizer/") for name in shapes)
    size = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "/" not in name)
    assert size == number


def test_fresh_adapters_change_nothing_and_are_drawn_as_peft_draws_them_by_the_seed(inputs):
    drawn = []
    for seed in (1, 1, 2):
        recipe = FinetuneRecipe(seed=seed, parameters="lora")
        model = build_model(recipe, load(inputs["floats"]).config, "cpu", inputs["floats"]).model
        drawn.append({n: p for n, p in model.named_parameters() if ".lora_" in n})
    assert torch.equal(logits(model), logits(load(inputs["floats"])))
    for name, value in drawn[0].items():
        assert torch.equal(value, drawn[1][name])
        if ".lora_B." in name:
            assert not value.any()
        else:
            # Uniform up to 1 / sqrt(I).
            assert not torch.equal(value, drawn[2][name])
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["floats", "4 bits"])
def test_a_killed_run_resumes_bit_for_bit(inputs, runs, tmp_path, kind):
    out = tmp_path / "run"
    argv = words(inputs, out, "--training.log_every", 1, pretrained=inputs[kind])
    straight = tune(
        inputs, tmp_path / "straight", "--training.log_every", 1, pretrained=inputs[kind]
    )
    run = Command("stmoe", ["finetune", *argv])
    run.wait_for(lambda: (out / "checkpoints" / "step_00000004").exists())
    run.send_signal(signal.SIGKILL)
    assert run.finish().returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (out / "model").exists()

    finetune.main([*argv, "--resume"])
    assert losses(out) == losses(straight)
    for file in ("adapter_model.safetensors", "config.json", "README.md", "tokenizer.json"):
        assert (out / "model" / file).read_bytes() == (straight / "model" / file).read_bytes()


def test_frozen_quantized_experts_are_saved_as_they_were(inputs, tmp_path):
    """Without adapters, too."""
    subset = ("--config", "finetune_pairs", "--parameters", "attention", "--lora.rank", 8)
    run = tune(inputs, tmp_path / "run", *subset, pretrained=inputs["8 bits"])
    trained, base = load(run / "model"), load(inputs["8 bits"])
    for after, before in zip(trained.sparse_layers(), base.sparse_layers(), strict=True):
        weight = after.experts.down_proj
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.qdata, before.experts.down_proj.qdata)
    assert not torch.equal(logits(trained), logits(base))
    settings = json.loads((run / "checkpoints/step_00000006/state.json").read_text())["recipe"]
    assert "lora" not in settings, "checkpoints of earlier versions have none"

    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("model", "step_00000006"))
    tune(inputs, stopped, *subset, "--resume", pretrained=inputs["8 bits"])
    assert losses(stopped) == losses(run)


def test_an_answer_is_that_of_the_merged_model(runs, inputs, tmp_path, capsys):
    stmoe.main(["convert", "--from", str(runs["floats"] / "model"), "--to", str(tmp_path / "m")])
    answers = []
    for model in (runs["floats"] / "model", tmp_path / "m"):
        capsys.readouterr()
        stmoe.main(["generate", "--model", str(model), *(pair.inputs for pair in PAIRS[:9])])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[0].count("\n") == 9


@pytest.mark.parametrize(
    "verb",
    [
        ("prune", "--keep", 3, "--pairs", "pairs"),
        ("quantize", "--bits", 8),
        ("upcycle", "--experts", 8),
    ],
)
def test_surgery_reads_the_merged_model(runs, inputs, tmp_path, verb):
    name, *options = [inputs["pairs"] if word == "pairs" else word for word in verb]
    stmoe.main(["convert", "--from", str(runs["floats"] / "model"), "--to", str(tmp_path / "m")])
    for source, target in ((runs["floats"] / "model", "adapted"), (tmp_path / "m", "merged")):
        argv = [name, "--from", source, "--to", tmp_path / target, *options]
        stmoe.main([str(word) for word in argv])
    adapted, merged = (load(tmp_path / folder) for folder in ("adapted", "merged"))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-4)


def test_merged_weights_have_no_graph_of_gradients(runs):
    weights = open_checkpoint(runs["floats"] / "model").weights
    assert not any(weight.read().requires_grad for weight in weights.values())


def test_an_exported_graph_contains_the_adapters(runs, tmp_path):
    argv = ["export", "--model", runs["floats"] / "model", "--to", tmp_path / "graphs"]
    stmoe.main([str(word) for word in [*argv, "--format", "torch"]])
    graph = torch.export.load(tmp_path / "graphs" / "encoder_model.pt2").module()
    batch = {name: tiny_batch(seed=5)[name] for name in ("input_ids", "attention_mask")}
    model = load(runs["floats"] / "model")
    with torch.no_grad():
        expected = model.get_encoder()(**batch).last_hidden_state
        mask = batch["attention_mask"].bool()
        torch.testing.assert_close(graph(**batch)[0][mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert any(".lora_" in name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_two_ranks_train_score_and_save_as_one_process_does(inputs, tmp_path):
    rows = ["--data.pack", "true", "--data.inputs_length", 16, "--data.targets_length", 8]
    rows += ["--training.micro_batch_size", 2, "--training.log_every", 1]
    rows += ["--model.dropout_rate", 0, "--model.expert_dropout_rate", 0]
    one = tune(inputs, tmp_path / "one", *rows)
    argv = words(inputs, tmp_path / "two", *rows, "--mesh.ep", 2)
    ended = start_torchrun(2, "stmoe", "finetune", *argv).finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr

    numbers = [[float(loss) for _, loss in losses(run)] for run in (one, tmp_path / "two")]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)
    stored, expected = (
        load_file(run / "model" / "adapter_model.safetensors") for run in (tmp_path / "two", one)
    )
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(stored[name], value, rtol=0, atol=1e-4)
    for file in ("config.json", "README.md"):
        names = [(run / "model" / file).read_bytes() for run in (tmp_path / "two", one)]
        assert names[0] == names[1]

    # Both were scored as they load: the run of ranks by ranks.
    answers = Path("dev", "step_00000006", "answers.jsonl")
    assert (tmp_path / "two" / answers).read_bytes() == (one / answers).read_bytes()


# ---- refusals ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"rank": 3}}, r"lora is .*rank=3.*expected parameters lora with it"),
        ({"parameters": "lora", "init": "scratch"}, "init is 'scratch'; expected pretrained"),
        ({"parameters": "lora", "lora": {"rank": 0}}, r"lora\.rank is 0"),
        (
            {"parameters": "lora", "lora": {"experts": False, "attention": False}},
            r"lora\.experts is False; expected true, or",
        ),
        ({"parameters": "lora", "lora": {"dropout": 1.0}}, r"lora\.dropout is 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_recipe(FinetuneRecipe, settings)


def test_adapters_whose_base_or_file_is_missing_are_refused(runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs["floats"] / "model", tmp_path / "model")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    assert Path(config["base_model_name_or_path"]).is_absolute()
    with monkeypatch.context() as without:
        without.setattr("moe.models.adapter_files.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"holds adapters, .*'stmoe\[finetune\]'"):
            load(folder)

    (folder / "adapter_model.safetensors").rename(tmp_path / "adapters")
    with pytest.raises((CheckpointError, OSError), match="adapter_model"):
        load(folder)
    (tmp_path / "adapters").rename(folder / "adapter_model.safetensors")
    path.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    for read in (load, load_model):
        with pytest.raises(
            CheckpointError, match=rf"adapters of {tmp_path}/gone, which is missing"
        ):
            read(folder)


def test_adapters_are_not_fine_tuned_further(inputs, runs, tmp_path):
    with pytest.raises(ConfigError, match=r"holds adapters, not a model.*stmoe convert --from"):
        tune(inputs, tmp_path / "run", pretrained=runs["floats"] / "model")


def test_a_student_has_weights_of_its_own(inputs, tmp_path):
    argv = ["--teacher", inputs["floats"], "--train", inputs["pairs"], "--out", tmp_path / "run"]
    with pytest.raises(ConfigError, match="parameters is 'lora'; expected a subset of weights"):
        distill.main([*map(str, argv), "--training.batch_size", "4", "--parameters", "lora"])


def test_a_loaded_folder_of_adapters_saves_its_settings(runs, tmp_path):
    model = load(runs["floats"] / "model")
    model.config.layer_norm_epsilon = 1e-2
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.layer_norm_epsilon == 1e-2
    assert again.config.eval_capacity_factor == model.config.eval_capacity_factor
