"""An arm that is run again comes to the same numbers; one that does not is found out."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eval.studies.report import read_result
from moe.errors import ConfigError
from tests.eval.studies.tiny_study import run_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repeated(complete_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a study that was run, and one arm of it twice with one seed."""
    folder = tmp_path_factory.mktemp("repeats") / "studies"
    shutil.copytree(complete_study, folder)
    run_study(folder, folder / "whole", "--repeat", "with:3")
    return folder


@pytest.fixture
def copied(repeated: Path, tmp_path: Path) -> Path:
    """Returns a copy of it that may be changed."""
    return Path(shutil.copytree(repeated, tmp_path / "studies"))


def test_a_second_run_has_the_same_bits_and_the_report_says_so(
    repeated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = repeated / "whole"
    (repeat,) = read_result(out / "study.json").repeats
    assert (repeat.arm, repeat.seed, repeat.first_difference) == ("with", 3, None)
    assert repeat.has_equal_weights
    assert repeat.num_values > 6 * 10

    # The runs of the study had half of the threads each, and so has the repeat.
    first = json.loads((out / "runs/with/seed-3/study_run.json").read_text())
    assert repeat.threads == first["threads"]

    # Later reports say it too, and name the command that makes the study.
    run_study(repeated, out, "--report")
    text = capsys.readouterr().out
    assert "Repeated: with, seed 3" in text
    assert "and the final weights are bit-identical" in text
    assert "--repeat" not in read_result(out / "study.json").command


def test_one_other_bit_is_found(copied: Path) -> None:
    out = copied / "whole"
    metrics = out / "repeats/with/seed-3/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] == 4 and "train/loss" in line:
            line["train/loss"] += 2**-40
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    run_study(copied, out, "--report")
    (repeat,) = read_result(out / "study.json").repeats
    assert (repeat.first_difference, repeat.is_identical) == (4, False)
    assert "numbers **differ** from step 4." in (out / "study.md").read_text()


def test_other_weights_are_found(copied: Path) -> None:
    path = copied / "whole/repeats/with/seed-3/model/model.safetensors"
    weights = load_file(path)
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, path)

    run_study(copied, copied / "whole", "--report")
    (repeat,) = read_result(copied / "whole/study.json").repeats
    assert (repeat.first_difference, repeat.is_identical) == (None, False)
    assert "but the final weights differ" in (copied / "whole/study.md").read_text()


def test_the_speed_may_differ(copied: Path) -> None:
    metrics = copied / "whole/repeats/with/seed-3/metrics.jsonl"
    assert "tokens_per_second" in metrics.read_text()
    metrics.write_text(metrics.read_text().replace('tokens_per_second": ', 'tokens_per_second": 1'))
    run_study(copied, copied / "whole", "--report")
    assert read_result(copied / "whole/study.json").repeats[0].is_identical


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("wiht", r"--repeat is 'wiht'; there is no such arm.*Did you mean 'with'"),
        ("with:7", r"expected ARM or ARM:SEED with a seed of 3, 5"),
        ("without:5", r"without, seed 5 is not complete in .* Run the study"),
    ],
)
def test_what_is_not_in_the_study_or_not_complete_is_refused(
    copied: Path, choice: str, message: str
) -> None:
    shutil.rmtree(copied / "whole/runs/without/seed-5")
    with pytest.raises(ConfigError, match=message):
        run_study(copied, copied / "whole", "--repeat", choice)
