"""Joined models answer as their parents do, bit for bit, and models of other parents are refused."""

import json

import pytest
import torch

import stmoe
from moe import STMoEForConditionalGeneration
from moe.checksums import SUMS_FILE, sha256_of
from moe.errors import MoEError
from moe.kernels.quantized_weight import Quantization
from moe.models.card import read_card
from moe.sparse.editing import sparse_layers
from moe.surgery.quantize import quantize_checkpoint
from tests.hosts.tiny_translator import save_m2m100
from tests.surgery.tiny_prefixes import AZ, MK, SR, add_prefixes, batch_with, parent_model

pytestmark = pytest.mark.usefixtures("one_thread")


def save(folder, **models):
    """Saves models under their names, and returns their folders."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return [folder / name for name in models]


def join(sources, target):
    """Runs the command, and returns the joined model."""
    stmoe.main(["join", "--from", *map(str, sources), "--to", str(target)])
    return STMoEForConditionalGeneration.from_pretrained(target).eval()


@torch.no_grad()
def outputs(model, *records):
    """Returns the logits for texts with prefixes, and the greedy answers."""
    batch = batch_with(*records)
    logits = model(**batch).logits[batch.pop("labels") != -100]
    return [logits, model.generate(**batch, max_new_tokens=5)]


def assert_same(model, other, *records):
    assert all(map(torch.equal, outputs(model, *records), outputs(other, *records)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "router": "batch_prioritized",
            "decoder_router": "pools",
            "expert_bias": "multiplicative",
            "feed_forward_proj": "relu",
            "num_shared_experts": 1,
            "encoder_experts": [5],
        },
    ],
)
def test_a_joined_model_answers_as_each_parent(tmp_path, fields):
    parent = parent_model(**fields)
    a = add_prefixes(parent, [MK], seed=1)
    b = add_prefixes(parent, [AZ, SR], seed=2)
    sources = save(tmp_path, a=a, b=b)
    joined = join(sources, tmp_path / "joined")
    assert joined.config.prefix_experts == [MK, AZ, SR]
    assert_same(joined, a, MK, MK)
    assert_same(joined, b, AZ, SR, AZ)
    assert_same(joined, parent)
    assert not torch.equal(outputs(joined, SR)[0], outputs(a, SR)[0])

    # The card and the report name the parents, with the checksums that they had.
    report = json.loads((tmp_path / "joined/surgery.json").read_text())
    rows = report["tables"][0]["rows"]
    sums = [sha256_of(source / SUMS_FILE) for source in sources]
    assert rows == [[str(sources[0]), "mk:", sums[0]], [str(sources[1]), "az:, sr:", sums[1]]]
    assert all(digest in (tmp_path / "joined/README.md").read_text() for digest in sums)
    assert len(report["sizes"][0]) == 4


def test_parents_that_had_a_prefix_in_common_keep_it_once(tmp_path):
    common = add_prefixes(parent_model(), [MK])
    a = add_prefixes(common, [AZ], seed=2)
    b = add_prefixes(common, [SR], seed=3)
    a.source_model, b.source_model = "me/names", "who/names"
    joined = join(save(tmp_path, a=a, b=b), tmp_path / "joined")
    assert joined.config.prefix_experts == [MK, AZ, SR]
    assert_same(joined, a, AZ, MK)
    assert_same(joined, b, SR, MK)

    # The hub learns the models that they come from, each once, also of models made from the joined one.
    both = ["me/names", "who/names"]
    assert read_card(tmp_path / "joined/README.md").data.base_model == both
    joined.save_pretrained(tmp_path / "again")
    assert read_card(tmp_path / "again/README.md").data.base_model == both
    c = add_prefixes(common, [{**SR, "prefix": "sl:", "token_ids": [6]}])
    c.source_model = "who/names"
    sources = [tmp_path / "again", *save(tmp_path, c=c)]
    join(sources, tmp_path / "larger")
    assert read_card(tmp_path / "larger/README.md").data.base_model == both


# ---- what is refused ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a parent, a model of it with a prefix, and others that do not fit."""
    folder = tmp_path_factory.mktemp("join")
    parent = parent_model()
    longer = {"prefix": "mk: new", "token_ids": [12, 7, 3], "num_experts": 1}
    save(
        folder,
        parent=parent,
        a=add_prefixes(parent, [MK]),
        b=add_prefixes(parent, [AZ]),
        longer=add_prefixes(parent, [longer]),
        wider=add_prefixes(parent_model(d_ff=64), [SR]),
        fewer=add_prefixes(parent_model(num_experts=6), [SR]),
        half=add_prefixes(parent, [SR]).bfloat16(),
        tokens=add_prefixes(parent, [SR]),
    )
    (folder / "tokens/tokenizer.json").write_text("{}")
    (folder / "int8").mkdir()
    quantize_checkpoint(folder / "b", folder / "int8", Quantization(8))
    save_m2m100(folder / "host")

    # One number is another one: of the head, of a base expert, of its row of the router.
    changed = add_prefixes(parent, [SR])
    layer = sparse_layers(changed)["decoder", 0]
    weights = {"head": changed.lm_head, "expert": layer.experts, "row": layer.router}
    for name, module in weights.items():
        weight = list(module.parameters())[-1].data
        weight[6, 5] += 1e-3
        changed.save_pretrained(folder / name)
        weight[6, 5] -= 1e-3
    return folder


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["a"], "--from is .*expected two models or more"),
        (["a", "a"], "'mk:' begins with the tokens of the prefix 'mk:'"),
        (["a", "longer"], "'mk: new' begins with the tokens of the prefix 'mk:'"),
        (["a", "parent"], "prefix_experts of .*parent is None; expected experts to join"),
        (["a", "host"], "prefix_experts of .*host is None; expected experts to join"),
        (["a", "int8"], "quantized to 8 bits"),
        (["a", "wider"], r"d_ff \(48 and 64\)"),
        (["a", "fewer"], r"num_experts \(7 and 6\)"),
        (["a", "half"], r"dtype \('float32' and 'bfloat16'\)"),
        (["a", "tokens"], "a and .*tokens do not .* differ in tokenizer.json"),
        (["a", "b", "head"], "a and .*head do not .* in row 6 of lm_head.weight"),
        (["a", "expert"], "row 6 of .*decoder.*experts.down_proj"),
        (["a", "row"], "row 6 of .*decoder.*router.gate"),
        (["a", "gone"], "gone"),
    ],
)
def test_models_that_do_not_fit_are_one_line_and_nothing_is_written(folder, sources, message):
    before = sorted(folder.iterdir())
    with pytest.raises(MoEError, match=message) as error:
        join([folder / name for name in sources], folder / "joined")
    assert "\n" not in str(error.value)
    assert sorted(folder.iterdir()) == before


def test_a_model_is_not_overwritten(folder):
    with pytest.raises(MoEError, match="exists already"):
        join([folder / "a", folder / "b"], folder / "parent")
