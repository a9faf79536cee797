"""Benchmark cases: sizes, the tensors that all variants of a size share, and the type of a variant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pass = Literal["forward", "forward_backward"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PASSES: tuple[Pass, ...] = ("forward", "forward_backward")


@dataclass(frozen=True)
class Case:
    """One size of a sparse layer.

    Attributes:
        tokens: Tokens of the batch; they are one group.
        d_model: D.
        d_ff: F of one expert.
        num_experts: E.
        num_selected_experts: K.
        gated: Whether an expert is GEGLU (tanh GELU) instead of plain with ReLU.
        device: Where the case can be run; None for everywhere.
        dtypes: Dtypes to run it in.
    """

    tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    num_selected_experts: int
    gated: bool = False
    device: str | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)

    @property
    def rows(self) -> int:
        """Rows of matrix products when every token reaches all K experts."""
        return self.tokens * self.num_selected_experts

    def flops(self, rows: int, pass_name: Pass) -> int:
        """Returns the floating-point operations of the experts' matrix products."""
        num_matrices = 3 if self.gated else 2
        forward = 2 * rows * self.d_model * self.d_ff * num_matrices

        # A backward pass has two products, as large as the forward one's, for each matrix.
        return forward if pass_name == "forward" else 3 * forward


CASES = {
    0: Case(4096, 512, 1024, 8, 2),
    1: Case(4096, 768, 2048, 32, 2),
    2: Case(8192, 1024, 2816, 32, 2, gated=True),
    3: Case(2048, 768, 3072, 128, 1),
    4: Case(32768, 2048, 5632, 32, 2, gated=True, device="cuda", dtypes=("bfloat16",)),
}


@dataclass(frozen=True)
class Problem:
    """The tensors that the variants of a case share; weights are not copied.

    Attributes:
        case: The sizes.
        x: <dtype>[1, S, D] input, a leaf that requires grad.
        gradient: <dtype>[1, S, D] gradient of the output.
        gate: <dtype>[E, D] router weight.
        first: <dtype>[E, F, D] first projection; [E, 2F, D] when gated, gate above up.
        down: <dtype>[E, D, F] second projection.
    """

    case: Case
    x: Tensor
    gradient: Tensor
    gate: Tensor
    first: Tensor
    down: Tensor

    @property
    def dtype_name(self) -> str:
        """Name of the storage dtype, a key of `DTYPES`."""
        return str(self.x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Variant:
    """One way to run a case.

    Attributes:
        name: As in the table.
        forward: From the input to the output, without auxiliary losses.
        x: Its input, a leaf.
        gradient: The gradient of its output.
        parameters: Other tensors with a gradient.
        rows: Rows of matrix products of its experts, including padding and excluding dropped
            choices.
        note: Remark for readers of its row.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    x: Tensor
    gradient: Tensor
    parameters: Sequence[Tensor]
    rows: int
    note: str = ""

    def run(self, pass_name: Pass) -> None:
        """Does the pass once: `forward` as in inference, without a graph."""
        needs_graph = pass_name == "forward_backward"
        with torch.set_grad_enabled(needs_graph):
            y = self.forward(self.x)
        if needs_graph:
            y.backward(self.gradient)

    def clear(self) -> None:
        """Gives the gradients back."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None


def build_problem(case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    """Returns the tensors of a case; the same on every call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
        return numbers.mul_(std)

    # Weights of a scale that keeps activations near 1.
    E = case.num_experts
    F = case.d_ff
    D = case.d_model
    return Problem(
        case=case,
        x=normal(1, case.tokens, D).requires_grad_(),
        gradient=normal(1, case.tokens, D),
        gate=normal(E, D, std=0.02),
        first=normal(E, 2 * F if case.gated else F, D, std=D**-0.5),
        down=normal(E, D, F, std=F**-0.5),
    )
