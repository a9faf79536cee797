"""The file of a run's predictions: JSON lines that are written as they are made and read back after an interruption.

The first line says what was asked of which model. Then come the predictions of each batch, and after them the line
that closes the batch, with what its routers did.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.answers.rank import Choice, Scoring
from moe import DataError, whole_file


class Prediction(NamedTuple):
    """What a model answered.

    Attributes:
        id: Of the request.
        output: Generated text, or the choice of the highest score.
        scores: Of each choice; None when generated.
        choices: What the scores are made of.
        truncated: Whether the inputs were cut to the task's length.
    """

    id: str
    output: str
    scores: dict[str, float] | None
    choices: dict[str, Choice] | None = None
    truncated: bool = False

    def scored(self, scoring: Scoring) -> "Prediction":
        """Returns the prediction under a scoring; a generated one is the same under all."""
        if self.choices is None:
            return self
        scores = {text: scoring.score(text, choice) for text, choice in self.choices.items()}
        return self._replace(output=max(scores, key=lambda text: scores[text]), scores=scores)


class Batch(NamedTuple):
    """What was made of one batch.

    Attributes:
        predictions: One for each request.
        routers: Counts of what the routers of `encoder` and `decoder` did, by field of RouterStats; empty for a dense
            model.
    """

    predictions: list[Prediction]
    routers: dict[str, dict[str, Any]]


class Journal:
    """A file of predictions; without a path it keeps nothing, as on all ranks but one.

    Args:
        path: The file.
        header: What the predictions depend on; a file of another header is replaced.
        scoring: What decides between choices; a file of another one is scored anew.
    """

    def __init__(self, path: Path | None, header: dict[str, Any], scoring: Scoring) -> None:
        self.path, self.header, self.scoring = path, header, scoring

    def open(self, keep: Callable[[int], int]) -> list[Batch]:
        """Returns the whole batches that the file holds; after it the file holds these and nothing else.

        Args:
            keep: Returns how many to keep of as many whole batches.

        Raises:
            DataError: When the file cannot be read or written; what it held is then still there.
        """
        if self.path is None:
            return []
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
            header, batches = read_journal(text)
            if {name: value for name, value in header.items() if name != "scoring"} != self.header:
                batches = []
            kept = batches[: keep(len(batches))]
            batches = [Batch([p.scored(self.scoring) for p in made], routers) for made, routers in kept]
            wanted = _lines([{**self.header, "scoring": vars(self.scoring)}])
            wanted += "".join(_batch_lines(batch) for batch in batches)
            if wanted != text:
                with whole_file(self.path) as partial:
                    partial.write_text(wanted, encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error
        return batches

    def append(self, batches: Sequence[Batch]) -> None:
        """Writes further batches.

        Raises:
            DataError: When the file cannot be written; the next run goes on behind the last whole batch.
        """
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(_batch_lines(batch) for batch in batches)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> DataError:
        """Returns what the user is told."""
        return DataError(
            f"Predictions cannot be written to {self.path}: {error.strerror or error}. All that it holds is kept. Make "
            "room or give another --out, and run the same command again: it goes on from there."
        )


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Returns the predictions of the whole batches in a file by id; none when it is missing."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {prediction.id: prediction for batch in read_journal(text)[1] for prediction in batch.predictions}


def read_journal(text: str) -> tuple[dict[str, Any], list[Batch]]:
    """Returns the first line of a file of predictions, and its whole batches; a torn end is left out."""
    values = _values(text)
    header, batches, made = next(values, {}), [], []
    for value in values:
        if "routers" in value:
            batches.append(Batch(made, value["routers"]))
            made = []
        else:
            choices = value["choices"]
            if choices is not None:
                choices = {text: Choice(**choice) for text, choice in choices.items()}
            made.append(Prediction(**{**value, "choices": choices}))
    return header, batches


def _values(text: str) -> Iterator[dict[str, Any]]:
    """Gives the values of the lines that are whole."""
    for line in text.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not line.endswith("\n"):
            return
        yield value


def _lines(values: Iterable[dict[str, Any]]) -> str:
    """Returns JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


def _batch_lines(batch: Batch) -> str:
    """Returns the lines of a batch."""
    predictions = []
    for prediction in batch.predictions:
        choices = prediction.choices
        if choices is not None:
            choices = {text: choice._asdict() for text, choice in choices.items()}
        predictions.append({**prediction._asdict(), "choices": choices})
    return _lines([*predictions, {"routers": batch.routers}])
