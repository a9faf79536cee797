"""Release folders of a tiny study: they load, are the trained weights, and their cards tell the truth."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eval.studies.release import primary_runs
from eval.studies.report import read_result
from eval.studies.runs import study_runs
from eval.studies.study import Contrast, read_study
from moe import STMoEForConditionalGeneration
from moe.errors import ConfigError
from scripts.models import main
from tests.eval.studies.conftest import copy_run
from tests.eval.studies.results import build, result_of, run, runs_of


def test_the_pair_of_the_best_seed_comes_first_and_needs_both_models(tmp_path: Path) -> None:
    study = build(primary=Contrast("b", "a"), settings={"corpus": "c", "tokenizer": "t"})
    runs = study_runs(study, tmp_path)
    outcomes = runs_of({"a": [2.0, 2.1, 2.2], "b": [2.6, 2.7, 2.5]})
    pairs = primary_runs(result_of(study, outcomes), runs)
    assert [(pair.best.name, pair.rival.name) for pair in pairs] == [
        ("b, seed 2", "a, seed 2"),
        ("b, seed 0", "a, seed 0"),
        ("b, seed 1", "a, seed 1"),
    ]

    # A run that diverged has no model to release.
    outcomes[2] = run("a", 2, 5.0, has_diverged=True)
    pairs = primary_runs(result_of(study, outcomes), runs)
    assert [pair.best.seed for pair in pairs] == [0, 1]


@pytest.mark.slow
def test_models_are_trained_where_they_are_missing_and_released_with_a_card(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_run(studies, "study", "without/seed-3")
    options = ["--studies", str(studies), "--study", str(studies / "study.yaml")]
    main([*options, "--out", str(tmp_path / "models")])
    assert "with, seed 3 is in" in capsys.readouterr().out

    # The other run of the first seed was trained, those of the second are missing in the study's report.
    result = read_result(studies / "study/study.json")
    assert [(item.arm, item.seed) for item in result.outcomes] == [("with", 3), ("without", 3)]
    assert result.missing == ["with, seed 5", "without, seed 5"]

    # They load, and are the trained weights.
    runs = {
        item.name: item
        for item in study_runs(read_study(studies / "study.yaml"), studies / "study")
    }
    for name, arm in (("st-moe-mini", "with"), ("dense-mini", "without")):
        folder = tmp_path / "models" / name
        model = STMoEForConditionalGeneration.from_pretrained(folder)
        source = runs[f"{arm}, seed 3"].folder / "model"
        trained = STMoEForConditionalGeneration.from_pretrained(source)
        for weight, expected in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(weight, expected)
        batch = AutoTokenizer.from_pretrained(folder)(["ba ko"], return_tensors="pt")
        assert model.generate(**batch, max_new_tokens=2).shape[0] == 1

        # Numbers of the study, tokens, licence, recipe.
        card = (folder / "README.md").read_text()
        for number in result.numbers:
            assert f"{number.number:.4f}" in card
        assert f"*{result.contrasts[0].verdict_text}*: with vs. without" in card
        assert "1 seed. Released" in card
        assert "Not run: with, seed 5; without, seed 5." in card
        assert "6 steps train on " in card
        assert "epochs of the" in card
        assert "| not stated |" in card
        assert "initializer_scale:" in card
        assert "does not know" not in card

    # A second call trains nothing, and replaces the folders.
    main([*options, "--out", str(tmp_path / "models")])
    assert len(read_result(studies / "study/study.json").outcomes) == 2


@pytest.mark.parametrize("name", ["z_loss", "transfer_topic"])
def test_studies_of_other_kinds_release_no_model(tmp_path: Path, name: str) -> None:
    study = f"recipes/studies/{name}.yaml"
    options = ["--studies", str(tmp_path / "studies"), "--study", study]
    with pytest.raises(ConfigError, match="a study of pre-training without a sweep"):
        main([*options, "--out", str(tmp_path / "models")])
    assert list(tmp_path.iterdir()) == []
