"""torch.compile and torch.export: the compiled or exported model gives the numbers of the one that
is not.
"""

import copy
import logging

import pytest
import torch
from torch.export import Dim, export, load, save
from transformers import EncoderDecoderCache, StaticCache
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode

from tests.models.tiny import checkpointed, tiny_batch, tiny_model

LAYERS = {"num_layers": 1, "num_decoder_layers": 1}
SMALL = {**LAYERS, "num_sparse_decoder_layers": 0, "dispatch": "static"}
SPARSE_DECODER = {**LAYERS, "num_sparse_encoder_layers": 0}
pytestmark = [  # of torch's own tracing
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    logging.disable()  # pytest would keep all of torch's tracing
    yield
    logging.disable(logging.NOTSET)
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def loss_and_gradients(model, run):
    loss = run(**tiny_batch()).loss
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.slow
def test_a_training_step_with_activation_checkpointing_and_eager_attention_compiles_into_one_graph():
    model = checkpointed(tiny_model(**SMALL, attn_implementation="eager").train())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(loss_and_gradients(model, compiled), loss_and_gradients(model, model))


@pytest.mark.slow
def test_the_default_dispatch_breaks_no_graph_and_keeps_every_bit_of_the_loss():
    """T5 has no break either; the draws of dropout are those of the model that is not compiled.

    Gradients begin with that of the loss, whose terms a compiled graph adds in another order.
    """
    fields = {**SMALL, "dispatch": "ragged", "expert_dropout_rate": 0.3, "capacity_factor": 0.7}
    model = tiny_model(**fields).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        torch.manual_seed(5)
        results.append(loss_and_gradients(model, run))
    (loss, gradients), (compiled_loss, compiled_gradients) = results
    assert torch.equal(loss, compiled_loss)
    close(gradients, compiled_gradients)


@pytest.mark.slow
def test_a_compiled_model_returns_all_that_is_asked_for():
    model, batch = tiny_model(**SMALL), tiny_batch()
    wanted = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    a, b = compiled(**batch, **wanted), model(**batch, **wanted)
    assert list(a) == list(b)
    for name in ("decoder_hidden_states", "cross_attentions", "encoder_router_logits"):
        close(a[name], b[name])


@pytest.mark.slow
@torch.no_grad()
def test_decoding_through_a_static_cache_compiles_once():
    model, batch = tiny_model(**SPARSE_DECODER, dispatch="static"), tiny_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def decode(step):
        caches = [StaticCache(config=model.config, max_cache_len=size) for size in (17, 13)]
        given = {
            "attention_mask": inputs["attention_mask"],
            "past_key_values": EncoderDecoderCache(*caches),
            "encoder_outputs": model.get_encoder()(**inputs),
            "output_router_logits": False,
        }
        ids = torch.zeros(4, 1, dtype=torch.int64)

        # As in transformers, the first step fills the cross-attention.
        logits = [model(decoder_input_ids=ids, **given).logits]
        for position in range(1, 7):
            ids = logits[-1].argmax(-1)
            logits.append(step(decoder_input_ids=ids, **given).logits)
            if step is compiled and position == 1:
                torch.compiler.set_stance("fail_on_recompile")
        return torch.cat(logits, dim=1)

    expected, before = decode(model), graphs["unique_graphs"]
    close(decode(compiled), expected)
    assert graphs["unique_graphs"] == before + 1
    close(decode(compiled), expected)  # another cache, the same graph


def example(batch=4, length=13, targets=11):
    inputs = tiny_batch(batch, length, targets)
    decoder_ids = inputs.pop("labels").clamp(min=0)
    return inputs | {"decoder_input_ids": decoder_ids}


@pytest.mark.slow
@torch.no_grad()
def test_the_exported_model_gives_the_same_after_saving(tmp_path):
    """With the default dispatch, for which an exported graph has slots, of torch's operations alone."""
    model, inputs = tiny_model(**{**SMALL, "dispatch": "ragged"}), example()
    exported = export(model, (), inputs)
    assert "torch.ops.moe" not in exported.graph_module.code
    save(exported, tmp_path / "model.pt2")
    a, b = load(tmp_path / "model.pt2").module()(**inputs), model(**inputs, use_cache=False)
    assert list(a) == list(b)
    close(
        (a.logits, a.encoder_router_outputs[0].plan.slot),
        (b.logits, b.encoder_router_outputs[0].plan.slot),
    )


@pytest.mark.slow
@torch.no_grad()
def test_batch_and_lengths_of_an_exported_model_may_vary():
    """With one sequence in a group: how many share one is a number of the graph."""
    model = tiny_model(**SMALL, group_size=1)
    varies = {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = dict.fromkeys(example(), varies)
    exported = export(model, (), example(), dynamic_shapes=shapes).module()
    for sizes in ((4, 13, 11), (5, 17, 7)):
        close(exported(**example(*sizes)).logits, model(**example(*sizes)).logits)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`treespec.children_specs` is deprecated:FutureWarning")
def test_transformers_own_exporter_takes_both_stages_of_a_sparse_models_generation():
    model = tiny_model(**SPARSE_DECODER)
    inputs = {name: tiny_batch()[name] for name in ("input_ids", "attention_mask")}
    for stage, given in decompose_prefill_decode(model, inputs).values():
        expected = stage(**copy.deepcopy(given)).logits
        exported = DynamoExporter().export(
            stage, copy.deepcopy(given), config=DynamoConfig(dynamic=True)
        )
        close(exported(**given).logits, expected)
