"""Tasks of lm-evaluation-harness through our scoring; the oracle is its own model of transformers,
in both forms.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import lm_eval.tasks as lm_eval_tasks
import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from transformers import AutoTokenizer

import moe
from eval.__main__ import main
from eval.answers.inference import Inference
from eval.answers.seq2seq import load_seq2seq
from eval.commands.harness import evaluate_on_harness
from eval.commands.harness_model import HarnessModel
from moe import ConfigError, DataError
from tests.eval.conftest import WORDS
from tests.models.tiny import tiny_model

CHOICE, TEXT, ROLLING = "colours_choice", "colours_text", "colours_rolling"


def make_rows() -> list[dict]:
    """Returns questions of 3 to 23 words, the last one empty, with two to four answers of one to
    three words.
    """
    rows = []
    for number in range(11):
        text = " ".join(WORDS[(number + 3 * place) % len(WORDS)] for place in range(3 + 2 * number))
        answers = []
        for n in range(2 + number % 3):
            answers.append(" ".join(WORDS[(number * 5 + n + m) % 11] for m in range(1 + n % 3)))
        rows.append({"text": text, "answers": answers, "gold": number % 2})
    return [*rows, {"text": "", "answers": ["red", "dark blue"], "gold": 1}]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks that need no download, in lm_eval's form."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps(row) + "\n" for row in make_rows()]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    files = {"validation": str(folder / "rows.jsonl")}
    data = {"data_files": files, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": data, "validation_split": "validation"}
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "gold",
        "doc_to_choice": "{{answers}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_mutual_info")],
    }
    text = {
        "output_type": "generate_until",
        "doc_to_text": "name {{text}}",
        "doc_to_target": "{{answers[gold]}}",
        "generation_kwargs": {"until": ["green", "\n"], "max_gen_toks": 7, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    rolling = {"doc_to_text": "", "doc_to_target": "{{text}}"}
    lost = {"dataset_kwargs": {"data_files": {"validation": str(folder / "lost.jsonl")}}}
    kinds = {
        CHOICE: choice,
        TEXT: text,
        ROLLING: {"output_type": "loglikelihood_rolling", **rolling},
        "colours_lost": {**choice, **lost},
    }
    for name, own in kinds.items():
        content = yaml.safe_dump({"task": name, **common, **own})
        (folder / f"{name}.yaml").write_text(content, encoding="utf-8")
    return folder


def answers_of(results: dict, name: str) -> list[tuple[float, bool]]:
    """Returns what was answered to all requests of a task, in their order."""
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [answer[0] for sample in samples for answer in sample["resps"]]


def hf_model(system, batch_size: int):
    """Returns lm_eval's own model around ours."""
    from lm_eval.models.huggingface import HFLM

    options = {"tokenizer": system.tokenizer, "backend": "seq2seq", "batch_size": batch_size}
    return HFLM(system.model, **options)


def theirs(folder: Path, tasks: Path, names: list[str]) -> dict:
    """Returns what lm_eval finds with its own model, in this process."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    return simple_evaluate(hf_model(load_seq2seq(folder), 5), tasks=names, task_manager=manager)


@pytest.fixture(scope="module")
def ours(folders, tasks):
    """What our command finds, by model and task; no run is made twice."""

    @cache
    def found(kind, name):
        return evaluate_on_harness([name], folders[kind], include_path=tasks, batch_size=4)

    return found


@pytest.fixture(scope="module")
def lm_eval(folders, tasks):
    """What lm_eval finds with its own model."""
    return cache(lambda kind, name: theirs(folders[kind], tasks, [name]))


def assert_same_scores(ours: list, others: list) -> None:
    """Compares log-probabilities, and what greedy decoding would say."""
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in others], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in others]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "moe"])
def test_log_likelihoods_are_those_of_lm_eval_in_this_process(ours, lm_eval, kind):
    found, expected = ours(kind, CHOICE), lm_eval(kind, CHOICE)
    assert_same_scores(answers_of(found, CHOICE), answers_of(expected, CHOICE))
    assert found["results"] == expected["results"]
    assert len({score for score, _ in answers_of(found, CHOICE)}) > 20


@pytest.mark.slow
def test_log_likelihoods_are_those_of_the_command_that_imports_nothing_of_ours(
    tokenizer, tasks, tmp_path
):
    """Of a model with a capacity: both are told to drop nothing, as the guide says."""
    folder = tmp_path / "model"
    tiny_model(eval_capacity_factor=0.5, min_expert_capacity=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    dropless = Inference(capacity_factor=None)
    found = evaluate_on_harness([CHOICE], folder, include_path=tasks, inference=dropless)
    assert (found["config"]["capacity"], found["config"]["dtype"]) == ("none", "float32")
    assert found["command"].endswith("--dropless")

    model = f"pretrained={folder},trust_remote_code=True,backend=seq2seq,dtype=float32"
    model += ",eval_capacity_factor=None"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model]
    command += ["--tasks", CHOICE, "--include_path", str(tasks), "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples", "--batch_size", "3"]
    environment = {"PYTHONPATH": str(Path(moe.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    file = next((tmp_path / "out").rglob(f"samples_{CHOICE}_*.jsonl"))
    others = []
    for line in file.read_text(encoding="utf-8").splitlines():
        for [[score, greedy]] in json.loads(line)["resps"]:
            others.append((float(score), greedy == "True"))
    assert_same_scores(answers_of(found, CHOICE), others)


@pytest.mark.parametrize("kind", ["t5", "moe"])
def test_greedy_answers_are_known_as_such(folders, kind):
    system = load_seq2seq(folders[kind])
    contexts = [system.tokenizer(row["text"])["input_ids"] for row in make_rows()]
    asked = []
    for context in contexts:
        inputs = torch.tensor([context])
        generated = system.model.generate(inputs, max_new_tokens=5, do_sample=False)
        tokens = generated[0, 1:].tolist()
        another_end = [*tokens[:-1], (tokens[-1] + 1) % 100]
        for answer in (tokens[:1], tokens, another_end, [tokens[0], 7, *tokens[1:]]):
            asked.append((("", ""), context, answer))
    found = HarnessModel(system, 5)._loglikelihood_tokens(asked, disable_tqdm=True)
    model = hf_model(system, 5)
    assert_same_scores(found, model._loglikelihood_tokens(asked, disable_tqdm=True))
    flags = [greedy for _, greedy in found]
    assert flags[0::4] == flags[1::4] == [True] * len(contexts)
    assert not any(flags[2::4])


@pytest.mark.slow
def test_of_a_long_context_the_end_is_read_as_lm_eval_does(ours, folders, tasks, tmp_path):
    folder = shutil.copytree(folders["moe"], tmp_path / "short")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 13
    tokenizer.save_pretrained(folder)
    found = answers_of(evaluate_on_harness([CHOICE], folder, include_path=tasks), CHOICE)
    assert_same_scores(found, answers_of(theirs(folder, tasks, [CHOICE]), CHOICE))
    assert found != answers_of(ours("moe", CHOICE), CHOICE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "moe"])
def test_texts_are_as_long_as_the_task_asks_for_where_lm_eval_goes_on(ours, lm_eval, folders, kind):
    found = answers_of(ours(kind, TEXT), TEXT)
    system, expected = load_seq2seq(folders[kind]), []
    for row in make_rows():
        inputs = system.tokenizer(f"name {row['text']}", return_tensors="pt")
        tokens = system.model.generate(**inputs, max_new_tokens=7, do_sample=False)[0]
        expected.append(system.tokenizer.decode(tokens, skip_special_tokens=True).split("green")[0])
    assert found == expected
    longer = answers_of(lm_eval(kind, TEXT), TEXT)
    assert all(text.startswith(short) for text, short in zip(longer, found, strict=True))
    assert longer != found


def test_a_text_ends_at_the_first_stop_string(folders, monkeypatch):
    system, made = load_seq2seq(folders["t5"]), []
    letters = [n for n in range(131) if system.tokenizer.decode([n]).strip().isalpha()]
    system.model.generation_config.suppress_tokens = sorted({*range(131)} - {*letters})
    generate = system.model.generate

    def generate_and_tell(*args, **options):
        made.append(generate(*args, **options))
        return made[-1]

    monkeypatch.setattr(system.model, "generate", generate_and_tell)
    model = HarnessModel(system, 3)

    def answers(until: list[str]) -> list[str]:
        settings = {"until": until, "max_gen_toks": 23}
        requests = []
        for number, row in enumerate(make_rows()[:5]):
            asked = (row["text"], settings)
            requests.append(Instance("generate_until", {}, asked, 0, ("made", number, 1)))
        return model.generate_until(requests, disable_tqdm=True)

    whole = answers([])
    stops = [text[len(text) // 2 :][:2] for text in whole if len(text) > 4]
    assert stops
    steps = [tokens.shape[1] for tokens in made]
    for text, short in zip(whole, answers(stops), strict=True):
        ends = [text.index(stop) for stop in stops if stop in text]
        assert short == text[: min(ends, default=len(text))]
    answers([text[:4] for text in whole])
    assert made[-1].shape[1] < steps[-1]


def test_an_empty_choice_is_refused_with_its_context(folders):
    model = HarnessModel(load_seq2seq(folders["t5"]), 3)
    request = Instance("loglikelihood", {}, ("fire is", ""), 0, ("made", 0, 1))
    with pytest.raises(DataError, match=r"choice of a task is ''.* Its context: 'fire is'"):
        model.loglikelihood([request], disable_tqdm=True)


def test_the_command_prints_a_table_and_leaves_its_results(folders, tasks, tmp_path, capsys):
    options = {"--include-path": tasks, "--limit": 3, "--out": tmp_path / "out", "--batch-size": 2}
    given = [str(part) for option in options.items() for part in option]
    main(["harness", f"{CHOICE},{TEXT}", "--model", str(folders["moe"]), *given])
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(header) == "task version shots filter metric value standard error"
    assert [(line[0], line[4]) for line in lines[:4]] == [
        *((CHOICE, metric) for metric in ("acc", "acc_norm", "acc_mutual_info")),
        (TEXT, "exact_match"),
    ]
    report = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert set(report["results"]) == {CHOICE, TEXT}
    assert report["n-samples"][CHOICE]["effective"] == 3
    assert report["config"]["model"] == str(folders["moe"])
    for name in (CHOICE, TEXT):
        text = (tmp_path / "out" / f"samples.{name}.jsonl").read_text(encoding="utf-8")
        assert len(text.splitlines()) == 3


def test_perplexities_and_unknown_tasks_are_refused_with_the_reason(folders, tasks, monkeypatch):
    with pytest.raises(ConfigError, match=f"{ROLLING} cannot be run: it asks for logl.*lone end"):
        evaluate_on_harness([CHOICE, ROLLING], folders["t5"], include_path=tasks)

    # Names are looked up in the package's own tasks too, which take long to read.
    build = lm_eval_tasks.TaskManager
    without_defaults = partial(build, include_path=tasks, include_defaults=False)
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda **_: without_defaults())
    with pytest.raises(ConfigError, match=r"no task 'colours_choise'.* mean 'colours_choice'"):
        evaluate_on_harness(["colours_choise"], folders["t5"], include_path=tasks)


def test_what_cannot_be_is_refused_before_a_model_is_read(tasks, tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        evaluate_on_harness([CHOICE], nowhere, include_path=nowhere)
    with pytest.raises(DataError, match=r"data of colours_lost cannot be loaded: .*lost\.jsonl"):
        evaluate_on_harness(["colours_lost"], nowhere, include_path=tasks)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"harness is missing: pip install 'stmoe\[harness\]'"):
        evaluate_on_harness([CHOICE], tmp_path, include_path=tasks)
