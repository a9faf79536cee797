"""How often would other experts have been better? Other routes of single tokens, of equal compute.

    python -m scripts.counterfactual_routes --model runs/demo/pretrain/model --corpus runs/demo/corpus

In the last block of the decoder no token sees another one any more, so that a route changes the loss of
its own token only. Every token is sent to every other set of K experts, or to a sample of them, with
the weights that the router gives those experts.

Source:
    When Are Experts Misrouted? (arXiv:2605.07260): routes of equal compute, scored by the probability of the target.
    Differs: routes are uniform over the sets of experts, not drawn near the router's.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.reports.formatting import markdown_table
from moe.cli import Parser, integer, path, run_main
from moe.commands.routing_inputs import (
    add_inputs,
    check_inputs_options,
    load_inspected,
    read_batches,
)
from moe.errors import DataError
from moe.inspection.ablation.ablation_runs import Unchanged, run_ablated, run_unchanged
from moe.inspection.ablation.target_sets import list_targets
from moe.inspection.statistics.document_intervals import TokenSums, mean_over_tokens
from moe.models.inputs import IGNORED_LABEL
from moe.sparse.editing import LayerKey, edit_routing, sparse_layers
from moe.sparse.edits import RerouteExperts
from moe.tracing.recorder import TracedBatch, evaluation_mode

Route = tuple[int, ...]

GROUPS = {"all": (0.0, 1.0), "fragile": (0.0, 0.1), "between": (0.1, 0.5), "confident": (0.5, 1.0)}
"""Tokens by the probability of the target: above the first number, up to the second."""

HEADER = (
    "tokens",
    "number",
    "loss, nats",
    "other routes that are better, %",
    "mean change by another route, nats",
    "tokens with a better route, %",
    "change by the best route, nats",
)


class RouteChanges(NamedTuple):
    """Changes of the loss of N target tokens by R routes.

    Attributes:
        loss: <float64>[N] in nats, by the router's own route.
        change: <float64>[R, N] by each route; NaN where it is the router's own.
        document: <int64>[N] document of each token.
    """

    loss: Tensor
    change: Tensor
    document: Tensor


def main(argv: list[str]) -> None:
    """Prints the table."""
    parser = Parser(
        prog="python -m scripts.counterfactual_routes", description="Other routes of single tokens."
    )
    parser.add_argument("--model", type=path, required=True, help="folder of a sparse model")
    add_inputs(parser)
    parser.add_argument(
        "--routes", type=integer(least=2), default=64, help="most routes of a token (64)"
    )
    parser.add_argument("--seed", type=integer(least=0), default=0, help="seed of the routes (0)")
    options = parser.parse_args(argv)

    # The capacity of experts would depend on the routes of other tokens.
    check_inputs_options(options)
    inspected = load_inspected(options.model, dropless=True)
    batches = list(read_batches(options, inspected, None))
    changes = change_routes(inspected.model, batches, options.routes, options.seed)
    print(*markdown_table(HEADER, group_rows(changes)), sep="\n")


def change_routes(
    model: PreTrainedModel, batches: Sequence[TracedBatch], most_routes: int, seed: int
) -> RouteChanges:
    """Returns the changes of the loss by other routes in the last layer of the decoder.

    Args:
        model: A model without capacity.
        batches: Examples with labels.
        most_routes: Maximum number of routes; all of them, or a random sample.
        seed: Seed of the sample.

    Raises:
        DataError: When the last block of the decoder is not sparse.
    """
    key = last_layer(model)
    layer = sparse_layers(model)[key]
    num_experts = layer.config.num_experts
    num_chosen = layer.config.num_selected_experts
    routes = draw_routes(num_experts, num_chosen, most_routes, seed)

    losses: list[Tensor] = []
    changes: list[Tensor] = []
    with evaluation_mode(model):
        for traced in tqdm(batches, unit="batch"):
            unchanged = run_unchanged(model, traced.batch)
            chosen = own_routes(unchanged, key)  # [n, K]
            of_batch: list[Tensor] = []
            for route in routes:
                others = set(range(num_experts)) - set(route)
                reroute = edit_routing(model, {key: RerouteExperts(*others)})
                change = run_ablated(model, key, unchanged, reroute).change  # [n]
                is_own = (chosen == torch.tensor(route)).all(dim=1)
                of_batch.append(change.masked_fill(is_own, math.nan))
            losses.append(unchanged.losses.cpu())
            changes.append(torch.stack(of_batch))
    return RouteChanges(
        loss=torch.cat(losses),
        change=torch.cat(changes, dim=1),
        document=list_targets(batches).document,
    )


def last_layer(model: PreTrainedModel) -> LayerKey:
    """Returns the sparse layer of the decoder's last block."""
    *_, last_block = next(
        part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList)
    )
    for key, layer in sparse_layers(model).items():
        if any(part is layer for part in last_block.modules()):
            return key
    raise DataError(
        "The last block of the decoder has no sparse layer, so a route changes other tokens too. Give another model."
    )


def draw_routes(num_experts: int, num_chosen: int, most: int, seed: int) -> list[Route]:
    """Returns all sets of K experts, or `most` different ones, uniformly."""
    number = math.comb(num_experts, num_chosen)
    random = np.random.default_rng(seed)
    chosen = sorted(random.choice(number, min(most, number), replace=False).tolist())
    routes = itertools.combinations(range(num_experts), num_chosen)
    wanted = set(chosen)
    return [route for index, route in enumerate(routes) if index in wanted]


def own_routes(unchanged: Unchanged, key: LayerKey) -> Tensor:
    """Returns <int64>[n, K]: the experts of each target token, in ascending order."""
    labels = unchanged.batch["labels"]
    expert_index = unchanged.plans[key].expert_index  # [G, S, K]
    by_position = expert_index.flatten(0, 1).unflatten(0, labels.shape)  # [B, T, K]
    return by_position[labels != IGNORED_LABEL].sort(dim=1).values.cpu()


def group_rows(changes: RouteChanges) -> list[list[str]]:
    """Returns a row for each group of tokens: means over tokens, with 95 % intervals over documents."""
    probability = (-changes.loss).exp()
    is_other = ~changes.change.isnan()
    change = changes.change.nan_to_num(0.0)
    num_others = is_other.sum(dim=0)  # [N]
    best = changes.change.nan_to_num(math.inf).amin(dim=0)  # [N]
    columns = {
        "loss": changes.loss,
        "better": 100 * ((change < 0) & is_other).sum(dim=0) / num_others,
        "mean": change.sum(dim=0) / num_others,
        "any": 100 * (best < 0).double(),
        "best": best.clamp(max=0.0),
    }

    rows: list[list[str]] = []
    for name, (low, high) in GROUPS.items():
        members = (probability > low) & (probability <= high)
        cells = [
            f"{name} ({low:g} to {high:g})" if low or high < 1 else name,
            f"{int(members.sum()):,}",
        ]
        for column in columns.values():
            cells.append(mean_cell(column.double(), members, changes.document))
        rows.append(cells)
    return rows


def mean_cell(values: Tensor, members: Tensor, document: Tensor) -> str:
    """Returns the mean of values <float64>[N] over some tokens <bool>[N], and its interval."""
    num_documents = int(document.max()) + 1
    empty = torch.zeros(num_documents, dtype=torch.float64)
    sums = empty.index_add(0, document, values * members)
    counts = empty.index_add(0, document, members.double())
    (mean,) = mean_over_tokens(TokenSums(sums[None], counts[None])).intervals(0.95)
    digits = 1 if abs(mean.value) >= 10 else 3
    return f"{mean.value:.{digits}f} ({mean.low:.{digits}f} to {mean.high:.{digits}f})"


if __name__ == "__main__":
    run_main(main)
