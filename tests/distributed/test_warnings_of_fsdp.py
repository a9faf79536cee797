"""What FSDP2 warns of when a model returns views: which they are, and that an update writes into
none of them.

FSDP2 gathers parameters for a backward pass when it reaches a tensor that a module returned. A
write into a view takes that hook away; its warning is left out for the whole model, since nothing
writes there.
"""

import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from moe.distributed.mesh import MeshConfig, build_mesh
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import Stage

VIEWS = {"encoder_router_logits", "decoder_router_logits"}


def update(rank, num_ranks):
    """Returns the warnings of an update, the outputs that are views with a gradient, and those that
    were changed.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage = Stage("adafactor", build_mesh(MeshConfig(dp_shard=num_ranks), "cpu"))
        outputs = []
        stage.model.register_forward_hook(lambda model, args, output: outputs.append(dict(output)))
        stage.step(0)

    views, changed = set(), set()
    for name, value in outputs[0].items():
        tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            if tensor._base is not None and tensor.requires_grad:
                views.add(name)
                if tensor._version:
                    changed.add(name)
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "FSDP" in message], views, changed


@pytest.mark.slow
def test_an_update_on_a_mesh_returns_views_that_nothing_writes_into_and_warns_of_nothing(tmp_path):
    for messages, views, changed in run_ranks(update, 2, tmp_path):
        assert messages == []
        assert views <= VIEWS
        assert changed == set()
