"""Routed experts in vLLM's layout, beside the choices of the trace."""

import numpy as np

from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.routed_experts import write_routed_experts
from tests.models.tiny import tiny_batch, tiny_model


def test_each_example_has_the_experts_of_its_tokens_by_layer_and_choice(tmp_path):
    model = tiny_model(num_sparse_decoder_layers=3, eval_capacity_factor=None)
    trace = record_routing(model, traced_batches([tiny_batch()]))
    write_routed_experts(trace, tmp_path / "routes.npz")
    arrays = np.load(tmp_path / "routes.npz")
    assert len(arrays) == 2 * trace.facts.num_examples
    for stack in ("encoder", "decoder"):
        part = trace.stack(stack)
        for example in range(trace.facts.num_examples):
            array = arrays[f"{stack}.{example}"]
            start, end = part.starts[example : example + 2].tolist()
            assert array.dtype == np.int32 and array.shape == (end - start, len(part.layers), 2)
            for number, layer in enumerate(part.layers):
                assert array[:, number].tolist() == layer.choices[start:end].tolist()


def test_a_stack_without_sparse_layers_is_left_out(tmp_path):
    model = tiny_model(num_sparse_encoder_layers=0)
    trace = record_routing(model, traced_batches([tiny_batch()]))
    write_routed_experts(trace, tmp_path / "routes.npz")
    assert not [name for name in np.load(tmp_path / "routes.npz") if name.startswith("encoder")]
