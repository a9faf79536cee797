"""Detects forward passes that activation checkpointing repeats."""

from torch.utils.module_tracker import ModuleTracker

from moe.kernels.torch_private import is_in_checkpoint


def in_backward() -> bool:
    """Returns whether a backward pass calls this, so that a forward pass in it is a recomputation."""
    return ModuleTracker().is_bw


class Recomputation:
    """Watches the forward passes of a context that layers must still find when they are recomputed.

    Attributes:
        is_due: Whether a later backward pass calls layers again that ran inside the context, and
            has not done so yet.
    """

    def __init__(self) -> None:
        self._is_needed = False
        self._has_happened = False

    def watch(self) -> None:
        """Records that a layer runs now; to be called in its forward pass."""
        self._has_happened |= in_backward()
        self._is_needed |= is_in_checkpoint()

    @property
    def is_due(self) -> bool:
        """Returns whether the backward pass is still to come."""
        return self._is_needed and not self._has_happened
