"""The experts: E feed-forward networks as stacked weights; rows in, rows out.

Comes between the two halves of dispatch.py. The products use the fastest form on the device; an
expert sees only the tokens that were sent to it.
"""

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from moe.distributed.sharding import local_shard
from moe.errors import ConfigError
from moe.kernels.compiled_experts import compiled_feed_forward
from moe.kernels.cpu_experts import fused_feed_forward
from moe.kernels.dropout import dropout
from moe.kernels.expert_rows import combine_rows, gather_rows, used_rows
from moe.kernels.expert_weights import (
    ExpertWeights,
    LowRank,
    can_select_experts,
    dequantized,
    is_quantized,
)
from moe.kernels.grouped_matmul import grouped_linear, grouped_low_rank
from moe.kernels.hidden_units import ExpertForm, add_bias, expert_of_rows, hidden_rows, hidden_units
from moe.kernels.quantized_weight import FIXED, Quantization, quantize
from moe.kernels.stored_weight import StoredWeight
from moe.kernels.torch_private import autocast_disabled, is_shape_only
from moe.sparse.adapters import NO_ADAPTERS, Adapters
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import InFlight, SortedRows, UngatheredRows

# Standard deviation of a standard normal that is truncated at two deviations.
_TRUNCATED_STD = 0.87962566103423978

PROJECTIONS = {"gate_up_proj", "up_proj", "down_proj"}
"""Names of the weights of the products."""


class Experts(nn.Module):
    """E independent feed-forward networks, GEGLU or plain.

    The hidden units may have a bias, added to them or multiplied with them, and so may both products.

    Parameters are `gate_up_proj` [E, 2F, D] (gate above up) or, when not gated, `up_proj` [E, F,
    D]; `down_proj` [E, D, F]; `bias` [E, F] when there is an expert bias; and, with `product_bias`,
    `gate_up_proj_bias` [E, 2F] or `up_proj_bias` [E, F], and `down_proj_bias` [E, D]. With
    `expert_quantization` the weights of the products are QuantizedWeights.

    Source:
        ST-MoE (arXiv:2202.08906) §3.1 and appendix C: [(GELU(x W11) * x W12) + B] W2. Differs: no.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        E = config.num_experts
        F_ = config.d_ff
        D = config.d_model

        # In the layout of transformers 5: PEFT, quantisers and expert sharding on dim 0 expect it.
        if config.gated:
            self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, D))
        else:
            self.up_proj = nn.Parameter(torch.empty(E, F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))

        self.bias = None
        if config.expert_bias != "none":
            self.bias = nn.Parameter(torch.empty(E, F_))
        if config.product_bias:
            for name in sorted(PROJECTIONS & self._parameters.keys()):
                bias = nn.Parameter(torch.empty(self.get_parameter(name).shape[:2]))
                self.register_parameter(f"{name}_bias", bias)
        self.reset_parameters()
        if config.expert_quantization is not None:
            self._quantize(Quantization(**config.expert_quantization))

        # A function in place of the products of rows, see moe/models/experts_interface.py.
        self.run_elsewhere: Callable[..., Tensor] | None = None

        # For weights that cannot be stored as float32, see `load_model` with mmap.
        self.widens_float16 = False

    def _quantize(self, quantization: Quantization) -> None:
        """Replaces the weights of the products by quantized ones, which do not train."""
        for name in PROJECTIONS & self._parameters.keys():
            weight = quantize(self.get_parameter(name), quantization)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    @property
    def first_proj(self) -> nn.Parameter:
        """The weights of the first product, [E, 2F or F, D]."""
        return self.gate_up_proj if self.config.gated else self.up_proj

    def reset_parameters(self) -> None:
        """Re-initializes every expert independently: truncated normal with variance scale / fan_in."""
        # The fan-in of the first product is D, of the second F. Quantized weights were drawn before
        # they were quantized.
        scale = self.config.initializer_scale
        if not is_quantized(self.down_proj):
            truncated_normal_(self.first_proj, math.sqrt(scale / self.config.d_model))
            truncated_normal_(self.down_proj, math.sqrt(scale / self.config.d_ff))

        # A bias without an initial effect.
        if self.bias is not None:
            is_factor = self.config.expert_bias == "multiplicative"
            nn.init.constant_(self.bias, 1.0 if is_factor else 0.0)
        for bias in self.product_biases():
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, in_flight: InFlight, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        """Returns the outputs of the experts, in the form of their inputs.

        Args:
            in_flight: Inputs from a dispatcher: rows, or slots <any float>[E, n, D], or a pending exchange
                of them.
            adapters: Low-rank changes of the products.

        Returns:
            <dtype of the second product> of the inputs' shape: rows [N, D] or slots [E, n, D]. Rows that
            were not gathered come back combined, [T, D]: the CPU's kernel does everything.
        """
        inputs = in_flight.wait()

        # One form of the products for each form of dispatch.
        rate = adapters.dropout_rate
        if isinstance(inputs, UngatheredRows):
            weights = self.product_weights(adapters, fused=True)
            if rate or self.run_elsewhere is not None:
                return self.run_gathered(inputs, weights, rate)
            return self.run_fused(inputs, weights)
        if isinstance(inputs, SortedRows):
            # In training, quantized experts are unpacked one at a time.
            unpacks_later = is_quantized(self.down_proj) and torch.is_grad_enabled()
            weights = self.product_weights(adapters, fused=unpacks_later)
            return self.run_rows(inputs.x.to(self.product_dtype()), inputs.ends, weights, rate)
        weights = self.product_weights(adapters)
        return self.run_slots(inputs.to(self.product_dtype()), weights, rate)

    def run_fused(self, inputs: UngatheredRows, weights: ExpertWeights) -> Tensor:
        """Returns every token's weighted sum of its experts' outputs.

        Args:
            inputs: Tokens, and their rows.
            weights: The experts' weights.

        Returns:
            <dtype of the second product>[T, D].
        """
        tokens = inputs.tokens.to(self.output_dtype())
        if is_shape_only(tokens):
            return compiled_feed_forward(tokens, inputs.rows, weights, self.form())
        return fused_feed_forward(tokens, inputs.rows, weights, self.form())

    @torch.compiler.disable()
    def run_gathered(
        self, inputs: UngatheredRows, weights: ExpertWeights, adapter_dropout: float
    ) -> Tensor:
        """Returns the same as `run_fused` by rows, with dropout in the adapters or elsewhere.

        Args:
            inputs: Tokens, and their rows.
            weights: The experts' weights.
            adapter_dropout: See `Adapters`.

        Returns:
            <dtype of the second product>[T, D].
        """
        rows = used_rows(inputs.rows)
        x = gather_rows(inputs.tokens.to(self.output_dtype()), rows)  # [N, D]
        return combine_rows(self.run_rows(x, rows.ends(), weights, adapter_dropout), rows)

    def run_rows(
        self, x: Tensor, ends: Tensor, weights: ExpertWeights, adapter_dropout: float = 0.0
    ) -> Tensor:
        """Returns the outputs of rows sorted by expert, by grouped products, or elsewhere.

        Args:
            x: <float>[N, D] rows.
            ends: <int32>[E] where the rows of each expert end.
            weights: The experts' weights, the first in the dtype of the rows.
            adapter_dropout: See `Adapters`.

        Returns:
            <float>[N, D].
        """
        if self.run_elsewhere is not None:
            return self.run_elsewhere(x, expert_of_rows(ends, x.shape[0]), weights, self.form())
        first, down, bias, first_bias, down_bias, first_adapter, down_adapter = weights

        # Inputs and weights have the dtypes of the products already.
        with autocast_disabled(x.device.type):
            product = grouped_linear(x, first, ends).to(down.dtype)  # [N, 2F or F]
            product = add_bias(product, first_bias, ends)
            if first_adapter is not None:
                x = dropout(x, adapter_dropout)
                product = product + grouped_low_rank(x, first_adapter, ends).to(down.dtype)

            hidden = hidden_rows(product, bias, ends, self.form())  # [N, F]
            output = add_bias(grouped_linear(hidden, down, ends), down_bias, ends)  # [N, D]
            if down_adapter is not None:
                hidden = dropout(hidden, adapter_dropout)
                output = output + grouped_low_rank(hidden, down_adapter, ends)
            return output

    def run_slots(
        self, slots: Tensor, weights: ExpertWeights, adapter_dropout: float = 0.0
    ) -> Tensor:
        """Returns the outputs of each expert for its slots.

        The weights are on the left of their products, so that their gradients come in the layout of
        the weights.

        Args:
            slots: <float>[E, n, D].
            weights: The experts' weights, the first in the dtype of the slots.
            adapter_dropout: See `Adapters`.

        Returns:
            <float>[E, n, D].
        """
        first, down, bias, first_bias, down_bias, first_adapter, down_adapter = weights
        with autocast_disabled(slots.device.type):
            # All experts in one batched product, since all have as many slots.
            x = rearrange(slots, "e n d -> e d n")
            product = torch.bmm(first, x).to(down.dtype)  # [E, 2F or F, n]
            if first_bias is not None:
                product = product + first_bias[..., None]
            if first_adapter is not None:
                x = dropout(x, adapter_dropout)
                product = product + _adapt_slots(x, first_adapter).to(down.dtype)

            bias = None if bias is None else bias[..., None]  # [E, F, 1]
            hidden = hidden_units(product, bias, self.form(), dim=1)  # [E, F, n]
            outputs = torch.bmm(down, hidden)  # [E, D, n]
            if down_bias is not None:
                outputs = outputs + down_bias[..., None]
            if down_adapter is not None:
                hidden = dropout(hidden, adapter_dropout)
                outputs = outputs + _adapt_slots(hidden, down_adapter)
            return rearrange(outputs, "e d n -> e n d").contiguous()

    def form(self) -> ExpertForm:
        """Returns what an expert computes: kernels do not depend on the configuration or the training mode."""
        return ExpertForm(
            activation=self.config.activation,
            gated=self.config.gated,
            bias_kind=self.config.expert_bias,
            dropout_rate=self.config.expert_dropout_rate if self.training else 0.0,
        )

    def product_biases(self) -> list[nn.Parameter | None]:
        """Returns the biases of the first product, [E, 2F or F], and of the second, [E, D]."""
        first = "gate_up_proj_bias" if self.config.gated else "up_proj_bias"
        return [self._parameters.get(name) for name in (first, "down_proj_bias")]

    def product_dtype(self) -> torch.dtype:
        """Returns the dtype of the first product: that of the second, or float16 before float32."""
        dtype = self.output_dtype()
        first = self._parameters.get("gate_up_proj" if self.config.gated else "up_proj")
        is_float16 = first is not None and first.dtype == torch.float16
        return torch.float16 if is_float16 and dtype == torch.float32 else dtype

    def output_dtype(self) -> torch.dtype:
        """Returns the dtype of the second product: the model's, or autocast's if enabled."""
        device = self.down_proj.device.type
        # Weights that wait on a disk are on the meta device, which has no autocast.
        if device != "meta" and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        dtype = self.down_proj.dtype
        return torch.float32 if dtype == torch.float16 and self.widens_float16 else dtype

    def product_weights(
        self, adapters: Adapters = NO_ADAPTERS, *, fused: bool = False
    ) -> ExpertWeights:
        """Returns this rank's weights in the dtypes of the products, gate and up side by side.

        Args:
            adapters: Low-rank changes of the products.
            fused: Whether for a CPU's kernel, which computes in one dtype and converts the weights
                of one expert at a time: quantized ones, and those in float16, stay as they are.
        """
        first = local_shard(self.first_proj)
        if first.dim() == 4:  # packed for a mesh: [E, 2, F, D]
            first = first.flatten(1, 2)  # [E, 2F, D]
        dtype = self.output_dtype()
        first_dtype = dtype if fused else self.product_dtype()
        biases = []
        for bias in (self.bias, *self.product_biases()):
            biases.append(None if bias is None else local_shard(bias).to(dtype))
        return ExpertWeights(
            _product_weight(first, first_dtype, fused),
            _product_weight(local_shard(self.down_proj), dtype, fused),
            *biases,
            first_adapter=_convert(adapters.first, first_dtype),
            down_adapter=_convert(adapters.down, dtype),
        )


def _product_weight(weight: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    """Returns a stacked weight <dtype>[E, O, I], or one to be converted expert by expert."""
    needs_graph = weight.requires_grad and torch.is_grad_enabled()
    is_converted_later = fused and not needs_graph and not is_shape_only(weight)
    if is_quantized(weight):
        if needs_graph:
            raise ConfigError(f"A quantized weight requires a gradient. {FIXED}")
        if is_converted_later and can_select_experts(weight):
            return weight
    elif is_converted_later and (weight.dtype == torch.float16 or isinstance(weight, StoredWeight)):
        return weight
    return dequantized(weight).to(dtype)


def _convert(adapter: LowRank | None, dtype: torch.dtype) -> LowRank | None:
    return None if adapter is None else LowRank(*[tensor.to(dtype) for tensor in adapter])


def _adapt_slots(x: Tensor, adapter: LowRank) -> Tensor:
    """Returns what an adapter adds to the product of <float>[E, I, n]: <float>[E, O, n]."""
    low = torch.bmm(adapter.a, x) * adapter.scale[:, None]  # [E, R, n]
    return torch.bmm(adapter.b.mT, low)


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fills a tensor with normal numbers, truncated at two deviations and rescaled to `std`.

    Args:
        tensor: <float>[...] to fill.
        std: Standard deviation of the numbers.

    Returns:
        <float>[...] the same tensor.

    Source:
        flax `variance_scaling(..., "truncated_normal")`, as Flaxformer's ST-MoE configurations use
        it: the truncated normal has a deviation of 0.8796.
    """
    if is_shape_only(tensor):  # torch would read numbers
        return tensor
    std = std / _TRUNCATED_STD
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
