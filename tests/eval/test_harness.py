"""lm-evaluation-harness with its own model of transformers, `lm_eval --model hf`: the same log-likelihoods as ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import moe
from stmoe_eval.answers.batches import pad_tokens
from stmoe_eval.answers.inference import Inference
from stmoe_eval.answers.likelihood import EncodedInputs, target_log_probs
from stmoe_eval.answers.seq2seq import load_seq2seq
from tests.eval.conftest import WORDS
from tests.models.tiny import tiny_model

TASK = "colours_choice"


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


@torch.inference_mode()
def our_scores(system) -> list[float]:
    """Returns the log-likelihood of each answer, without the end token."""
    scores = []
    for row in make_rows():
        context = system.tokenizer(row["text"])["input_ids"]
        texts = [f" {answer}" for answer in row["answers"]]
        answers = system.tokenizer(texts, add_special_tokens=False)["input_ids"]
        input_ids, mask = pad_tokens([context], system.pad, system.model.device)
        output = system.model.get_encoder()(input_ids=input_ids, attention_mask=mask)
        encoded = EncodedInputs(output, mask)
        found = target_log_probs(system.model, encoded, system.start[0], [answers])
        scores += map(sum, found.log_probs[0])
    return scores


@pytest.mark.slow
def test_its_command_which_imports_nothing_of_ours_scores_a_saved_model_as_we_do(
    tokenizer, tmp_path
):
    """Of a model with a capacity: both are told to drop nothing, as the guide says."""
    folder = tmp_path / "model"
    tiny_model(eval_capacity_factor=0.5, min_expert_capacity=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_task(tmp_path / "tasks")

    model = f"pretrained={folder},trust_remote_code=True,backend=seq2seq,dtype=float32"
    model += ",eval_capacity_factor=None"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model]
    command += ["--tasks", TASK, "--include_path", str(tmp_path / "tasks"), "--device", "cpu"]
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

    file = next((tmp_path / "out").rglob(f"samples_{TASK}_*.jsonl"))
    samples = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    theirs = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        theirs += [float(score) for [[score, _]] in sample["resps"]]
    system = load_seq2seq(folder, inference=Inference(capacity_factor=None))
    assert our_scores(system) == pytest.approx(theirs, abs=1e-4)


def write_task(folder: Path) -> None:
    """Writes a task that needs no download, in lm_eval's form."""
    folder.mkdir()
    lines = [json.dumps(row) + "\n" for row in make_rows()]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    files = {"validation": str(folder / "rows.jsonl")}
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "gold",
        "doc_to_choice": "{{answers}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / f"{TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
