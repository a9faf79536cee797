"""Sentences of the report, from the numbers of a trace."""

from collections.abc import Sequence

import torch

from moe.data.names import describe_languages
from moe.inspection.statistics.contingency import mutual_information
from moe.inspection.statistics.specialization import ClassTable, class_table
from moe.inspection.statistics.token_classes import TokenClasses, domain_classes
from moe.models.card import describe_capacity, experts_range
from moe.models.configuration import STMoEConfig
from moe.tracing.trace import Trace, layer_name


def size_sentence(config: STMoEConfig) -> str:
    """Returns the sizes of the model as a sentence."""
    return (
        f"A sparse encoder-decoder of {config.num_parameters():,} parameters, of which one token uses "
        f"{config.num_active_parameters():,}: {config.num_layers} + {config.num_decoder_layers} blocks, "
        f"{config.num_sparse_encoder_layers} + {config.num_sparse_decoder_layers} sparse layers of "
        f"{experts_range(config)} experts, at most {config.num_selected_experts} for each token; "
        f"capacity: {describe_capacity(config)}."
    )


def tables_by_domain(trace: Trace) -> tuple[list[ClassTable], list[str]]:
    """Returns kinds of text by experts for each layer, and the group of each kind.

    Codes of languages are replaced by their English names and sorted by family, which is the group.
    """
    codes = trace.facts.domains
    languages = describe_languages(codes)
    order = [codes.index(code) for code in languages] or list(range(len(codes)))
    tables = []
    for layer in trace.layers:
        classes = domain_classes(trace, layer.facts.stack)
        names = tuple(language["name"] for language in languages.values()) or classes.names
        classes = TokenClasses(names, classes.members[order])
        tables.append(class_table(layer, classes))
    return tables, [language["family"] for language in languages.values()]


def expert_shares(table: ClassTable) -> torch.Tensor:
    """Returns <float64>[E, C]: the share of an expert's tokens in each class; 0 without tokens."""
    counts = table.counts.T.double()  # [E, C]
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)


def experts_of_most(table: ClassTable, most: float = 0.9) -> torch.Tensor:
    """Returns <int64>[C]: the fewest experts that `most` of a class's tokens go to; 0 without tokens."""
    descending = table.share.sort(dim=1, descending=True).values  # [C, E]
    before = descending.cumsum(dim=1) - descending
    return (before < most - 1e-9).sum(dim=1)


def shared_load(table: ClassTable) -> float:
    """Returns the share of load that all classes have in common: 1 if they use experts alike.

    It is the sum over experts of the smallest share of a class with tokens. Few tokens make it too
    small.
    """
    return float(table.share[table.tokens > 0].amin(dim=0).sum())


def domain_sentences(tables: Sequence[ClassTable]) -> list[str]:
    """Returns for each layer how few experts serve a kind of text, what all kinds share and which
    kind the most specialized expert serves; and how much experts tell about kinds.

    Experts with less than half of the mean load are not named.
    """
    sentences = []
    amounts = []
    for table in tables:
        tokens = table.counts.sum(dim=0)  # [E]
        shares = expert_shares(table)  # [E, C]
        is_busy = tokens >= tokens.double().mean() / 2
        best = shares.max(dim=1).values.masked_fill(~is_busy, 0)  # [E]
        expert = int(best.argmax())
        name = table.names[int(shares[expert].argmax())]
        where = layer_name(table.layer)
        numbers = experts_of_most(table)  # [C]
        fewest, most = int(numbers.argmin()), int(numbers.argmax())
        sentences += [
            f"{numbers.median()} of {len(tokens)} experts of {where} carry 90 % of the tokens of a kind "
            f"(median; {numbers[fewest]} of {table.names[fewest]}, {numbers[most]} of {table.names[most]}); "
            f"all kinds share {100 * shared_load(table):.0f} % of the load.",
            f"Expert {expert + 1} of {where}: {100 * best[expert]:.0f} % of its tokens are {name}.",
        ]
        amounts.append(f"{float(mutual_information(table.counts)):.2f} in {where}")
    of_kinds = tables[0].tokens.double()
    entropy = float(torch.special.entr(of_kinds / of_kinds.sum()).sum())
    sentences.append(
        f"Mutual information of kind of text and expert, in nats: {', '.join(amounts)}; "
        f"{entropy:.2f} if each expert had one kind."
    )
    return sentences
