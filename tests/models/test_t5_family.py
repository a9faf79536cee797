"""T5's family as it loads, trains, is upcycled and goes back: equal to transformers' own classes."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from moe import CheckpointError, ConfigError, STMoEConfig, STMoEForConditionalGeneration
from moe.convert import conversion_report
from moe.convert.formats import convert_checkpoint
from moe.convert.hf_config import to_hf_config
from moe.surgery.upcycle import Upcycling, upcycle_checkpoint
from tests.models.folders import change_config, change_weights
from tests.models.hf_models import assert_equal_to_rounding
from tests.models.t5_family import FAMILY, family_batch, their_family, unscale, write_hub_config

HEAD = "lm_head.weight"
load = STMoEForConditionalGeneration.from_pretrained


@pytest.fixture(params=FAMILY)
def family(request, tmp_path):
    """A model of transformers, and its folder as on the hub."""
    theirs = their_family(request.param, tmp_path / "theirs")
    write_hub_config(request.param, tmp_path / "theirs")
    return theirs, tmp_path / "theirs"


def take_step(model, batch):
    loss = model.train()(**batch).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def test_logits_loss_beams_and_a_training_step_equal_transformers(family, tmp_path):
    theirs, folder = family
    ours, batch = load(folder), family_batch(theirs)
    assert sum(p.numel() for p in ours.parameters()) == ours.config.num_parameters()
    assert_equal_to_rounding(ours(**batch).logits, theirs(**batch).logits)

    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    beams = [model.generate(**prompt, num_beams=3, max_new_tokens=9) for model in (ours, theirs)]
    assert torch.equal(*beams)
    assert (beams[0][:, 0] == 0).all()

    # The updated model goes back to transformers.
    torch.testing.assert_close(take_step(ours, batch), take_step(theirs, batch))
    ours.save_pretrained(tmp_path / "ours")
    (tmp_path / "back").mkdir()
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", form="t5")
    back = unscale(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back"))
    assert (back.config.model_type == "umt5") == ours.config.relative_bias_in_every_block
    assert_equal_to_rounding(back(**batch).logits, theirs.eval()(**batch).logits)
    for name, weight in back.state_dict().items():
        assert_equal_to_rounding(weight, theirs.state_dict()[name])


def test_copies_of_the_dense_layers_compute_what_they_do(family, tmp_path):
    theirs, folder = family
    (tmp_path / "sparse").mkdir()
    upcycle_checkpoint(folder, tmp_path / "sparse", Upcycling(num_experts=3))
    sparse, batch = load(tmp_path / "sparse"), family_batch(theirs)
    real = batch["labels"] != -100
    assert_equal_to_rounding(sparse(**batch).logits[real], theirs(**batch).logits[real])
    layer = sparse.sparse_layers()[0].config
    assert (layer.activation, layer.gated) == (sparse.config.activation, sparse.config.gated)


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("name", ["T5 1.1", "mT5", "umT5"])
def test_what_transformers_5_writes_as_tied_has_the_head_that_is_stored(tmp_path, name, own_head):
    theirs = their_family(name, tmp_path, own_head=own_head)
    batch = family_batch(theirs)
    assert_equal_to_rounding(load(tmp_path)(**batch).logits, theirs(**batch).logits)
    assert ("transformers 5.0.0 to 5.23" in str(conversion_report(tmp_path))) == (name == "umT5")


def test_a_scaled_head_with_other_numbers_than_the_embedding_is_not_tied(tmp_path):
    theirs = their_family("T5 1.0", tmp_path)
    change_weights(tmp_path, lambda weights: weights.update({HEAD: weights["shared.weight"] + 0.5}))
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    ours, batch = load(tmp_path), family_batch(theirs)
    assert (ours.config.tie_word_embeddings, ours.config.scale_decoder_outputs) == (False, True)
    assert_equal_to_rounding(ours(**batch).logits, theirs(**batch).logits)
    assert conversion_report(tmp_path).mapped[HEAD] == (HEAD,)

    # A head that a user ties, in spite of a config.json that says otherwise, is refused.
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head.weight \(other numbers than shared.weight"):
        load(tmp_path, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("name", "fields", "scaled"),
    [
        ("T5 1.0", {}, True),
        ("mT5", {}, False),
        ("mT5", {"tie_word_embeddings": True}, True),
        ("umT5", {}, True),
        ("umT5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ("umT5", {"tie_word_embeddings": True, "transformers_version": "5.3.0"}, False),
    ],
)
def test_the_tie_flag_of_transformers_4_says_whether_the_head_is_scaled(
    tmp_path, name, fields, scaled
):
    write_hub_config(name, tmp_path, without="tie_word_embeddings", **fields)
    config = STMoEConfig.from_pretrained(tmp_path)
    assert config.scale_decoder_outputs is config.tie_word_embeddings is scaled


def test_a_head_that_umt5_cannot_have_is_an_obstacle():
    config = STMoEConfig(relative_bias_in_every_block=True, scale_decoder_outputs=True)
    with pytest.raises(
        ConfigError, match=r"'umt5'.* scale_decoder_outputs and tie_word_embeddings"
    ):
        to_hf_config(config, "t5")
