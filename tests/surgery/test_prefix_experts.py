"""Experts of a prefix are added and trained: all other texts keep every bit, and mistakes are one line.

Oracles: the model before; the run that was never stopped; counting by hand.
"""

import json
import shutil

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.commands import finetune, upcycle
from moe.data.pair_files import read_pairs
from moe.data.tokenizer import load_tokenizer, train_byte_tokenizer
from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError, MoEError
from moe.kernels.quantized_weight import Quantization
from moe.models import select_parameters
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.serving.batch_generator import BatchGenerator
from moe.sparse.editing import sparse_layers
from moe.surgery.prefix_experts import add_prefix_experts, prefix_config
from moe.surgery.quantize import quantize_checkpoint
from moe.tracing.examples import SourceText, paired_batches
from moe.tracing.recorder import record_routing
from moe.training.recipe import FinetuneRecipe, OptimRecipe
from tests.hosts.tiny_translator import save_m2m100
from tests.models.tiny import DENSE, tiny_model
from tests.surgery.tiny_prefixes import AZ, MK, add_prefixes, batch_with, parent_model

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS = {"num_shared_experts": 1, "eval_capacity_factor": None}


def added(source, folder, record):
    """Returns a saved model with experts of one more prefix, and its config."""
    before = STMoEForConditionalGeneration.from_pretrained(source).config
    number = before.num_experts + record["num_experts"]
    config = prefix_config(before, record["prefix"], record["token_ids"], number)
    folder.mkdir()
    add_prefix_experts(source, folder, config, {})
    return STMoEForConditionalGeneration.from_pretrained(folder).eval()


def first_rows(model, names):
    """Returns the rows of each weight that a smaller model has."""
    weights = model.state_dict()
    return {name: weights[name][: len(weight)] for name, weight in names.items()}


@torch.no_grad()
def logits_of(model, *records):
    """Returns the logits of texts, the first of which have prefixes."""
    return model(**batch_with(*records)).logits


def are_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_each_addition_keeps_the_bits_of_all_weights_and_of_all_other_answers(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        parent = parent_model(decoder_experts=[5], **FIELDS).to(dtype)
        parent.save_pretrained(folder / "parent")
        with_mk = added(folder / "parent", folder / "mk", MK)
        both = added(folder / "mk", folder / "both", AZ)

        assert both.dtype == dtype
        assert both.config.layer_experts(decoder=False) == [7 + 3 + 2]
        assert both.config.layer_experts(decoder=True) == [5 + 3 + 2]
        assert both.config.prefix_experts == [MK, AZ]
        assert are_equal(first_rows(with_mk, parent.state_dict()), parent.state_dict())
        assert are_equal(first_rows(both, with_mk.state_dict()), with_mk.state_dict())

        # In batches without the new texts, which would leave other numbers of rows to an expert.
        assert torch.equal(logits_of(both), logits_of(parent))
        assert torch.equal(logits_of(both, MK), logits_of(with_mk, MK))
        assert not torch.equal(logits_of(both, AZ)[0], logits_of(with_mk, AZ)[0])


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_training_new_experts_changes_their_rows_alone_with_every_optimizer(name):
    for dtype in (torch.float32, torch.bfloat16):
        parent = add_prefixes(parent_model(**FIELDS), [MK])
        model = add_prefixes(parent, [AZ]).to(dtype).train()
        parent = parent.to(dtype)
        select_parameters(model, "new_experts")
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        groups = parameter_groups(model)
        optimizer = OPTIMIZERS.get(name).build(groups, clipping_threshold=1.0, weight_decay=0.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for _ in range(2):
            for records in ((AZ, MK), (MK, AZ)):  # two micro-batches
                model(**batch_with(*records)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        after = model.state_dict()
        assert are_equal(first_rows(model, parent.state_dict()), parent.state_dict())
        moved = {key for key in after if not torch.equal(after[key], before[key])}
        assert moved == {key for key in after if len(after[key]) in (7 + 3 + 2,)}
        assert torch.equal(logits_of(model.eval(), MK), logits_of(parent, MK))


# ---- the commands ----


def upcycle_to(source, target, *more, experts=10):
    words = ["--from", source, "--to", target, "--experts", experts, *more]
    upcycle.main([str(word) for word in words])
    return STMoEForConditionalGeneration.from_pretrained(target).eval()


def tune(folder, out, *more):
    paths = ["--pretrained", folder / "larger", "--train", folder / "pairs.jsonl", "--out", out]
    settings = [
        "--training.steps",
        4,
        "--training.checkpoint_every",
        2,
        "--optim.cooldown_steps",
        0,
    ]
    rows = ["--data.inputs_length", 16, "--data.targets_length", 8, "--training.batch_size", 5]
    subset = ["--parameters", "new_experts", "--optim.lr", 0.5, "--optim.warmup_steps", 1]
    finetune.main([str(word) for word in [*paths, *settings, *rows, *subset, *more]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, and one that has experts of `mk:`, too."""
    folder = tmp_path_factory.mktemp("prefix")
    lines = [json.dumps({"inputs": f"mk: ba {n}", "targets": f"ko {n % 3}"}) for n in range(17)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    train_byte_tokenizer([*lines, *40 * ["a word"]], 367, folder / "tokenizer")
    vocab_size = len(load_tokenizer(folder / "tokenizer"))
    model = parent_model(vocab_size=vocab_size, eval_capacity_factor=None)
    model.save_pretrained(folder / "model")
    load_tokenizer(folder / "tokenizer").save_pretrained(folder / "model")
    upcycle_to(folder / "model", folder / "larger", "--prefix", "mk:")
    return folder


def answers(model, tokenizer, texts):
    """Returns the ids of greedy answers, of a whole batch and of continuous batching."""
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=6)
    streamed = BatchGenerator(model, tokenizer, max_batch=2, max_new_tokens=6).map(texts)
    return ids.tolist(), [answer.text for answer in streamed]


def test_texts_without_the_prefix_are_answered_as_before(folder, tmp_path):
    tune(folder, tmp_path / "run")
    tokenizer = load_tokenizer(folder / "model")
    before = STMoEForConditionalGeneration.from_pretrained(folder / "model").eval()
    after = STMoEForConditionalGeneration.from_pretrained(tmp_path / "run/model").eval()
    texts = ["el: ba 3", "mk", "ba mk: ko", "mk ba: 1"]
    assert answers(after, tokenizer, texts) == answers(before, tokenizer, texts)
    assert answers(after, tokenizer, ["mk: ba 1"]) != answers(before, tokenizer, ["mk: ba 1"])

    # The report and the card name the prefix, whose tokens are those of a text.
    (record,) = after.config.prefix_experts
    text = tokenizer("mk: ba 3").input_ids
    assert record == {
        "prefix": "mk:",
        "token_ids": text[: len(record["token_ids"])],
        "num_experts": 3,
    }
    assert tokenizer.decode(record["token_ids"]) == "mk:"
    report = json.loads((folder / "larger/surgery.json").read_text())
    assert report["tables"][0]["rows"] == [["mk:", "3"]]
    assert "| mk: | 3 |" in (folder / "larger/README.md").read_text()


def test_new_experts_are_copies_of_those_that_the_pairs_use_most(folder, tmp_path):
    more = ["--prefix", "az:", "--pairs", folder / "pairs.jsonl", "--inputs-length", 16]
    larger = upcycle_to(folder / "model", tmp_path / "larger", *more, experts=9)
    model = STMoEForConditionalGeneration.from_pretrained(folder / "model").eval()
    pairs = read_pairs(folder / "pairs.jsonl")
    texts = [SourceText(*pair.texts, 0, "") for pair in pairs]
    batches = paired_batches(
        texts, load_tokenizer(folder / "model"), inputs_length=16, targets_length=16, batch_size=17
    )
    for layer in record_routing(model, batches).layers:
        counts = layer.first.long().bincount(minlength=7)
        experts = sparse_layers(larger)[layer.key].experts.down_proj
        copied = [(experts[:7] == row).flatten(1).all(dim=1).int().argmax() for row in experts[7:]]
        assert sorted(counts[torch.stack(copied)].tolist()) == counts.sort().values[-2:].tolist()


def test_a_resumed_run_equals_the_one_that_was_not_stopped(folder, tmp_path, capsys):
    tune(folder, tmp_path / "whole")
    layer = 3 * (3 * 32 * 48 + 32)
    assert f"new_experts: {2 * layer:,} of" in capsys.readouterr().out
    ignored = shutil.ignore_patterns("model", "step_00000004")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped", ignore=ignored)
    tune(folder, tmp_path / "stopped", "--resume")
    weights = [tmp_path / run / "model/model.safetensors" for run in ("whole", "stopped")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_second_choice_of_parameters_trains_whole_stacks_again():
    model = add_prefixes(parent_model(), [MK])
    counts = [select_parameters(model, name).trainable for name in ("new_experts", "moe")]
    assert counts[0]["experts"] * 10 == counts[1]["experts"] * 3
    model(**batch_with(MK)).loss.backward()
    gates = [layer.router.gate.grad for layer in model.sparse_layers()]
    assert all(grad is not None and grad.any(dim=1).all() for grad in gates)


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("larger", ["--prefix", "mk:"], "begins with the tokens of the prefix 'mk:'"),
        ("larger", ["--prefix", "mk: ba"], "begins with the tokens of the prefix 'mk:'"),
        (
            "model",
            ["--prefix", "az: "],
            "The prefix is 'az: '; expected a whole word, .* its tokens must begin",
        ),
        (
            "model",
            ["--prefix", " "],
            "The prefix is ' '; expected a whole word, .* its tokens must begin",
        ),
        ("model", ["--prefix", "az:", "--granularity", 2], "goes with --experts alone"),
        ("model", ["--prefix", "az:", "--selected", 2], "goes with --experts alone"),
        ("model", ["--prefix", "az:", "--layers", 0], "goes with --experts alone"),
        ("model", ["--prefix", "az:", "--experts", 7], "num_experts is 7; expected more than 7"),
        ("dense", ["--prefix", "az:"], "sparse model of ours, and .*dense is none"),
        ("host", ["--prefix", "az:"], "sparse model of ours, and .*host is none"),
        ("hash", ["--prefix", "az:"], "Router 'hash' cannot have experts of a prefix"),
        ("int8", ["--prefix", "az:"], "quantized to 8 bits"),
        ("alone", ["--prefix", "az:"], "alone has no tokenizer.json"),
    ],
)
def test_what_cannot_get_experts_of_a_prefix_is_one_line(folder, tmp_path, source, more, message):
    if source == "dense":
        tiny_model(**DENSE, vocab_size=367).save_pretrained(tmp_path / source)
    if source == "host":
        save_m2m100(tmp_path / source)
    if source in ("hash", "alone"):
        router = (
            {"router": "hash", "num_selected_experts": 1, "router_options": None}
            if source == "hash"
            else {}
        )
        parent_model(vocab_size=367, **router).save_pretrained(tmp_path / source)
    if source == "int8":
        (tmp_path / source).mkdir()
        quantize_checkpoint(folder / "model", tmp_path / source, Quantization(8))
    if source in ("hash", "int8"):
        load_tokenizer(folder / "tokenizer").save_pretrained(tmp_path / source)
    place = folder if source in ("model", "larger") else tmp_path
    with pytest.raises(MoEError, match=message) as error:
        upcycle_to(place / source, tmp_path / "target", *more, experts=12)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": OptimRecipe(optimizer="adamw", weight_decay=0.1)}, "optim.weight_decay is 0.1"),
        ({"optimizer_state": "keep"}, "optimizer_state is 'keep'; expected reset"),
        ({"init": "scratch"}, "init is 'scratch'; expected pretrained"),
        ({"mesh": MeshConfig(dp_shard=2)}, "The ranks of the mesh is 2; expected 1"),
    ],
)
def test_settings_with_which_other_experts_would_change_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FinetuneRecipe(parameters="new_experts", **settings)


def test_new_experts_need_a_model_that_has_some_and_is_whole():
    with pytest.raises(ConfigError, match=r"^prefix_experts is None; expected experts that train"):
        select_parameters(tiny_model(), "new_experts")
    model = add_prefixes(parent_model(), [MK])
    model.mesh_config = MeshConfig(dp_shard=2)  # as `shard_model` leaves it
    with pytest.raises(ConfigError, match=r"^The mesh of the model is .*; expected none"):
        select_parameters(model, "new_experts")
