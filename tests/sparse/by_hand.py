"""Layers whose router can be worked out on a blackboard, and the measure of closeness in float64."""

import torch

from tests.sparse.layers import build_layer


def layer_with_logits(num_experts: int, router: str = "token_choice", **fields):
    """A layer whose inputs are its router's logits: as wide as it has experts, with the identity as
    gate.
    """
    layer = build_layer(router, **{"d_model": num_experts, "num_experts": num_experts, **fields})
    with torch.no_grad():
        layer.router.gate.copy_(torch.eye(num_experts))
    return layer


def logits_of(*probs: list[float]) -> torch.Tensor:
    """One group of tokens [1, S, E], as logits: a row of probabilities per token."""
    return torch.tensor([probs], dtype=torch.float64).log()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, name: str = "", tolerance: float = 1e-12
) -> None:
    """Holds two float64 tensors to `tolerance`, relative to the largest entry where that exceeds 1."""
    assert ours.shape == theirs.shape, name
    largest = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
    bound = tolerance * max(1.0, largest)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound, msg=lambda text: f"{name}: {text}")
