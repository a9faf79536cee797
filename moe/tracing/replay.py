"""Replay: executes recorded choices, in the same model or another.

Comes after `trace`; it is an edit of every layer's plan, see `moe.sparse.editing`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.checks import check_choice
from moe.errors import ConfigError, DataError
from moe.models.blocks import Stack as StackModule
from moe.sparse.adapters import unwrapped
from moe.sparse.editing import LayerKey, PlanEdit, Stack, edit_routing, sparse_layers
from moe.sparse.groups import from_groups, to_groups
from moe.sparse.layer import SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.tracing.trace import ACCEPTED, NOT_REQUESTED, LayerTrace, StackTrace, Trace

Weights = Literal["recompute", "replay"]

_NO_ROW = -1


@contextmanager
def replay_routing(
    model: PreTrainedModel, trace: Trace, *, weights: Weights = "recompute"
) -> Iterator[None]:
    """Inside the block, routes every token as in the trace, regardless of the router's scores.

    Examples are found by their token ids, so they may come in other batches, in another order or on
    other ranks than they were recorded. Capacity is ignored: accepted choices are accepted again.
    Generation is replayed too, if each sequence has one continuation, the one in the trace.

    Example:
        trace = record_routing(model, traced_batches(batches))
        with replay_routing(quantized, trace):
            loss = quantized(**batch).loss  # its experts, with the routing of the other model

    Args:
        model: The model; it may have other weights or another dtype than the recorded one.
        trace: Result of `record_routing` or `read_trace`.
        weights: Whether the router computes new weights for the recorded choices, and so learns
            from them, or the recorded weights are used.

    Raises:
        ConfigError: When `weights` is neither, or the model is a host.
        DataError: When the layers differ from the trace's; in the forward pass, when an example is
            not in the trace.

    Source:
        Megatron-LM core/transformer/moe/router_replay.py at d98e8a64: indices are replayed, weights
        recomputed. Differs: acceptance is replayed too, and inputs are checked.
    """
    check_choice("weights", weights, ("recompute", "replay"))
    if not any(isinstance(part, StackModule) for part in model.modules()):
        raise ConfigError(
            f"A replay is not supported in a {type(model).__name__}, whose stacks do not report "
            "their token ids. Use a model of this library."
        )
    layers = sparse_layers(model)
    _refuse_other_layers(trace, layers)

    player = _Player(trace, cast(Any, model).config.pad_token_id)
    edits: dict[LayerKey, PlanEdit] = {}
    for layer_trace in trace.layers:
        key = layer_trace.key
        edits[key] = _replayed(player, layer_trace, layers[key], weights)

    # Each stack records its tokens, and its layers look up their routing.
    with ExitStack() as hooks, edit_routing(model, edits):
        for part in model.modules():
            if isinstance(part, StackModule):
                hook = part.register_forward_pre_hook(player.start_stack, with_kwargs=True)
                hooks.enter_context(hook)
        yield


def _refuse_other_layers(trace: Trace, layers: Mapping[LayerKey, SparseFeedForward]) -> None:
    """Raises a DataError when the model lacks layers or experts of a trace."""
    recorded = {layer.key: layer.facts.num_experts for layer in trace.layers}
    present = {key: layer.config.num_experts for key, layer in layers.items()}
    if recorded.keys() != present.keys() or any(recorded[key] > present[key] for key in recorded):
        raise DataError(
            f"The trace has the sparse layers and experts {recorded}, the model {present}. Replay it in a model with "
            "the same sparse layers."
        )


class _Player:
    """Finds the rows of the trace that belong to the tokens of a forward pass."""

    def __init__(self, trace: Trace, pad_token_id: int) -> None:
        self._trace = trace
        self._pad_token_id = pad_token_id
        self._examples = _examples_by_ids(trace.encoder)
        self._num_served: dict[bytes, int] = {}

        # State of the current pass.
        self._token_ids: dict[Stack, Tensor | None] = {}
        self._rows: dict[Stack, Tensor | None] = {}
        self._past = 0
        self._example_of_row: list[int] | None = None

    def start_stack(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the tokens that a stack is given; a hook before its forward pass."""
        stack: Stack = "decoder" if getattr(module, "decoder", False) else "encoder"
        self._token_ids[stack] = kwargs.get("token_ids")
        self._rows[stack] = None
        cache = kwargs.get("cache")
        if stack == "decoder":
            self._past = 0 if cache is None else int(cache.get_seq_length())

        # A stack without sparse layers finds its examples here, since no layer looks up its rows.
        has_layers = bool(self._trace.stack(stack).layers)
        if stack == "encoder" and not has_layers:
            mask = kwargs.get("attention_mask")
            token_ids = self._ids_of(stack)
            is_real = torch.ones_like(token_ids) if mask is None else mask
            self._rows[stack] = self._find_rows(stack, is_real.bool())

    def rows(self, stack: Stack, token_mask: Tensor) -> Tensor:
        """Returns the row number <int64>[G, S] of each token in the trace; -1 for tokens without one.

        Args:
            stack: `encoder` or `decoder`.
            token_mask: <bool>[G, S] real tokens.
        """
        # All layers of a pass have the same rows: found once, for the first of them.
        token_ids = self._ids_of(stack)
        sequences = token_mask.shape[1] // token_ids.shape[1]
        rows = self._rows[stack]
        if rows is None:
            rows = self._find_rows(stack, from_groups(token_mask, sequences))
            self._rows[stack] = rows
        return to_groups(rows, sequences)

    def _ids_of(self, stack: Stack) -> Tensor:
        token_ids = self._token_ids.get(stack)
        if token_ids is None:
            raise DataError(
                f"The {stack} got no token ids, which a replay needs to find its examples. Give input_ids instead of "
                "embeddings, and run the whole model inside replay_routing."
            )
        return token_ids

    def _find_rows(self, stack: Stack, is_real: Tensor) -> Tensor:
        """Returns the row of each token <int64>[B, L]; <bool>[B, L] says which are real."""
        token_ids = self._ids_of(stack)
        ids_of_row = []
        for ids, mask in zip(token_ids.cpu(), is_real.cpu(), strict=True):
            ids_of_row.append(ids[mask].int())

        # Examples are identified by the encoder's tokens; the decoder continues where its cache
        # ends.
        if stack == "encoder":
            self._example_of_row = [self._find_example(ids) for ids in ids_of_row]
            past = 0
        else:
            past = self._past
            self._find_decoder_examples(ids_of_row)

        # The tokens of an example are adjacent in the trace.
        part = self._trace.stack(stack)
        rows = torch.full(token_ids.shape, _NO_ROW)
        for number, example in enumerate(self._example_of_row or ()):
            start = int(part.starts[example]) + past
            end = int(part.starts[example + 1])
            places = torch.arange(start, start + ids_of_row[number].numel())
            rows[number, is_real[number].cpu()] = places.masked_fill(places >= end, _NO_ROW)
        return rows.to(token_ids.device)

    def _find_example(self, ids: Tensor) -> int:
        """Returns the example that the encoder reads; equal ones are used in turn."""
        key = ids.numpy().tobytes()
        examples = self._examples.get(key)
        if examples is None:
            raise DataError(
                f"The trace has no example with the encoder's tokens {_beginning(ids)}. Replay the inputs that were "
                "recorded, with the same tokenizer and the same truncation."
            )
        turn = self._num_served.get(key, 0)
        self._num_served[key] = turn + 1
        return examples[turn % len(examples)]

    def _find_decoder_examples(self, ids_of_row: Sequence[Tensor]) -> None:
        """Selects the example of each row among those with equal inputs, by the decoder's tokens."""
        chosen = self._example_of_row
        if chosen is None or len(chosen) != len(ids_of_row):
            num_encoded = 0 if chosen is None else len(chosen)
            raise DataError(
                f"The decoder has {len(ids_of_row)} sequences, but the encoder read {num_encoded} inside "
                "replay_routing. Run both inside it, and generate one continuation of each input (no beams)."
            )

        # The example chosen for the encoder comes first.
        for number, ids in enumerate(ids_of_row):
            inputs = self._trace.encoder
            example = chosen[number]
            key = inputs.ids[inputs.starts[example] : inputs.starts[example + 1]].numpy().tobytes()
            equals = [example, *self._examples[key]]
            matching = [other for other in equals if self._reads(other, ids)]
            if not matching:
                raise DataError(
                    f"The trace has no example with these inputs in which the decoder reads {_beginning(ids)} from "
                    f"position {self._past} on. Replay what was recorded."
                )
            chosen[number] = matching[0]

    def _reads(self, example: int, ids: Tensor) -> bool:
        """Returns whether the decoder of an example reads these ids <int32>[N] next.

        While other sequences of a batch are still being generated, one that has ended is given its
        last target and then padding.
        """
        part = self._trace.decoder
        start = int(part.starts[example])
        end = int(part.starts[example + 1])

        # A whole sequence that is longer than the recorded one is another.
        num_behind = max(0, self._past + ids.numel() - (end - start))
        if num_behind and self._past == 0:
            return False

        # Valid tokens: the recorded ones, the last target, and padding without an end token.
        behind = ids.new_full((self._past + ids.numel(),), self._pad_token_id)
        behind[0] = part.targets[end - 1]
        readable = torch.cat([part.ids[start:end], behind])
        return torch.equal(readable[self._past : self._past + ids.numel()], ids)


def _examples_by_ids(part: StackTrace) -> dict[bytes, list[int]]:
    """Returns the numbers of the examples by the bytes of their token ids."""
    examples: dict[bytes, list[int]] = {}
    for example, ids in enumerate(part.ids.split(part.starts.diff().tolist())):
        examples.setdefault(ids.numpy().tobytes(), []).append(example)
    return examples


def _beginning(ids: Tensor) -> str:
    """Returns the first ids <int32>[N], for a message."""
    return str(ids[:8].tolist())[:-1] + (", ...]" if ids.numel() > 8 else "]")


def _replayed(
    player: _Player, recorded: LayerTrace, layer: SparseFeedForward, weights: Weights
) -> PlanEdit:
    """Returns the edit of one layer."""
    expert = recorded.expert.long()

    def replay(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        device = plan.expert_index.device
        rows = player.rows(recorded.facts.stack, plan.token_mask)  # [G, S]
        has_row = (rows != _NO_ROW)[..., None]  # [G, S, 1]
        row = rows.clamp(min=0).cpu()

        # The choices of the trace; the router's own for padding.
        state_of_token = recorded.state[row].to(device)  # [G, S, K]
        expert_index = expert[row].to(device).where(has_row, plan.expert_index)
        accepted = (state_of_token == ACCEPTED).where(has_row, plan.accepted)
        requested = (state_of_token != NOT_REQUESTED).where(has_row, plan.requested)

        # Choices queue in the usual order, not in that of this router's slots.
        replayed = plan._replace(
            expert_index=expert_index,
            slot=torch.zeros_like(expert_index),
            accepted=accepted,
            requested=requested,
        )

        # Weighted by this router, or as recorded.
        combine_weight = unwrapped(layer.router).combine_weight(scores, replayed)
        if weights == "replay":
            gate = recorded.gate[row].to(combine_weight)
            gate = gate.masked_fill(state_of_token != ACCEPTED, 0)
            combine_weight = gate.where(has_row, combine_weight)
        return replayed._replace(combine_weight=combine_weight)

    return replay
