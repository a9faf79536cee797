"""Scores of a model on your own pairs of texts: the metrics that fit their targets, and the dev scores
of a run.

eval/stmoe_eval/pairs.py uses the same metrics, so that `stmoe eval run --pairs` gives the same numbers.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from moe.checkpoint.best_model import DEV_FOLDER, DevEvaluation
from moe.checkpoint.loading import load_model
from moe.data.language_codes import answer_settings, by_languages
from moe.data.pair_files import Pair
from moe.data.tokenizer import load_tokenizer, prompt_ids, written
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.mesh import Mesh
from moe.errors import DataError
from moe.files import write_text
from moe.json_lines import JsonLines
from moe.models.modeling import STMoEForConditionalGeneration
from moe.parsing import read_text

ANSWER_TOKENS = 128
"""Most tokens of a generated answer."""

PAIRS_FILE = "pairs.jsonl"
ANSWERS_FILE = "answers.jsonl"

_SHORT_WORDS = 10  # mean length of targets up to which they are answers, not texts
_ROWS = 64  # of a batch

Scorer = Callable[[Sequence[str], Sequence[str]], list[float]]
"""(N targets, N answers) to N scores in 0..1."""


# ---------------------------------------------------------------------------
# Metrics


def exact_matches(targets: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Returns 1 where an answer equals its target in written form, and 0 elsewhere."""
    pairs = zip(targets, answers, strict=True)
    return [float(written(target).split() == written(answer).split()) for target, answer in pairs]


def word_f1(target: str, answer: str) -> float:
    """Returns the F1 of the words of an answer, as bags; 0 when either is empty."""
    target_words = written(target).split()
    answer_words = written(answer).split()
    num_shared = sum((Counter(target_words) & Counter(answer_words)).values())
    if num_shared == 0:
        return 0.0

    # F1 of bags of words.
    precision = num_shared / len(answer_words)
    recall = num_shared / len(target_words)
    return 2 * precision * recall / (precision + recall)


def word_f1s(targets: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Returns the F1 of the words of each answer; an empty answer to an empty target has 1."""
    matches = exact_matches(targets, answers)
    pairs = zip(targets, answers, matches, strict=True)
    return [match or word_f1(target, answer) for target, answer, match in pairs]


def rouge_fmeasures(kind: str, targets: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Returns the ROUGE F-measure of each answer, of kind `rouge1`, `rouge2` or `rougeLsum`.

    There is no stemming. A sentence ends at a newline and at ` . `.

    Source:
        T5 `t5/evaluation/metrics.py`, `rouge_mean` at e081111. Differs: no; T5's `rouge` reports
        the median of unseeded resamples.
    """
    # Slow to import, and only long targets need it.
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind])
    scores = []
    for target, answer in zip(targets, answers, strict=True):
        rouge = scorer.score(_sentences(target), _sentences(answer))
        scores.append(rouge[kind].fmeasure)
    return scores


def _sentences(text: str) -> str:
    """Returns a text with a sentence on each line."""
    return "\n".join(map(written, text.replace(" . ", " .\n").split("\n")))


PAIR_METRICS: dict[str, dict[str, Scorer]] = {
    "labels": {"accuracy": exact_matches},
    "answers": {"exact_match": exact_matches, "f1": word_f1s},
    "texts": {
        "rouge1": partial(rouge_fmeasures, "rouge1"),
        "rouge2": partial(rouge_fmeasures, "rouge2"),
        "rougeLsum": partial(rouge_fmeasures, "rougeLsum"),
    },
}
"""Metrics by kind of targets; the first one chooses the best model."""


def kind_of_targets(targets: Sequence[str]) -> str:
    """Returns the kind of the targets, a key of `PAIR_METRICS`.

    If most targets occur more than once, they are labels; otherwise they are answers up to a mean
    length of 10 words, and texts above. Long targets in another script are answers, too: ROUGE
    reads the letters a to z and digits only.
    """
    counts = Counter(targets)
    num_repeated = sum(counts[target] > 1 for target in targets)
    if 2 * num_repeated > len(targets):
        return "labels"
    mean_words = sum(len(target.split()) for target in targets) / len(targets)
    characters = "".join(targets)
    num_ascii = sum(character.isascii() for character in characters)
    is_text = mean_words > _SHORT_WORDS and 2 * num_ascii > len(characters)
    return "texts" if is_text else "answers"


def scorers_for(targets: Sequence[str]) -> tuple[dict[str, Scorer], str]:
    """Returns the metrics that fit the targets, by name, and a sentence that says which and why."""
    kind = kind_of_targets(targets)
    names = ", ".join(PAIR_METRICS[kind])
    num_distinct = len(set(targets))
    reasons = {
        "labels": f"most targets occur more than once ({num_distinct:,} different)",
        "answers": f"the targets have up to {_SHORT_WORDS} words on average, or another script than ROUGE reads",
        "texts": f"the targets are long, more than {_SHORT_WORDS} words on average",
    }

    # Missing metrics are named, and the rest is reported.
    if kind == "texts" and find_spec("rouge_score") is None:
        short = PAIR_METRICS["answers"]
        return short, (
            f"{', '.join(short)}; {names} would fit, since {reasons[kind]}, but rouge_score is not "
            'installed: pip install "stmoe[eval]"'
        )
    return PAIR_METRICS[kind], f"{names}, since {reasons[kind]}"


# ---------------------------------------------------------------------------
# Dev scores of a run


def dev_scorer(
    pairs: Sequence[Pair], inputs_length: int, mesh: Mesh | None, device_type: str
) -> DevEvaluation:
    """Returns a function that scores a saved model on pairs, by greedy decoding.

    Every rank must call it. On a mesh all ranks answer the same pairs, so that the scores don't
    depend on their number. The pairs are written to dev/pairs.jsonl, for `stmoe eval run
    --pairs`, and the answers of every step to dev/step_*/answers.jsonl.

    Args:
        pairs: The pairs.
        inputs_length: Maximum number of tokens of an input; longer ones are truncated.
        mesh: The ranks; None for one process.
        device_type: `cpu` or `cuda`.
    """
    targets = [pair.targets for pair in pairs]
    scorers, _ = scorers_for(targets)

    def evaluate(folder: Path, answers_folder: Path) -> dict[str, float]:
        model = load_model(folder, mesh=mesh, device=device_type)
        answers = _generate(model, folder, pairs, inputs_length, mesh)

        scores = {}
        for name, score in scorers.items():
            values = score(targets, answers)
            scores[f"pairs/{name}"] = 100 * sum(values) / len(values)

        def write() -> None:
            write_text(answers_folder.parent / PAIRS_FILE, _pairs_text(pairs))
            records = []
            for pair, answer in zip(pairs, answers, strict=True):
                records.append({"inputs": pair.inputs, "targets": pair.targets, "answer": answer})
            JsonLines(answers_folder / ANSWERS_FILE, records)

        broadcast_from_rank_zero(write)
        return {**scores, "mean": next(iter(scores.values()))}

    return evaluate


def check_dev_pairs(run: Path, pairs: Sequence[Pair]) -> None:
    """Checks that a resumed run scores the pairs that it scored before.

    Raises:
        DataError: When the run scored other pairs, so that its best model cannot be compared.
    """
    path = run / DEV_FOLDER / PAIRS_FILE
    if path.is_file() and read_text(path) != _pairs_text(pairs):
        raise DataError(
            f"The dev pairs differ from those of the run, {path}. Give --train, --dev and --dev_share "
            "as before, or another --out."
        )


def _pairs_text(pairs: Sequence[Pair]) -> str:
    lines = []
    for pair in pairs:
        record = {name: value for name, value in pair._asdict().items() if value is not None}
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


@torch.inference_mode()
def _generate(
    model: STMoEForConditionalGeneration,
    folder: Path,
    pairs: Sequence[Pair],
    inputs_length: int,
    mesh: Mesh | None,
) -> list[str]:
    """Returns the answer to the input of each pair, in order."""
    answers = [""] * len(pairs)
    languages = [pair.languages for pair in pairs]
    for tokenizer, members in by_languages(load_tokenizer(folder), languages):
        encoded = prompt_ids(tokenizer, [pairs[n].inputs for n in members], inputs_length)
        inputs = dict(zip(members, encoded, strict=True))

        # Inputs of similar length share a batch.
        order = sorted(members, key=lambda number: -len(inputs[number]))
        for start in range(0, len(order), _ROWS):
            numbers = order[start : start + _ROWS]
            batch = tokenizer.pad(
                {"input_ids": [inputs[number] for number in numbers]}, return_tensors="pt"
            ).to(model.device)
            tokens = model.generate(
                **batch,
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                num_beams=1,
                synced_gpus=mesh is not None,  # ranks end together
                **answer_settings(tokenizer),
            )
            decoded = tokenizer.batch_decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for number, answer in zip(numbers, decoded, strict=True):
                answers[number] = answer
    return broadcast_from_rank_zero(lambda: answers)
