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
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import eval.answers.predict
from eval.answers.batches import Request, TokenizedRequest, make_batches
from eval.answers.predict import MODES, predict
from eval.answers.seq2seq import load_seq2seq
from eval.task import Decoding
from moe import CheckpointError, DataError
from moe.checksums import model_fingerprint
from tests.distributed.ranks import run_ranks
from tests.eval.conftest import colour_task
from tests.eval.rows import predictions_by_id
from tests.eval.test_predict import ROWS, requests_of

BEAMS = Decoding(max_tokens=7, num_beams=3, alpha=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("decoding", [Decoding(max_tokens=7), BEAMS])
def test_the_routers_of_a_generation_are_those_of_its_inputs_and_answers(
    folders, task, tmp_path, decoding
):
    """The oracle sends one input and its answer through the model at a time; padding and lost beams
    do not count.
    """
    system, requests = load_seq2seq(folders["moe"]), requests_of(task)
    made = predict(
        system, replace(task, decoding=decoding), requests, "generate", tmp_path / "p.jsonl"
    )
    load = {"encoder": 0, "decoder": 0}
    for request in requests:
        inputs = system.tokenizer(request.inputs, return_tensors="pt")
        alone = predict(
            system,
            replace(task, decoding=decoding),
            [request],
            "generate",
            tmp_path / "alone.jsonl",
        )
        with torch.no_grad():
            encoder = system.model.get_encoder()(
                **inputs, output_router_logits=True
            ).encoder_router_outputs
        load["encoder"] += encoder[0].stats.expert_load
        load["decoder"] += torch.tensor(alone.router["decoder"].expert_load)
    for stack, expected in load.items():
        assert made.router[stack].expert_load == expected.tolist()
        assert made.router[stack].max_over_mean == pytest.approx(
            expected.max() / expected.double().mean()
        )
        assert made.router[stack].dead_experts == (expected == 0).sum()
        assert made.router[stack].fraction_dropped == 0


@pytest.mark.parametrize("decoding", [Decoding(max_tokens=7), BEAMS])
def test_the_decoders_routers_see_the_tokens_before_the_end(
    folders, task, tmp_path, decoding, monkeypatch
):
    system, requests, found = load_seq2seq(folders["moe"]), requests_of(task), []
    monkeypatch.setattr(
        system.model.generation_config, "eos_token_id", list(range(40))
    )  # so that answers end early
    name = "generate_beams" if decoding is BEAMS else "generate_greedily"
    generate = getattr(eval.answers.predict, name)
    monkeypatch.setattr(
        eval.answers.predict,
        name,
        lambda *args, **kwargs: found.append(generate(*args, **kwargs)) or found[-1],
    )
    for request in requests:
        made = predict(
            system, replace(task, decoding=decoding), [request], "generate", tmp_path / "p.jsonl"
        )
        tokens = found[-1] if decoding is BEAMS else found[-1][0]
        length = 1 + next((n for n, token in enumerate(tokens[0, 1:].tolist()) if token < 40), 6)
        inputs = system.tokenizer(request.inputs, return_tensors="pt")
        with torch.no_grad():
            output = system.model(
                **inputs, decoder_input_ids=tokens[:, :length], output_router_logits=True
            )
        assert (
            made.router["decoder"].expert_load
            == output.decoder_router_outputs[0].stats.expert_load.tolist()
        )


def test_the_routers_of_a_ranking_see_the_start_once_and_each_choice_once(folders, task, tmp_path):
    system, requests = load_seq2seq(folders["moe"]), requests_of(task)
    made = predict(system, task, requests, "rank", tmp_path / "p.jsonl")
    tokens = sum(
        len(system.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in task.choices
    )
    assert sum(made.router["decoder"].expert_load) == 2 * len(requests) * (
        1 + tokens
    )  # two experts for each
    assert (
        predict(load_seq2seq(folders["t5"]), task, requests, "rank", tmp_path / "p.jsonl").router
        is None
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_routers_of_the_whole(folders, task, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(eval.answers.predict, "_MAX_ROWS", dict.fromkeys(MODES, ROWS))
    system, requests, path = load_seq2seq(folders["moe"]), requests_of(task), tmp_path / "p.jsonl"
    whole = predict(system, task, requests, mode, path)
    assert whole.router is not None
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 3 + 2 * (ROWS + 1)]))
    assert predict(system, task, requests, mode, path) == whole
    assert predict(system, task, requests, mode, path) == whole


def test_long_inputs_are_cut_before_their_end_and_marked(folders, task, tmp_path, monkeypatch):
    monkeypatch.setitem(eval.answers.predict._MIN_ROWS, "generate", 25)
    system, seen = load_seq2seq(folders["t5"]), []
    system.model.encoder.register_forward_hook(
        lambda _, args, kwargs, out: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    requests = requests_of(task)
    lengths = [len(system.tokenizer(request.inputs)["input_ids"]) for request in requests]
    limit = sorted(lengths)[12]
    made = predict(
        system, replace(task, inputs_length=limit), requests, "generate", tmp_path / "p.jsonl"
    ).predictions
    assert [p.truncated for p in made] == [length > limit for length in lengths]
    assert 0 < sum(p.truncated for p in made) < 25
    assert max(batch.shape[1] for batch in seen) == limit
    assert sum(len(batch) for batch in seen) == 25
    assert all(((batch == 1).sum(dim=1) == 1).all() for batch in seen)
    kept = predictions_by_id(tmp_path / "p.jsonl")
    assert [kept[r.id] for r in requests] == made


def test_a_batch_of_more_than_a_few_holds_inputs_of_like_length():
    lengths = [100, 99, 98, 90, 85, 80, 79, 50, 40, 39, 31, 3]
    requests = [
        TokenizedRequest(Request(str(n), ""), [5] * length, False)
        for n, length in enumerate(lengths)
    ]

    def cut(few: int, rows: int = 128) -> list[list[int]]:
        return [
            [len(q.tokens) for q in batch]
            for batch in make_batches(requests, max_rows=rows, max_tokens=10_000, min_rows=few)
        ]

    assert cut(few=2) == [[100, 99, 98, 90, 85, 80], [79, 50], [40, 39], [31, 3]]
    assert cut(few=4) == [[100, 99, 98, 90, 85, 80], [79, 50, 40, 39], [31, 3]]
    assert cut(few=12) == [lengths]
    assert cut(few=12, rows=5) == [lengths[:5], lengths[5:10], lengths[10:]]


def test_a_batch_has_few_rows_of_long_inputs_and_many_of_short_ones(
    folders, task, tmp_path, monkeypatch
):
    monkeypatch.setattr(eval.answers.predict, "_MAX_TOKENS", 97)
    system, seen = load_seq2seq(folders["t5"]), []
    system.model.encoder.register_forward_hook(
        lambda _, args, kwargs, out: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    predict(system, task, requests_of(task), "rank", tmp_path / "p.jsonl")
    assert all(rows * length <= 97 for rows, length in seen)
    assert sum(rows for rows, _ in seen) == 25
    assert [length for _, length in seen] == sorted((length for _, length in seen), reverse=True)
    assert seen[0][0] < max(rows for rows, _ in seen)


@pytest.mark.parametrize("change", [{"version": 2}, {"decoding": BEAMS}, {"inputs_length": 5}])
def test_predictions_of_other_settings_are_replaced(folders, task, tmp_path, change):
    system, path = load_seq2seq(folders["t5"]), tmp_path / "p.jsonl"
    predict(system, task, requests_of(task), "generate", path)
    before = json.loads(path.read_text().splitlines()[0])
    predict(system, replace(task, **change), requests_of(task), "generate", path)
    assert json.loads(path.read_text().splitlines()[0]) != before
    predict(
        system, replace(task, **change), requests_of(task), "generate", tmp_path / "fresh.jsonl"
    )
    assert path.read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_no_requests_are_no_predictions(folders, task, tmp_path, mode):
    for _ in range(2):
        made = predict(load_seq2seq(folders["moe"]), task, [], mode, tmp_path / "p.jsonl")
        assert (made.predictions, made.router, made.tokens) == ([], None, (0, 0, 0))


def fill_the_disk(rank, num_ranks, folder, out):
    """Returns what a run says that may write half of its file, and how many predictions stand in it
    then.
    """
    eval.answers.predict._MAX_ROWS = dict.fromkeys(MODES, ROWS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the limit would count the progress bar too
    system, task, path = load_seq2seq(Path(folder)), colour_task(), Path(out) / "p.jsonl"
    whole = predict(system, task, requests_of(task), "rank", Path(out) / "whole.jsonl")
    size = (Path(out) / "whole.jsonl").stat().st_size
    limits, said = resource.getrlimit(resource.RLIMIT_FSIZE), []
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    for _ in range(2):  # the second time already at the first line
        try:
            predict(system, task, requests_of(task), "rank", path)
        except DataError as error:
            said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = len(predictions_by_id(path))
    again = predict(system, task, requests_of(task), "rank", path)
    same = again == whole and path.read_bytes() == (Path(out) / "whole.jsonl").read_bytes()
    return {"said": said, "kept": kept, "same": same}


@pytest.mark.slow
def test_a_disk_that_fills_stops_with_one_message_and_keeps_what_was_written(folders, tmp_path):
    answer = run_ranks(fill_the_disk, 1, tmp_path, str(folders["moe"]), str(tmp_path))[0]
    assert len(answer["said"]) == 2
    for said in answer["said"]:
        assert said.startswith(
            f"Predictions cannot be written to {tmp_path}/p.jsonl: File too large. "
        )
        assert (
            "Make room or give another --out, and run the same command again: it goes on from there."
            in said
        )
    assert answer["kept"] == ROWS
    assert answer["same"]


def test_a_folder_that_cannot_be_made_is_said(folders, task, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        DataError, match=r"cannot be written to .*file/p\.jsonl: (Not a directory|File exists)"
    ):
        predict(
            load_seq2seq(folders["t5"]),
            task,
            requests_of(task),
            "rank",
            tmp_path / "file" / "p.jsonl",
        )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_checkpoint_that_is_not_seq2seq_is_refused(tmp_path, kind):
    if kind == "bert":
        model = BertModel(
            BertConfig(
                vocab_size=131,
                hidden_size=30,
                num_hidden_layers=1,
                num_attention_heads=3,
                intermediate_size=31,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=131, n_positions=67, n_embd=30, n_layer=1, n_head=3)
        )
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=f"holds a model of type '{kind}', which has no encoder and decoder\\. Give",
    ):
        load_seq2seq(tmp_path)


def test_weights_in_any_format_tell_checkpoints_apart(tmp_path):
    found = set()
    for name in ("model.safetensors", "pytorch_model.bin"):
        for content in (b"one", b"two"):
            (tmp_path / name).write_bytes(content)
            (tmp_path / "config.json").write_text("{}")
            found.add(model_fingerprint(tmp_path))
    assert len(found) == 4


def test_a_checkpoints_own_habits_of_generation_are_left_out(folders, task, tmp_path):
    system = load_seq2seq(folders["t5"])
    system.model.generation_config.update(
        num_beams=4, min_length=7, no_repeat_ngram_size=1, repetition_penalty=2.0
    )
    system.model.save_pretrained(tmp_path / "model")
    system.tokenizer.save_pretrained(tmp_path / "model")
    with_habits = load_seq2seq(tmp_path / "model")
    for one, other in zip(
        *(
            predict(s, task, requests_of(task), "generate", tmp_path / f"{n}.jsonl").predictions
            for n, s in enumerate((load_seq2seq(folders["t5"]), with_habits))
        ),
        strict=True,
    ):
        assert one == other


def test_a_folder_without_a_tokenizer_is_refused_though_transformers_would_make_one_up(
    folders, tmp_path
):
    for name, kind in folders.items():
        folder = tmp_path / name
        shutil.copytree(kind, folder)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(CheckpointError, match="tokenizer"):
            load_seq2seq(folder)
    with pytest.raises(
        CheckpointError,
        match=r"holds no tokenizer: none of .*tokenizer\.json is there\. Put that of",
    ):
        load_seq2seq(tmp_path / "t5")
