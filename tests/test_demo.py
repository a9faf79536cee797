"""The main job from end to end, at a small size, as a user starts it."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from eval.studies.runs import study_runs
from eval.studies.scheduler import StudyError
from eval.studies.study import read_study
from moe import STMoEForConditionalGeneration
from moe.commands.pretrain import pretrain_command
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError, DataError
from moe.inspection.tables import LayerCounts
from scripts import demo, models, transfer
from scripts.demo_summary import most_specialized
from tests.processes import run_command
from tests.training.tiny_run import MODEL, write_inputs


def call(*arguments):
    return run_command("scripts.demo", *arguments)


class Page(HTMLParser):
    """Collects text and references, and checks that every tag is closed."""

    EMPTY = frozenset({"meta", "br", "path", "use"})

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.references = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href") and value:
                self.references.append(value)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("job", [demo, transfer])
def test_a_job_finds_its_recipes_from_any_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"99999; .*, model.vocab_size in \w+_pretrain\."):
        job.main(["--vocab-size", "99999", "--out", str(tmp_path / "out")])
    for study in (demo.STUDY, demo.FACTS_STUDY, models.STUDY):
        assert Path(demo.repository_file(study)).is_file()


def test_experts_are_numbered_from_one_as_on_the_pages():
    ids = SpecialIds(pad=0, eos=1, first_sentinel=9, num_sentinels=3)
    first_choice = torch.full((10, 3), 3)  # too rare to be preferred
    first_choice[4] = torch.tensor([0, 0, 90])
    first_choice[9] = torch.tensor([900, 0, 0])  # a sentinel, which is not text
    expert, tokens, _ = most_specialized(LayerCounts(("encoder", 0), first_choice, None), ids)
    assert (expert, tokens) == (3, [4])


def test_the_options_of_a_quick_run_are_those_of_its_commands():
    sizes = demo.QUICK
    folders = ["--corpus", "corpus", "--tokenizer", "tokenizer", "--out", "run"]
    argv = ["--config", "demo_pretrain", *folders, *sizes.pretrain.split()]
    recipe, _ = pretrain_command().parse(argv)
    assert recipe.training.steps == 100
    for study, settings in ((demo.STUDY, sizes.finetune), (demo.FACTS_STUDY, sizes.learn)):
        changes = dict(pair.split("=") for pair in settings.split() if pair != "--set")
        overrides = {name: int(value) for name, value in changes.items()}
        for run in study_runs(read_study(Path(demo.repository_file(study))), Path("x"), overrides):
            assert run.recipe.training.steps == overrides["training.steps"]


@pytest.mark.slow
def test_a_step_beside_another_fails_with_the_end_of_its_output(tmp_path):
    log = tmp_path / "log"
    threads = torch.get_num_threads()
    argv = ["--facts", "0", "--out", str(tmp_path / "facts")]
    with (
        pytest.raises(StudyError, match=r"Learn failed with exit code 2: .*--facts"),
        demo.run_beside("Learn", log, "python -m scripts.facts", *argv),
    ):
        pass
    assert torch.get_num_threads() == threads

    # An error in the block ends the step at once.
    with (
        pytest.raises(KeyError),
        demo.run_beside("Learn", log, "python -m scripts.facts", "--out", str(tmp_path / "facts")),
    ):
        raise KeyError
    assert not (tmp_path / "facts").exists()


@pytest.mark.slow
def test_the_demo_makes_everything_it_says(tmp_path):
    inputs, out = write_inputs(tmp_path), tmp_path / "demo"
    recipe = yaml.safe_load(inputs["finetune.yaml"].read_text())
    recipe["mixture"] = {"train_examples": 61, "dev_examples": 7}
    inputs["finetune.yaml"].write_text(yaml.safe_dump(recipe))
    recipe = yaml.safe_load(inputs["pretrain.yaml"].read_text())
    recipe["data"] |= {"noise_density": 0.5, "short_steps": 5, "short_inputs_length": 8}
    inputs["pretrain.yaml"].write_text(yaml.safe_dump(recipe))
    facts = yaml.safe_load(Path(demo.repository_file("recipes/finetune_facts.yaml")).read_text())
    facts["optim"]["cooldown_steps"] = 0
    facts["training"] |= {"steps": 3, "batch_size": 2, "held_out_batches": 1}
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts))
    texts = sorted(inputs["texts"].iterdir())
    own_text = tmp_path / "my.txt"
    own_text.write_text("\n\n".join(path.read_text() for path in texts))
    options = ["--pretrain-config", inputs["pretrain.yaml"]]
    options += ["--finetune-config", inputs["finetune.yaml"], "--vocab-size", MODEL["vocab_size"]]
    options += ["--facts-config", tmp_path / "facts.yaml", "--quick"]

    # A mistake in the first stage fixes no settings.
    one_document = ["--out", str(out), "--data", str(texts[0]), *map(str, options)]
    with pytest.raises(DataError, match="1 document"):
        demo.main(one_document)

    options += ["--out", out, "--data", own_text]
    done = call(*options, "--resume")
    assert done.returncode == 0, done.stderr
    assert "no checkpoint yet" not in done.stderr
    assert "| --- |" not in done.stdout
    end = done.stdout.partition("\n== Summary\n")[2].splitlines()
    assert 8 <= len(end) <= 12
    assert (out / "report.html").resolve().as_uri() in end[-1]
    for part in (
        "parameters",
        "bigram",
        "docstring_topic, 61 labels",
        "majority",
        "Expert",
        "1,000 random facts",
    ):
        assert any(part in line for line in end), part

    lines = (out / "metrics.jsonl").read_text().splitlines()
    stages = {json.loads(line)["stage"] for line in lines}
    assert stages == {"pretrain", "finetune", "scratch"}
    systems = json.loads((out / "eval/report.json").read_text())["tasks"][0]["systems"]
    names = {row["name"] for row in systems}
    assert names >= {"fine-tuned", "from-scratch", "majority", "naive Bayes", "word vectors"}
    assert "| fine-tuned | generate |" in (out / "eval/report.md").read_text()
    assert "chosen by the best mean score" in (out / "eval/report.md").read_text().split("- `")[1]
    assert "fitted to 61 of" in (out / "eval/report.md").read_text().lower()

    # Each start takes the rate that is best on dev, and the two are compared in pairs.
    assert done.stdout.count("% on dev") == 4
    (compared,) = json.loads((out / "compare/compare.json").read_text())["tasks"][:1]
    assert compared["task"] == "docstring_topic"

    model = STMoEForConditionalGeneration.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    inputs = tokenizer(["docstring topic: Read a file."], return_tensors="pt")
    model.generate(**inputs, max_new_tokens=3)

    page = Page((out / "report.html").read_text())
    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    text = " ".join(page.text)
    assert "1,000 random facts recalled" in text
    for word in ("Summary", "Training", "Routers", "Sentinels", "Tokens by expert", "Corpus"):
        assert word in text, word
    assert "unigram" in text and "<extra_id_0>" in text

    refused = call(*options)
    assert refused.returncode == 2
    assert "holds a run already. Give --resume" in refused.stderr
    other = call("--out", out, "--data", tmp_path / "corpus", "--resume")
    assert other.returncode == 2
    assert "holds a run with other settings" in other.stderr
    resumed = call(*options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "is complete" in resumed.stdout
