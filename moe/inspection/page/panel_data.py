"""The panels of the routing view next to the text: classes and ablation, as plain numbers.

Computed from a trace, and by `stmoe inspect ablate`, whose file is written and read here.
`routing_view` draws them. A number that is not finite means "not known".
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from moe.checks import check
from moe.errors import DataError
from moe.estimates import Estimate
from moe.files import write_text
from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import class_verdicts, expert_effects, shown_purposes
from moe.inspection.statistics.permutations import LEAST_DOCUMENTS
from moe.inspection.statistics.routing_entropy import class_entropy
from moe.inspection.statistics.specialization import class_p_values, class_table
from moe.inspection.statistics.token_classes import classify, domain_classes
from moe.parsing import printable, read_record, to_json
from moe.sparse.editing import STACKS, LayerKey, Stack
from moe.tracing.trace import Trace, layer_name


class ClassRow(NamedTuple):
    """Experts of the tokens of one class in one layer.

    Attributes:
        name: Name of the class, e.g. `punctuation`.
        num_tokens: Tokens of the class.
        shares: E shares of the class's tokens; their sum is 1.
        lifts: E ratios of these shares to the experts' shares of all tokens; 1 is no preference.
        p_values: E p-values of the lifts, corrected for the number of cells.
        entropy: Entropy of the shares in nats; None to leave the column out.
    """

    name: str
    num_tokens: int
    shares: Sequence[float]
    lifts: Sequence[float]
    p_values: Sequence[float]
    entropy: Estimate | None = None


class LayerClasses(NamedTuple):
    """Class by expert, in one layer."""

    key: LayerKey
    rows: Sequence[ClassRow]


class AblationBar(NamedTuple):
    """Effect of an expert's ablation on the loss.

    Attributes:
        stack: Stack of the layer.
        layer: Number of the layer in it, from 0.
        expert: Number of the expert, from 0.
        effect: Change of the loss in nats per token; above 0 the model needs the expert.
        low: Lower end of its interval; None where it is not known.
        high: Upper end of its interval.
        verdict: Conclusion, as text.
        lost: Whole targets that greedy decoding gives with the expert only.
        answers: Some of them, `inputs → targets` each.
        edit: Name of the intervention, e.g. `drop`.
    """

    stack: Stack
    layer: int
    expert: int
    effect: float
    low: float | None
    high: float | None
    verdict: str
    lost: int = 0
    answers: Sequence[str] = ()
    edit: str = ""


def check_statistics(
    trace: Trace, classes: Sequence[LayerClasses], ablation: Sequence[AblationBar]
) -> None:
    """Raises a ConfigError unless the statistics are of layers and experts of the trace."""
    num_experts = {layer.key: layer.facts.num_experts for layer in trace.layers}
    experts: list[tuple[LayerKey, int]] = [(table.key, 0) for table in classes]
    for bar in ablation:
        experts.append(((bar.stack, bar.layer), bar.expert))
    for key, expert in experts:
        check(key in num_experts, "a layer of statistics", key, f"one of {list(num_experts)}")
        expected = f"an expert of {layer_name(key)}, from 0 to {num_experts[key] - 1}"
        check(0 <= expert < num_experts[key], "expert of an ablation", expert, expected)


def view_classes(
    trace: Trace, tokenizer: PreTrainedTokenizerFast, *, num_permutations: int = 1000, seed: int = 0
) -> list[LayerClasses]:
    """Returns class tables of every layer: classes of tokens, and kinds of text if there are several.

    The decoder's tokens are classified by its input tokens.

    Args:
        trace: A trace of the model.
        tokenizer: The model's.
        num_permutations: Number of shuffles for each p-value.
        seed: Seed of the shuffles.

    Raises:
        DataError: When the tokenizer is not the model's or marks no words.
    """
    has_p_values = trace.document.unique().numel() >= LEAST_DOCUMENTS
    tables = []
    for stack in STACKS:
        part = trace.stack(stack)
        if not part.layers:
            continue
        document = trace.document[part.example]
        groups = [classify(part, tokenizer)]
        if len(trace.facts.domains) > 1:
            groups.append(domain_classes(trace, stack))

        # All layers of a stack are shuffled alike, so that p-values hold for all of them jointly.
        p_values: list[list[torch.Tensor]] = []
        if has_p_values:
            options = {"num_permutations": num_permutations, "seed": seed}
            p_values = class_p_values(part, groups, trace.document, **options)

        for layer_index, layer in enumerate(part.layers):
            rows = []
            for group_index, classes in enumerate(groups):
                table = class_table(layer, classes)
                p_value = torch.full_like(table.share, math.nan)
                if has_p_values:
                    p_value = p_values[group_index][layer_index]
                for number, name in enumerate(classes.names):
                    rows.append(
                        ClassRow(
                            name=name,
                            num_tokens=int(table.tokens[number]),
                            shares=table.share[number].tolist(),
                            lifts=table.lift[number].tolist(),
                            p_values=p_value[number].tolist(),
                            entropy=class_entropy(layer, classes.members[number], document),
                        )
                    )
            tables.append(LayerClasses(layer.key, rows))
    return tables


def ablation_bars(
    ablation: Ablation, trace: Trace, tokenizer: PreTrainedTokenizerFast
) -> list[AblationBar]:
    """Returns the effect of each expert's ablation on the examples of a trace, the largest first."""
    lost_by_layer = {layer.key: layer.lost for layer in ablation.layers}
    purposes = shown_purposes(ablation)

    # Every expert, even without a significant effect.
    bars = []
    for effect in expert_effects(ablation):
        purpose = purposes.get((effect.key, effect.expert))
        verdict = f"for: {purpose}" if purpose else "no effect was shown"
        lost = lost_by_layer[effect.key][effect.expert].nonzero().flatten().tolist()
        answers = [answer_text(trace, tokenizer, number) for number in lost[:_SHOWN_ANSWERS]]
        bars.append(
            AblationBar(
                *effect.key,
                effect.expert,
                *effect.effect,
                verdict=verdict,
                lost=len(lost),
                answers=answers,
                edit=ablation.intervention,
            )
        )
    bars.sort(key=lambda bar: bar.effect, reverse=True)
    return bars


def answer_text(trace: Trace, tokenizer: PreTrainedTokenizerFast, number: int) -> str:
    """Returns `inputs → targets` of an example, without special tokens."""
    texts = []
    for ids, starts in (
        (trace.encoder.ids, trace.encoder.starts),
        (trace.decoder.targets, trace.decoder.starts),
    ):
        example = ids[starts[number] : starts[number + 1]].tolist()
        text = tokenizer.decode(example, skip_special_tokens=True)
        texts.append(shorten(printable(str(text)), _SHOWN_CHARACTERS, placeholder=" …"))
    return " → ".join(texts)


_SHOWN_ANSWERS = 8
_SHOWN_CHARACTERS = 80
_ADVICE = "Make it again: `stmoe inspect ablate`."


class _Ablation(BaseModel, frozen=True):
    """The fields that the view reads; the others are for people."""

    intervention: str
    inputs_fingerprint: str
    effects: list[AblationBar]


def write_ablation(
    ablation: Ablation,
    trace: Trace,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    command: str = "",
) -> None:
    """Writes an ablation on the examples of a trace, whole or not at all; experts count from 0."""
    effects = [bar._asdict() for bar in ablation_bars(ablation, trace, tokenizer)]
    verdicts = []
    for verdict in class_verdicts(ablation):
        stack, layer = verdict.key
        verdicts.append(
            {
                "stack": stack,
                "layer": layer,
                "expert": verdict.expert,
                "token_class": verdict.token_class,
                "num_tokens": verdict.num_tokens,
                "effect": verdict.effect.value,
                "answer": verdict.answer,
            }
        )

    # JSON has no infinity: an end that is not known is null.
    content = {
        "intervention": ablation.intervention,
        "loss": ablation.loss,
        "num_targets": ablation.num_targets,
        "num_documents": ablation.num_documents,
        "recalled": int(ablation.recalled.sum()),
        "inputs_fingerprint": trace.facts.inputs_fingerprint,
        "model": trace.facts.model,
        "command": command,
        "effects": effects,
        "verdicts": verdicts,
    }
    write_text(path, json.dumps(to_json(content), indent=1) + "\n")


def read_ablation(path: Path, trace: Trace) -> list[AblationBar]:
    """Returns the effects of an ablation of the examples of a trace.

    Raises:
        DataError: When the file is not an ablation, or belongs to other examples.
    """
    content = read_record(path, _Ablation, advice=_ADVICE)
    if content.inputs_fingerprint != trace.facts.inputs_fingerprint:
        raise DataError(
            f"{path} was computed on inputs {content.inputs_fingerprint[:12]}, but the trace on inputs "
            f"{trace.facts.inputs_fingerprint[:12]}. {_ADVICE}"
        )
    return [bar._replace(edit=content.intervention) for bar in content.effects]
