"""The file of a run's predictions: JSON lines that are written as they are made and read back after
an interruption.

The first line says what was asked of which model. Then come the predictions of each batch, and
after them the line that closes the batch, with what its routers did and a checksum of all lines up
to there.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from eval.answers.likelihood import Choice, Normalization, Scoring
from eval.sealed_json import SEAL, is_whole, seal
from eval.task import Decoding
from moe import DataError
from moe.checks import shown
from moe.files import whole_file
from moe.parsing import parse_json, read_text, to_record

_MOST_COUNTED = 1 << 53
_ADVICE = "Restore the file; or delete it and run `python -m eval run` again, which makes its answers anew."

Mode = Literal["generate", "rank"]
Count = Annotated[int, Field(ge=0, le=_MOST_COUNTED)]
Stack = Literal["encoder", "decoder"]


class ScoringFields(NamedTuple):
    """A `Scoring` as it stands in the file."""

    include_eos: bool
    normalize: Normalization


class Header(NamedTuple):
    """What the predictions of a file depend on.

    Attributes:
        model: Fingerprint of the checkpoint.
        task: Its name.
        version: Of the task.
        mode: How the model was asked.
        decoding: How answers were generated; None for ranked choices.
        batches: A digest of what was asked.
        scoring: What decided between choices.
    """

    model: str
    task: str
    version: int
    mode: Mode
    decoding: Decoding | None
    batches: str
    scoring: ScoringFields

    def line(self) -> str:
        """Returns the line of the file."""
        decoding = None if self.decoding is None else self.decoding._asdict()
        return json.dumps(
            {**self._asdict(), "decoding": decoding, "scoring": self.scoring._asdict()}
        )


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

    def line(self) -> str:
        """Returns the line of the file."""
        choices = self.choices
        if choices is not None:
            choices = {text: choice._asdict() for text, choice in choices.items()}
        return json.dumps({**self._asdict(), "choices": choices})


class Batch(NamedTuple):
    """What was made of one batch.

    Attributes:
        predictions: One for each request.
        routers: Counts of what the routers of `encoder` and `decoder` did, by field of RouterStats;
            empty for a dense model.
    """

    predictions: list[Prediction]
    routers: Mapping[Stack, dict[str, Any]]


class _Closing(NamedTuple):
    """The line that closes a batch; files of earlier versions have no checksum."""

    routers: dict[Stack, dict[str, Count | list[Count]]]
    sha256: str | None = None


class Written(NamedTuple):
    """What a file of predictions holds.

    Attributes:
        header: Its first line; None when it has none.
        batches: Those that are whole.
        numbers: By id, the line of a prediction, in them or behind them.
        sealed: Whether every batch has a checksum; those of earlier versions have none.
    """

    header: Header | None
    batches: list[Batch]
    numbers: dict[str, int]
    sealed: bool


class Journal:
    """A file of predictions; without a path it keeps nothing, as on all ranks but one.

    Args:
        path: The file.
        header: What the predictions depend on; a file of another header is replaced, one of another
            scoring alone is scored anew.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.path, self.header = path, header
        self._last = ""  # the line that the next checksum counts first

    def open(self, ids: Sequence[Sequence[str]], keep: Callable[[int], int]) -> list[Batch]:
        """Returns the whole batches that the file holds; after it the file holds these and nothing
        else.

        Args:
            ids: Of what is asked in each batch.
            keep: Returns how many to keep of as many whole batches.

        Raises:
            DataError: When the file cannot be read or written, is none of predictions, or was
                changed by others; what it held is then still there.
        """
        if self.path is None:
            return []
        try:
            written = read_journal(self.path)
            batches = written.batches
            if (
                written.header is None
                or written.header._replace(scoring=self.header.scoring) != self.header
            ):
                batches = []
            for asked, batch in zip(ids, batches, strict=False):
                self._check_answered(asked, batch)

            scoring = Scoring(*self.header.scoring)
            kept = batches[: keep(len(batches))]
            batches = [Batch([p.scored(scoring) for p in made], routers) for made, routers in kept]

            self._last = self.header.line()
            wanted = self._last + "\n" + "".join(map(self._batch_lines, batches))
            if not self.path.exists() or self.path.read_bytes() != wanted.encode():
                with whole_file(self.path) as partial:
                    partial.write_text(wanted, encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error
        return batches

    def append(self, batches: Sequence[Batch]) -> None:
        """Writes further batches.

        Raises:
            DataError: When the file cannot be written; the next run goes on behind the last whole
                batch.
        """
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(map(self._batch_lines, batches))
        except OSError as error:
            raise self._failure(error) from error

    def _batch_lines(self, batch: Batch) -> str:
        """Returns the lines of a batch, the last of which the next checksum counts first."""
        lines = [prediction.line() for prediction in batch.predictions]
        self._last = seal(json.dumps({"routers": batch.routers}), "\n".join([self._last, *lines]))
        return "".join(f"{line}\n" for line in [*lines, self._last])

    def _check_answered(self, ids: Sequence[str], batch: Batch) -> None:
        """Raises a DataError when a batch answers something else than these."""
        answered = [prediction.id for prediction in batch.predictions]
        if answered != list(ids):
            raise DataError(
                f"{self.path} answers {shown(answered)} where {shown(list(ids))} were asked. {_ADVICE}"
            )

    def _failure(self, error: OSError) -> DataError:
        """Returns what the user is told."""
        return DataError(
            f"Predictions cannot be written to {self.path}: {error.strerror or error}. All that it holds is kept. Make "
            "room or give another --out, and run the same command again: it goes on from there."
        )


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Returns the predictions of the whole batches in a file by id; none when it is missing."""
    return {
        prediction.id: prediction
        for batch in read_journal(path).batches
        for prediction in batch.predictions
    }


def read_journal(path: Path, check_header: Callable[[Header], None] | None = None) -> Written:
    """Returns what a file of predictions holds; a torn end is left out, and a missing file holds
    nothing.

    Args:
        path: The file.
        check_header: Raises when its first line is not that of the file which is wanted.

    Raises:
        DataError: When it cannot be read, a line is not what such a file holds, or was changed;
            names the line.
    """
    if not path.exists():
        return Written(None, [], {}, True)
    lines = read_text(path, advice=_ADVICE).split("\n")[
        :-1
    ]  # what no newline ends was being written
    if not lines:
        return Written(None, [], {}, True)
    values = list(_values(path, lines))
    header = to_record(Header, values[0], where=f"{path}, line 1", advice=_ADVICE)
    if check_header is not None:
        check_header(header)

    batches: list[Batch] = []
    numbers: dict[str, int] = {}
    made: list[Prediction] = []
    sealed = True
    start = 0  # of the lines that the next checksum counts
    for number, value in enumerate(values[1:], start=2):
        where = f"{path}, line {number}"
        if "routers" not in value:
            prediction = _prediction(value, header.mode, where)
            if prediction.id in numbers:
                first = numbers[prediction.id]
                raise DataError(
                    f"{where}: {shown(prediction.id)} was answered in line {first} already. {_ADVICE}"
                )
            numbers[prediction.id] = number
            made.append(prediction)
            continue

        closing = to_record(_Closing, value, where=where, advice=_ADVICE)
        if closing.sha256 is None:
            sealed = False
        elif not is_whole(lines[number - 1], value, "\n".join(lines[start : number - 1])):
            raise DataError(
                f"{path}, lines {start + 1} to {number}: they are not what was written ({SEAL} differs). {_ADVICE}"
            )
        batches.append(Batch(made, closing.routers))
        if _sizes(closing.routers) != _sizes(batches[0].routers):
            raise DataError(
                f"{where}: routers has other counts than that of the first batch. {_ADVICE}"
            )
        made = []
        start = number - 1
    return Written(header, batches, numbers, sealed)


def _values(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of lines.

    Raises:
        DataError: When one is none.
    """
    for number, line in enumerate(lines, start=1):
        value = parse_json(line, where=f"{path}, line {number}", advice=_ADVICE, nan=True)
        if not isinstance(value, dict):
            raise DataError(
                f"{path}, line {number}: {shown(line[:60])} is no JSON object. {_ADVICE}"
            )
        yield value


def _prediction(value: dict[str, Any], mode: Mode, where: str) -> Prediction:
    """Returns the prediction of a line.

    Raises:
        DataError: When it is none of this mode.
    """
    prediction = to_record(Prediction, value, where=where, advice=_ADVICE)
    choices = prediction.choices
    fits = choices is None and prediction.scores is None
    if mode == "rank":
        fits = (
            bool(choices)
            and choices.keys() == (prediction.scores or {}).keys()
            and prediction.output in choices
        )
    if not fits:
        raise DataError(f"{where}: {shown(value)} is no answer of mode {mode}. {_ADVICE}")
    return prediction


def _sizes(routers: Mapping[Stack, dict[str, Any]]) -> dict[tuple[str, str], int | None]:
    """Returns how many numbers each count of a batch has; None for a single one."""
    sizes = {}
    for stack, counts in routers.items():
        for name, count in counts.items():
            sizes[stack, name] = len(count) if isinstance(count, list) else None
    return sizes
