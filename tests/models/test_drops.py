"""The warning of dropped tokens: when it comes, what it says, and that it comes once for each
model.
"""

import copy
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.models.model_warnings import warn_of_drops
from moe.parsing import read_yaml
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import DropExperts
from tests.models.tiny import tiny_batch, tiny_model

SHORT = {"capacity_factor": 0.05, "eval_capacity_factor": 0.05, "min_expert_capacity": 1}


@pytest.fixture
def said(caplog):
    """Returns the texts of all warnings so far."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "moe.models.model_warnings"
    ]


def test_it_names_stack_share_factor_and_way_out_once_for_each_model(said):
    model, batch = tiny_model(**SHORT), tiny_batch()
    out = model(**batch)
    dropped, tokens = (
        int(getattr(out.encoder_router_outputs[0].stats, n))
        for n in ("dropped_tokens", "num_tokens")
    )
    assert 0.01 < dropped / tokens < 1
    assert len(said()) == 1  # the decoder drops too
    assert said()[0].startswith(
        f"A sparse layer of the encoder dropped {100 * dropped / tokens:.1f} % of the tokens"
    )
    assert "(eval_capacity_factor 0.05: 1 slots an expert)" in said()[0]
    assert said()[0].endswith("; from_pretrained(..., eval_capacity_factor=None) drops none.")
    assert len(said()[0]) < 200
    assert "\n" not in said()[0]
    model(**tiny_batch(seed=1))
    model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)
    assert len(said()) == 1
    copy.deepcopy(model)(**batch)
    assert len(said()) == 2


@pytest.mark.slow
def test_a_model_at_the_address_of_one_that_is_gone_is_heard(said):
    for number in range(1, 6):
        model = tiny_model(**SHORT)
        model(**tiny_batch())
        assert len(said()) == number
        del model
        gc.collect()


def test_what_an_edit_drops_is_no_news_and_the_capacity_is_heard_of_later(said):
    model, batch = tiny_model(**SHORT), tiny_batch()
    edits = {key: DropExperts(2) for key in sparse_layers(model)}
    with edit_routing(model, edits):
        model(**batch)
    assert said() == []
    model(**batch)
    assert len(said()) == 1


def test_the_decoder_is_named_when_it_alone_drops(said):
    tiny_model(**SHORT, num_sparse_encoder_layers=0)(**tiny_batch())
    assert [text[:30] for text in said()] == ["A sparse layer of the decoder "]


def test_generation_speaks_of_the_encoder_whose_tokens_it_drops(said):
    batch = tiny_batch()
    tiny_model(**SHORT).generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2
    )
    assert [text[:30] for text in said()] == ["A sparse layer of the encoder "]


@pytest.mark.parametrize(
    "quiet", ["one in a hundred", "no factor", "training", "padding only", "dense"]
)
def test_it_is_silent_when_nothing_is_to_be_said(said, quiet):
    fields, batch = {**SHORT}, tiny_batch()
    if quiet == "one in a hundred":
        fields["num_experts"], fields["num_selected_experts"] = 1, 1
        fields["eval_capacity_factor"], batch = 0.99, tiny_batch(batch=100, length=1, targets=1)
        batch = {
            "input_ids": batch["input_ids"][:, :1] * 0 + 5,
            "labels": batch["labels"][:, :1] * 0 + 5,
        }
    elif quiet == "no factor":
        fields["eval_capacity_factor"] = None
    elif quiet == "padding only":
        batch = {
            **batch,
            "attention_mask": batch["attention_mask"] * 0,
            "labels": batch["labels"] * 0 - 100,
        }
    elif quiet == "dense":
        fields |= {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
        fields["sparse_dense_stacking"] = False
    model = tiny_model(**fields).train(quiet == "training")
    routers = model(**batch).encoder_router_outputs
    if quiet == "one in a hundred":
        assert [int(router.stats.dropped_tokens) for router in routers] == [1]
    assert said() == []


def test_the_factor_of_a_saved_model_can_be_set_when_it_is_loaded(tmp_path, said):
    tiny_model(**SHORT).save_pretrained(tmp_path)
    model = STMoEForConditionalGeneration.from_pretrained(tmp_path, eval_capacity_factor=None)
    assert model.config.eval_capacity_factor is None
    out = model(**tiny_batch())
    assert all(int(router.stats.dropped_tokens) == 0 for router in out.encoder_router_outputs)
    model = STMoEForConditionalGeneration.from_pretrained(tmp_path, eval_capacity_factor=0.1)
    assert model(**tiny_batch()).encoder_router_outputs[0].plan.capacity == 1
    assert said()


def test_the_demos_fine_tuned_model_is_quiet_about_one_sentence(said):
    recipes = Path(__file__).parents[2] / "recipes"
    changes = read_yaml(recipes / "st_moe_tiny_finetune.yaml")["model"]
    fields = read_yaml(recipes / "st_moe_tiny_pretrain.yaml")["model"]
    sentence = {
        "input_ids": torch.full((1, 10), 5),
        "labels": torch.full((1, 3), 5),
    }  # all tokens want one expert

    STMoEForConditionalGeneration(STMoEConfig(**fields)).eval()(**sentence)
    assert len(said()) == 1
    STMoEForConditionalGeneration(STMoEConfig(**{**fields, **changes})).eval()(**sentence)
    assert len(said()) == 1


def test_training_and_cached_decoding_read_nothing_back_from_the_device(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(tensor.dim()) or tolist(tensor)
    )
    model, batch = (
        tiny_model(**SHORT),
        tiny_batch(),
    )  # the experts of a CPU read their loads, which have one dimension
    model(**batch)
    assert reads.count(2) == 2  # encoder and decoder
    reads.clear()

    memory = model.get_encoder()(batch["input_ids"])
    assert reads.count(2) == 1
    cache = None
    for _ in range(3):
        arguments = {
            "decoder_input_ids": batch["input_ids"][:, :1],
            "past_key_values": cache,
            "use_cache": True,
        }
        cache = model(encoder_outputs=memory, **arguments).past_key_values
    model.train()(**batch)
    assert reads.count(2) == 1


@pytest.mark.slow
def test_a_compiled_model_is_not_broken_by_it(said):
    model, batch = tiny_model(**SHORT, dispatch="static"), tiny_batch()
    counts = torch._dynamo.explain(model.get_encoder())(batch["input_ids"], batch["attention_mask"])
    assert said() == []
    assert counts.graph_break_count == 0, counts.break_reasons


def test_an_absolute_capacity_is_named_and_generation_says_it_too(said):
    model = tiny_model(**{**SHORT, "expert_capacity": 1})
    model.generate(tiny_batch()["input_ids"], max_new_tokens=2)
    assert len(said()) == 1
    assert "encoder" in said()[0]
    assert "(expert_capacity 1: 1 slots an expert)" in said()[0]
    assert said()[0].endswith(
        "; from_pretrained(..., eval_capacity_factor=None, expert_capacity=None) drops none."
    )


def test_a_cuda_graph_is_captured_without_it(monkeypatch):
    """Reading the counts would end the capture; they are missing here, so that reading fails."""
    router = SimpleNamespace(
        plan=SimpleNamespace(capacity=3), router_logits=SimpleNamespace(is_cuda=True)
    )
    arguments = (None, None, None, [router])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    warn_of_drops(*arguments)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(AttributeError, match="stats"):
        warn_of_drops(*arguments)
