"""What a rank sends lives until it is sent: another thread reads it meanwhile."""

import pytest
import torch
import torch.distributed as dist

from moe.distributed.all_to_all import AllToAllStep


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_transfer_holds_the_copy_that_it_sends(one_rank, monkeypatch, reverse):
    sent = []
    exchange = dist.all_to_all_single

    def watched(output, input, **options):
        sent.append(input)
        return exchange(output, input, **options)

    # Columns are copied before they are sent, and nobody else holds that copy.
    monkeypatch.setattr(dist, "all_to_all_single", watched)
    x = torch.arange(12.0).view(3, 4).t()
    order = torch.tensor([3, 1, 0, 2])
    transfer = AllToAllStep(one_rank, order).issue(x, reverse=reverse)
    assert transfer.sent is sent[0]

    arrived = transfer.wait()
    expected = torch.empty_like(x).index_copy(0, order, x) if reverse else x[order]
    assert torch.equal(arrived, expected)
