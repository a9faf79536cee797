"""The predictions of a model on a task, in a JSON Lines file that grows batch by batch.

The first line, the header, identifies the model and the requests. Each batch has one line for each
prediction and a closing line with router counts. A resumed run reads the closed batches back. Files
of earlier versions have a checksum in each closing line, which is ignored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from moe.errors import DataError
from moe.json_lines import JsonLines
from moe.parsing import read_json_lines, to_json, to_record
from stmoe_eval.answers.inference import AS_SAVED, Inference
from stmoe_eval.answers.likelihood import ChoiceLikelihood, Scoring
from stmoe_eval.task import Decoding

_MAX_COUNT = 1 << 53
_ADVICE = (
    "Restore the file; or delete it and run `stmoe eval run` again, which makes its answers anew."
)

Mode = Literal["generate", "rank"]
Stack = Literal["encoder", "decoder"]
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
RouterCounts = dict[str, Count | list[Count]]
"""Router counts of a stack: the integer fields of `RouterStats`."""

_Routers = dict[Stack, RouterCounts]


# ---------------------------------------------------------------------------
# Records


class Header(NamedTuple):
    """Everything that determines the predictions of a file.

    Attributes:
        model: Fingerprint of the checkpoint.
        task: Its name.
        version: Version of the task.
        mode: `generate` or `rank`.
        decoding: How answers were generated; None for ranked choices.
        batches: Digest of the batches of requests.
        scoring: How choices were scored.
        inference: Settings that override the checkpoint's own; omitted if there are none.
    """

    model: str
    task: str
    version: int
    mode: Mode
    decoding: Decoding | None
    batches: str
    scoring: Scoring
    inference: Inference = AS_SAVED

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        fields = to_json(self)
        if self.inference == AS_SAVED:
            del fields["inference"]
        return fields


class Prediction(NamedTuple):
    """A model's answer to one request.

    Attributes:
        id: Id of the request.
        output: Generated text, or the choice with the highest score.
        scores: Score of each choice; None for a generated answer.
        choices: Likelihoods from which the scores are computed; None for a generated answer.
        truncated: Whether the inputs were truncated to the task's length.
    """

    id: str
    output: str
    scores: dict[str, float] | None
    choices: dict[str, ChoiceLikelihood] | None = None
    truncated: bool = False

    def scored(self, scoring: Scoring) -> "Prediction":
        """Returns the prediction with a scoring applied; generated ones do not change."""
        if self.choices is None:
            return self

        scores = {text: scoring.score(text, choice) for text, choice in self.choices.items()}
        best = max(scores, key=scores.__getitem__)
        return self._replace(output=best, scores=scores)

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        choices = self.choices
        if choices is not None:
            choices = {text: choice._asdict() for text, choice in choices.items()}
        return {**self._asdict(), "choices": choices}


class Batch(NamedTuple):
    """A model's answers to one batch.

    Attributes:
        predictions: One for each request.
        routers: Router counts of each stack; empty for a dense model.
    """

    predictions: list[Prediction]
    routers: Mapping[Stack, RouterCounts]

    def scored(self, scoring: Scoring) -> "Batch":
        """Returns the batch with its predictions with a scoring applied."""
        predictions = [prediction.scored(scoring) for prediction in self.predictions]
        return self._replace(predictions=predictions)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the lines of the file."""
        return [*(each.to_json() for each in self.predictions), {"routers": self.routers}]


# ---------------------------------------------------------------------------
# Writing


class PredictionsFile:
    """A predictions file that a run continues; without a path nothing is kept.

    Args:
        path: The file; None on all ranks but rank 0.
        header: Everything that the predictions depend on. A file with another header is replaced;
            one that differs only in its scoring is rescored.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.path = path
        self.header = header
        self._lines: JsonLines | None = None

    def resume(self, num_reusable: Callable[[int], int]) -> list[Batch]:
        """Returns the batches of the file, and rewrites it to hold only these.

        Args:
            num_reusable: Returns how many of as many closed batches to keep.

        Raises:
            DataError: When the file cannot be read or written, or holds no predictions. The old
                content is then still there.
        """
        if self.path is None:
            return []
        try:
            # Kept batches are scored again, in case the file was written with another scoring.
            batches = self._read_batches(self.path)
            num_kept = num_reusable(len(batches))
            batches = [batch.scored(self.header.scoring) for batch in batches[:num_kept]]
            self._lines = JsonLines(self.path, [self.header.to_json(), *_lines_of(batches)])
        except OSError as error:
            raise self._write_error(error) from error
        return batches

    def append(self, batches: Sequence[Batch]) -> None:
        """Writes further batches.

        Raises:
            DataError: When the file cannot be written; the next run continues after the last closed
                batch.
        """
        if self._lines is None:
            return
        try:
            self._lines.append(*_lines_of(batches))
        except OSError as error:
            raise self._write_error(error) from error

    def _read_batches(self, path: Path) -> list[Batch]:
        """Returns the closed batches of the file; none if it belongs to anything else."""
        header, batches = read_predictions_file(path)
        if header is None:
            return []
        with_own_scoring = header._replace(scoring=self.header.scoring)
        return batches if with_own_scoring == self.header else []

    def _write_error(self, error: OSError) -> DataError:
        return DataError(
            f"Predictions cannot be written to {self.path}: {error.strerror or error}. All that it "
            "holds is kept. Make room or give another --out, and run the same command again: it "
            "continues from there."
        )


def _lines_of(batches: Sequence[Batch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_json()


# ---------------------------------------------------------------------------
# Reading


def check_inference_of_file(path: Path, model: str, inference: Inference) -> None:
    """Raises when a file holds answers of the same model under other settings.

    Missing or damaged files are accepted here; reading the whole file raises.

    Raises:
        DataError: Names both settings.
    """
    try:
        _, value = next(read_json_lines(path, torn_end=True))
        header = to_record(Header, value, where=f"{path}, line 1")
    except (DataError, StopIteration):
        return
    if header.model != model or header.inference == inference:
        return
    neither = "neither --dropless nor --capacity-factor nor --dtype"
    raise DataError(
        f"{path} holds answers of this model that were made with "
        f"{header.inference.options or neither}; this run has {inference.options or neither}. "
        "Give the same options, or another --out."
    )


def read_predictions_file(path: Path) -> tuple[Header | None, list[Batch]]:
    """Returns the header and the closed batches of a predictions file; neither if it is missing.

    Raises:
        DataError: When it cannot be read, or a line is not what was written there; names the line.
    """
    header = None
    batches: list[Batch] = []
    if not path.exists():
        return header, batches

    open_batch: list[Prediction] = []
    for number, value in read_json_lines(path, advice=_ADVICE, torn_end=True):
        where = f"{path}, line {number}"
        if header is None:
            header = to_record(Header, value, where=where, advice=_ADVICE)
        elif "routers" not in value:
            open_batch.append(to_record(Prediction, value, where=where, advice=_ADVICE))

        # The line that closes a batch.
        else:
            routers = value["routers"]
            routers = to_record(_Routers, routers, where=f"{where}: routers", advice=_ADVICE)
            batches.append(Batch(open_batch, routers))
            open_batch = []
    return header, batches
