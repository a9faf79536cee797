"""What transformers' mixins said of our models and of its T5, as one page of Markdown."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAIRS = {"STMoETest": "T5ModelTest", "STMoEEncoderTest": "T5EncoderOnlyModelTest"}
"""Classes of ours, and that of T5 which each is compared with."""

ON_PURPOSE = {
    "test_encoder_decoder_loss_no_double_shift": (
        "It expects the cross-entropy alone as the loss. Here the losses of the routers and the z-loss "
        "are in the loss by default, and the cross-entropy is the output `ce_loss`; with their weights "
        "at 0 the test passes."
    ),
    "test_forward_with_logits_to_keep": (
        "It expects as many logits as `input_ids` has tokens, as in a model without a decoder. T5 has "
        "no such argument and skips it; with a decoder as long as the encoder the test passes."
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "It writes other weights over a saved model.safetensors. A model folder holds the SHA-256 "
        "of its files, and one that does not fit is refused as damaged; the error says which file "
        "to remove when that was on purpose."
    ),
    "test_training_gradient_checkpointing_use_reentrant_true": (
        "Reentrant checkpointing loses the gradient of the routers' losses, and is refused with "
        "that reason."
    ),
}
"""Tests that fail here, and why they shall."""

_STATUS_OF_TAG = {"failure": "failed", "error": "failed", "skipped": "skipped"}
_ORDER = ("failed", "passed", "skipped")
_LEAD = """\
# Transformers' own tests

transformers tests its models with mixins. `python -m tests.mixins` runs them unchanged on our models
(`ModelTesterMixin`, `GenerationTesterMixin`, the export mixins and `ConfigTester`), next to transformers'
test classes of T5:

```
git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers ../transformers
pip install parameterized httpx
python -m tests.mixins run ../transformers --to runs/mixins
python -m tests.mixins page runs/mixins > docs/transformers.md
```

`TRANSFORMERS_SOURCE=../transformers make test` runs them with all other tests. Two fields of our config
differ from their defaults: `eval_capacity_factor=None`, because the mixins compare a sequence alone with the
same sequence in a batch, and `output_router_logits=False`, because they count outputs. Tests of flash
attention, accelerators, decoder-only models and rotary embeddings are skipped.
"""


@dataclass(frozen=True)
class Outcome:
    """What a test did: passed, failed or skipped, and for the last why."""

    status: str
    reason: str = ""


Outcomes = dict[tuple[str, str], Outcome]
"""By class and test."""


def read_outcomes(paths: Iterable[Path]) -> Outcomes:
    """Returns what each test did; of several runs the one in which it was not skipped counts."""
    outcomes: Outcomes = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            owner = case.attrib["classname"].rpartition(".")[2]
            key = (owner, case.attrib["name"].split(" ")[0])
            outcome = _outcome(case)

            # Subtests are cases of their own, and one that fails fails the test.
            before = outcomes.get(key, outcome)
            outcomes[key] = min(before, outcome, key=lambda each: _ORDER.index(each.status))
    return outcomes


def _outcome(case: ElementTree.Element) -> Outcome:
    """Returns what a case of the XML says."""
    for element in case:
        status = _STATUS_OF_TAG.get(element.tag)
        if status is not None:
            return Outcome(status, element.attrib.get("message", "").strip())
    return Outcome("passed")


def unexplained(ours: Outcomes) -> list[str]:
    """Returns the tests that fail here without a reason in `ON_PURPOSE`."""
    failed = {test for (_, test), outcome in ours.items() if outcome.status == "failed"}
    return sorted(failed - ON_PURPOSE.keys())


def page(ours: Outcomes, theirs: Outcomes, sources: Sequence[str]) -> str:
    """Returns the page.

    Args:
        ours: Outcomes of the classes of ours.
        theirs: Outcomes of the classes of T5.
        sources: What was run, a line each.
    """
    lines = [_LEAD, *(f"- {source}" for source in sources), ""]
    lines += ["| class | test class | passed | failed | skipped |", "|---|---|---|---|---|"]
    for our_class, their_class in PAIRS.items():
        shared = _shared_tests(ours, theirs, our_class, their_class)
        lines.append(_counts("ours", our_class, ours, shared))
        lines.append(_counts("T5", their_class, theirs, shared))

    lines += ["", "| fails here | why |", "|---|---|"]
    failed = sorted({test for (_, test), outcome in ours.items() if outcome.status == "failed"})
    lines += [f"| `{test}` | {ON_PURPOSE.get(test, 'not explained')} |" for test in failed]
    return "\n".join(lines) + "\n"


def _shared_tests(ours: Outcomes, theirs: Outcomes, our_class: str, their_class: str) -> list[str]:
    """Returns the tests that both classes have, in alphabetical order."""
    our_tests = {test for owner, test in ours if owner == our_class}
    their_tests = {test for owner, test in theirs if owner == their_class}
    return sorted(our_tests & their_tests)


def _counts(name: str, owner: str, outcomes: Outcomes, tests: Sequence[str]) -> str:
    """Returns the row of a class in the first table."""
    statuses = [outcomes[owner, test].status for test in tests]
    counts = [str(statuses.count(status)) for status in ("passed", "failed", "skipped")]
    return f"| {name} | `{owner}` | {' | '.join(counts)} |"
