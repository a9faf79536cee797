"""Routed experts in vLLM's layout: what a file replays is what the trace replays."""

import numpy as np
import pytest
import torch

from moe import DataError
from moe.sparse.all_routers import load_routers
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.replay import replay_routing
from moe.tracing.routed_experts import (
    read_routed_experts,
    routed_experts,
    with_routed_experts,
    write_routed_experts,
)
from tests.models.tiny import tiny_batch, tiny_model
from tests.tracing.models import build_batch, build_model

DROPLESS = {"eval_capacity_factor": None}


def recorded(**changes):
    model = tiny_model(**{**DROPLESS, **changes})
    batch = tiny_batch()
    return model, batch, record_routing(model, traced_batches([batch]))


def test_each_example_has_the_experts_of_its_tokens_by_layer_and_choice():
    _, batch, trace = recorded(num_sparse_decoder_layers=3)
    for stack in ("encoder", "decoder"):
        part = trace.stack(stack)
        arrays = routed_experts(trace, stack)
        assert len(arrays) == len(batch["input_ids"])
        for example, array in enumerate(arrays):
            start, end = part.starts[example : example + 2].tolist()
            assert array.dtype == np.int32 and array.shape == (end - start, len(part.layers), 2)
            for number, layer in enumerate(part.layers):
                assert array[:, number].tolist() == layer.choices[start:end].tolist()


@pytest.mark.parametrize("router", load_routers().names())
def test_a_file_replays_what_the_trace_replays(tmp_path, router):
    model = build_model(router)
    model.config.eval_capacity_factor = None
    batch = build_batch()
    trace = record_routing(model, traced_batches([batch]))
    write_routed_experts(trace, tmp_path / "routes.npz")
    read = read_routed_experts(tmp_path / "routes.npz", trace)
    for part, again in zip(trace.layers, read.layers, strict=True):
        assert torch.equal(part.choices, again.choices)

    # Refused choices are accepted: only then may a replay differ.
    if all((layer.choices.ge(0) == layer.accepted).all() for layer in trace.layers):
        with torch.no_grad(), replay_routing(model, trace):
            expected = model(**batch).logits
        with torch.no_grad(), replay_routing(model, read):
            assert torch.equal(model(**batch).logits, expected)


def test_other_experts_are_replayed():
    model, batch, trace = recorded()
    swapped = [(array + 1) % 7 for array in routed_experts(trace, "decoder")]
    other = with_routed_experts(trace, "decoder", swapped)
    with replay_routing(model, other), torch.no_grad():
        output = model(**batch, output_router_logits=True)
    index = output.decoder_router_outputs[0].plan.expert_index.flatten(0, 1)
    is_real = (batch["labels"] != -100).flatten()
    assert index[is_real].tolist() == np.concatenate(swapped)[:, 0].tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint64])
def test_experts_may_be_of_any_integer_dtype(dtype):
    _, _, trace = recorded()
    swapped = [(array + 1) % 7 for array in routed_experts(trace, "encoder")]
    other = with_routed_experts(trace, "encoder", [array.astype(dtype) for array in swapped])
    for array, again in zip(swapped, routed_experts(other, "encoder"), strict=True):
        assert np.array_equal(array, again)


def test_files_and_arrays_that_do_not_fit_are_refused(tmp_path):
    _, _, trace = recorded()
    arrays = routed_experts(trace, "encoder")
    with pytest.raises(DataError, match="same expert twice"):
        with_routed_experts(
            trace, "encoder", [array[..., :1].repeat(2, axis=2) for array in arrays]
        )
    with pytest.raises(DataError, match="65535"):
        none = [np.full_like(array, -1).astype(np.uint16) for array in arrays]
        with_routed_experts(trace, "encoder", none)
    for wrong in (
        arrays[:-1],
        [array[:, :, :1] for array in arrays],
        [array[:-1] for array in arrays],
    ):
        with pytest.raises(DataError, match="routed experts"):
            with_routed_experts(trace, "encoder", wrong)
    for wrong in ([array * 0 + 7 for array in arrays], [array * 0 - 2 for array in arrays]):
        with pytest.raises(DataError, match="expected 0 to 6"):
            with_routed_experts(trace, "encoder", wrong)
    with pytest.raises(DataError, match="float64"):
        with_routed_experts(trace, "encoder", [array * 1.0 for array in arrays])
    with pytest.raises(DataError, match="no sparse layer"):
        routed_experts(recorded(num_sparse_encoder_layers=0)[2], "encoder")

    path = tmp_path / "a.npz"
    write_routed_experts(trace, path)
    whole = path.read_bytes()
    flags = whole.index(b"PK\x01\x02") + 8
    encrypted = whole[:flags] + b"\1" + whole[flags + 1 :]
    torn = whole[:104] + bytes(50) + whole[154:]
    for content in (b"", b"PK\x03\x04 cut off", b"\x93NUMPY", encrypted, torn):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as routed experts"):
            read_routed_experts(path, trace)
    with path.open("wb") as file:
        np.save(file, arrays[0])
    with pytest.raises(DataError, match="single array"):
        read_routed_experts(path, trace)
    np.savez(path, **{"encoder.0": arrays[0]})
    with pytest.raises(DataError, match=r"no array 'encoder\.1'"):
        read_routed_experts(path, trace)
    np.savez(path, **{"encoder.0": np.array([print], dtype=object)})
    with pytest.raises(DataError, match="pickle"):
        read_routed_experts(path, trace)
