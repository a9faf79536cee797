"""The warning of dropped tokens: when it comes, what it says, and that it comes once for each
model.
"""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.models.model_warnings import warn_of_drops
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import DropExperts
from tests.models.tiny import DENSE, tiny_batch, tiny_model

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
    stats = model(**batch).encoder_router_outputs[0].stats
    share = int(stats.dropped_tokens) / int(stats.num_tokens)
    assert 0.01 < share < 1
    [text] = said()  # the decoder drops too
    assert f"of the encoder dropped {100 * share:.1f} % of the tokens" in text
    assert "(eval_capacity_factor 0.05: 1 slots an expert)" in text
    assert text.endswith("from_pretrained(..., eval_capacity_factor=None) drops none.")
    assert len(text) < 200
    assert "\n" not in text

    model(**tiny_batch(seed=1))
    model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)
    assert len(said()) == 1
    copy.deepcopy(model)(**batch)
    assert len(said()) == 2


def test_a_model_at_the_address_of_one_that_is_gone_is_heard(said):
    for number in range(1, 4):
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


def test_the_stack_that_drops_is_named(said):
    batch = tiny_batch()
    tiny_model(**SHORT, num_sparse_encoder_layers=0)(**batch)
    mask = batch["attention_mask"]
    tiny_model(**SHORT).generate(batch["input_ids"], attention_mask=mask, max_new_tokens=2)
    decoder, encoder = said()
    assert decoder.startswith("A sparse layer of the decoder ")
    assert encoder.startswith("A sparse layer of the encoder ")


def test_it_is_silent_when_nothing_is_to_be_said(said):
    batch = tiny_batch()
    tiny_model(**{**SHORT, "eval_capacity_factor": None})(**batch)
    tiny_model(**SHORT).train()(**batch)
    tiny_model(**{**SHORT, **DENSE})(**batch)
    padding = {"attention_mask": batch["attention_mask"] * 0, "labels": batch["labels"] * 0 - 100}
    tiny_model(**SHORT)(**{**batch, **padding})
    assert said() == []

    # Nor of one token in a hundred.
    one_expert = {"num_experts": 1, "num_selected_experts": 1, "eval_capacity_factor": 0.99}
    ids = torch.full((100, 1), 5)
    routers = tiny_model(**{**SHORT, **one_expert})(input_ids=ids, labels=ids)
    assert [int(r.stats.dropped_tokens) for r in routers.encoder_router_outputs] == [1]
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


def test_an_absolute_capacity_is_named_and_generation_says_it_too(said):
    model = tiny_model(**{**SHORT, "expert_capacity": 1})
    model.generate(tiny_batch()["input_ids"], max_new_tokens=2)
    [text] = said()
    assert "encoder" in text
    assert "(expert_capacity 1: 1 slots an expert)" in text
    assert "(..., eval_capacity_factor=None, expert_capacity=None)" in text


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
