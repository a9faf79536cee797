"""What is kept beside the answers: truncation, routers, settings; and what happens when a disk or a
folder fails.
"""

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

import stmoe_eval.answers.predict
from moe import CheckpointError, DataError
from moe.checksums import model_fingerprint
from stmoe_eval.answers.batches import Request, TokenizedRequest, make_batches
from stmoe_eval.answers.predict import MODES, predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.task import Decoding
from tests.distributed.ranks import run_ranks
from tests.eval.conftest import colour_task
from tests.eval.rows import predictions_by_id
from tests.eval.test_predict import ROWS, requests_of

BEAMS = Decoding(max_tokens=7, num_beams=3, alpha=0.6)


@pytest.mark.parametrize("decoding", [Decoding(max_tokens=7), BEAMS])
def test_routers_see_the_inputs_and_the_tokens_before_the_end(
    folders, task, tmp_path, decoding, monkeypatch
):
    system, generated = load_seq2seq(folders["moe"]), []
    ends = list(range(40))  # so that answers end early
    monkeypatch.setattr(system.model.generation_config, "eos_token_id", ends)
    name = "generate_beams" if decoding is BEAMS else "generate_greedily"
    generate = getattr(stmoe_eval.answers.predict, name)

    def generate_and_tell(*args, **options):
        generated.append(generate(*args, **options))
        return generated[-1]

    monkeypatch.setattr(stmoe_eval.answers.predict, name, generate_and_tell)
    task = replace(task, decoding=decoding)
    for request in requests_of(task)[::2]:
        made = predict(system, task, [request], "generate", tmp_path / "p.jsonl")
        tokens = generated[-1]
        length = 1 + next((n for n, token in enumerate(tokens[0, 1:].tolist()) if token < 40), 6)
        inputs = system.tokenizer(request.inputs, return_tensors="pt")
        inputs["decoder_input_ids"] = tokens[:, :length]
        with torch.no_grad():
            output = system.model(**inputs, output_router_logits=True)
        for stack, found in made.router.items():
            stats = getattr(output, f"{stack}_router_outputs")[0].stats
            load = stats.expert_load.double()
            assert found.expert_load == stats.expert_load.tolist()
            assert found.max_over_mean == pytest.approx(load.max() / load.mean())
            assert found.dead_experts == (load == 0).sum()
            assert found.fraction_dropped == 0


def test_the_routers_of_a_ranking_see_the_start_once_and_each_choice_once(folders, task, tmp_path):
    system, requests = load_seq2seq(folders["moe"]), requests_of(task)
    made = predict(system, task, requests, "rank", tmp_path / "p.jsonl")
    choices = [system.tokenizer(text, add_special_tokens=False) for text in task.choices]
    tokens = sum(len(choice["input_ids"]) for choice in choices)
    # Two experts for each token.
    assert sum(made.router["decoder"].expert_load) == 2 * len(requests) * (1 + tokens)
    dense = predict(load_seq2seq(folders["t5"]), task, requests, "rank", tmp_path / "p.jsonl")
    assert dense.router is None


def test_a_file_of_an_earlier_version_with_checksums_is_continued(folders, task, tmp_path):
    system, requests, path = load_seq2seq(folders["moe"]), requests_of(task), tmp_path / "p.jsonl"
    whole = predict(system, task, requests, "rank", path)
    content = path.read_text()
    assert '"routers": {' in content
    path.write_text(content.replace("}}}\n", '}}, "sha256": "0123"}\n'))
    assert "sha256" in path.read_text()
    assert predict(system, task, requests, "rank", path) == whole
    assert path.read_text() == content


@pytest.fixture
def encoded(folders):
    """A T5, and the inputs that its encoder has seen."""
    system, seen = load_seq2seq(folders["t5"]), []

    def tell(_, args, kwargs, output):
        seen.append(kwargs["input_ids"])

    system.model.encoder.register_forward_hook(tell, with_kwargs=True)
    return system, seen


def test_long_inputs_are_cut_before_their_end_and_marked(encoded, task, tmp_path, monkeypatch):
    monkeypatch.setitem(stmoe_eval.answers.predict._MIN_ROWS, "generate", 25)
    system, seen = encoded
    requests = requests_of(task)
    lengths = [len(system.tokenizer(request.inputs)["input_ids"]) for request in requests]
    limit = sorted(lengths)[12]
    task = replace(task, inputs_length=limit)
    made = predict(system, task, requests, "generate", tmp_path / "p.jsonl").predictions
    assert [p.truncated for p in made] == [length > limit for length in lengths]
    assert 0 < sum(p.truncated for p in made) < 25
    assert max(batch.shape[1] for batch in seen) == limit
    assert sum(len(batch) for batch in seen) == 25
    assert all(((batch == 1).sum(dim=1) == 1).all() for batch in seen)
    kept = predictions_by_id(tmp_path / "p.jsonl")
    assert [kept[r.id] for r in requests] == made


def test_a_batch_of_more_than_a_few_holds_inputs_of_like_length():
    lengths = [100, 99, 98, 90, 85, 80, 79, 50, 40, 39, 31, 3]
    requests = []
    for number, length in enumerate(lengths):
        requests.append(TokenizedRequest(Request(str(number), ""), [5] * length, False))

    def cut(few: int, rows: int = 128, tokens: int = 10_000) -> list[list[int]]:
        batches = make_batches(requests, max_rows=rows, max_tokens=tokens, min_rows=few)
        return [[len(question.tokens) for question in batch] for batch in batches]

    assert cut(few=2) == [[100, 99, 98, 90, 85, 80], [79, 50], [40, 39], [31, 3]]
    assert cut(few=4) == [[100, 99, 98, 90, 85, 80], [79, 50, 40, 39], [31, 3]]
    assert cut(few=12) == [lengths]
    assert cut(few=12, rows=5) == [lengths[:5], lengths[5:10], lengths[10:]]

    # Few long inputs fit into a batch, and many short ones; a single one is always a batch.
    assert [len(batch) for batch in cut(few=12, tokens=170)] == [1, 1, 1, 1, 2, 2, 4]
    assert len(cut(few=12, tokens=90)) == 10


@pytest.mark.parametrize(
    ("other", "change"),
    [
        ("t5", {"version": 2}),
        ("t5", {"decoding": BEAMS}),
        ("t5", {"inputs_length": 5}),
        ("moe", {}),
    ],
)
def test_predictions_of_other_settings_and_models_are_replaced(
    folders, task, tmp_path, other, change
):
    system, requests, path = load_seq2seq(folders["t5"]), requests_of(task), tmp_path / "p.jsonl"
    changed = replace(task, **change)
    predict(load_seq2seq(folders[other]), task, requests, "generate", path)
    before = json.loads(path.read_text().splitlines()[0])
    predict(system, changed, requests, "generate", path)
    assert json.loads(path.read_text().splitlines()[0]) != before
    predict(system, changed, requests, "generate", tmp_path / "fresh.jsonl")
    assert path.read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


def fill_the_disk(rank, num_ranks, folder, out):
    """Returns the message of a run that may write only half of its file, and the content of the file."""
    stmoe_eval.answers.predict._MAX_ROWS = dict.fromkeys(MODES, ROWS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the limit would count the progress bar too
    system, task = load_seq2seq(Path(folder)), colour_task()
    whole_path, path = Path(out, "whole.jsonl"), Path(out, "p.jsonl")
    whole = predict(system, task, requests_of(task), "rank", whole_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole_path.stat().st_size // 2, limits[1]))
    with pytest.raises(DataError) as error:
        predict(system, task, requests_of(task), "rank", path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = len(predictions_by_id(path))
    again = predict(system, task, requests_of(task), "rank", path)
    same = again == whole and path.read_bytes() == whole_path.read_bytes()
    return str(error.value), kept, same


@pytest.mark.slow
def test_a_disk_that_fills_stops_with_one_message_and_keeps_what_was_written(folders, tmp_path):
    ((said, *answer),) = run_ranks(fill_the_disk, 1, tmp_path, str(folders["moe"]), str(tmp_path))
    assert f"cannot be written to {tmp_path}/p.jsonl: File too large. " in said
    assert "run the same command again: it continues from there." in said
    assert answer == [ROWS, True]


def test_checkpoints_that_cannot_answer_and_folders_that_cannot_be_made_are_refused(
    folders, task, tmp_path
):
    (tmp_path / "file").write_text("not a folder")
    system, path = load_seq2seq(folders["t5"]), tmp_path / "file/p.jsonl"
    with pytest.raises(DataError, match=r"cannot be written to .*file/p\.jsonl"):
        predict(system, task, requests_of(task), "rank", path)

    GPT2Config(vocab_size=131, n_embd=30, n_layer=1, n_head=3).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="'gpt2', which has no encoder"):
        load_seq2seq(tmp_path / "gpt2")

    # transformers would make a tokenizer up.
    folder = shutil.copytree(folders["t5"], tmp_path / "bare")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: none of .*tokenizer\.json"):
        load_seq2seq(folder)


def test_weights_in_any_format_tell_checkpoints_apart(tmp_path):
    found = set()
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        for content in (b"one", b"two"):
            (tmp_path / name).write_bytes(content)
            found.add(model_fingerprint(tmp_path))
    assert len(found) == 4
