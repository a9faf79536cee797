"""`stmoe generate` with files: one line for each request, in order, whatever happens to the process."""

import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
from datetime import date
from functools import partial
from threading import Thread

import pyarrow.parquet
import pytest

from moe import ConfigError, DataError
from moe.commands.generate import main
from moe.data.pair_files import read_pairs
from moe.errors import MoEError
from moe.files import work_folder
from tests.models.tiny import tiny_model
from tests.processes import Command, start_torchrun
from tests.serving.tiny_words import texts, word_tokenizer

NUMBER = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose experts drop tokens, unless it is loaded as the command does; and requests."""
    folder = tmp_path_factory.mktemp("generate")
    tiny_model(num_experts=6).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    lines = [{"inputs": text, "id": f"q{index}"} for index, text in enumerate(texts(NUMBER))]
    lines[7]["targets"] = "what a person wrote"
    lines[8]["sampling"] = {"max_new_tokens": 2, "temperature": 1.5, "seed": 3}
    with (folder / "in.jsonl").open("w") as file:
        for line in lines:
            print(json.dumps(line), file=file)
    run(folder, folder / "whole.jsonl")
    return folder


def arguments(folder, out, *more):
    options = ["--model", folder / "model", "--in", folder / "in.jsonl", "--out", out]
    return [str(word) for word in (*options, "--max-new-tokens", 9, "--batch-size", 4, *more)]


def run(folder, out, *more):
    main(arguments(folder, out, *more))
    return out.read_bytes()


def test_every_request_has_one_line_with_its_own_keys_and_the_answer(folder):
    records = [json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()]
    assert [record["line"] for record in records] == list(range(1, NUMBER + 1))
    assert [record["id"] for record in records] == [f"q{index}" for index in range(NUMBER)]
    assert records[7]["references"] == "what a person wrote" != records[7]["targets"]
    assert len(records[8]["targets"].split()) == 2
    assert len(read_pairs(folder / "whole.jsonl")) == NUMBER


def test_a_file_cut_anywhere_is_continued_to_the_same_bytes(folder, tmp_path):
    whole = (folder / "whole.jsonl").read_bytes()
    settings = (folder / "whole.jsonl.settings.json").read_bytes()
    out = tmp_path / "out.jsonl"
    draw = random.Random(0)
    for size in (0, 1, len(whole) - 1, len(whole), draw.randrange(len(whole))):
        out.write_bytes(whole[:size])
        (tmp_path / "out.jsonl.settings.json").write_bytes(settings)
        assert run(folder, out, "--resume") == whole


@pytest.mark.slow
def test_a_killed_process_loses_and_repeats_nothing(folder, tmp_path):
    out = tmp_path / "out.jsonl"

    def num_lines():
        return out.read_bytes().count(b"\n") if out.exists() else 0

    command = Command("stmoe", ["generate", *arguments(folder, out)])
    command.wait_for(lambda: num_lines() >= 17)
    command.send_signal(signal.SIGKILL)
    command.finish()
    assert run(folder, out, "--resume") == (folder / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_ranks_write_the_file_of_one_process(folder, tmp_path):
    whole = (folder / "whole.jsonl").read_bytes()
    out = tmp_path / "ranks.jsonl"
    with pytest.raises(ConfigError, match="ep"):
        run(folder, tmp_path / "one.jsonl", "--ep", 2)
    # They continue what one process has begun.
    out.write_bytes(whole[: len(whole) // 3])
    shutil.copy(folder / "whole.jsonl.settings.json", tmp_path / "ranks.jsonl.settings.json")
    words = arguments(folder, out, "--ep", 2, "--resume")
    ended = start_torchrun(2, "stmoe", "generate", *words).finish()
    assert ended.returncode == 0, ended.stderr
    assert out.read_bytes() == whole


@pytest.mark.slow
def test_ctrl_c_and_a_full_disk_end_with_how_to_continue(folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"inputs": text}) + "\n" for text in texts(4_000)))
    out = tmp_path / "out.jsonl"
    words = ["generate", *arguments(folder, out, "--in", source)]

    # A file cannot grow beyond this size.
    size = 3_000
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    ended = Command("stmoe", words, prepare=limit).finish(timeout=120)
    assert ended.returncode == 2 and "--resume" in ended.stderr, ended.stderr
    assert out.stat().st_size <= size

    command = Command("stmoe", [*words, "--resume"])
    command.wait_for(lambda: out.stat().st_size > 2 * size)
    command.send_signal(signal.SIGINT)
    ended = command.finish(timeout=120)
    assert ended.returncode == 130 and "--resume" in ended.stderr, ended.stderr


def test_a_file_of_another_run_is_left_alone(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    whole = run(folder, out)
    with pytest.raises(ConfigError, match="--resume"):
        run(folder, out)
    with pytest.raises(ConfigError, match="seed 0, not 5"):
        run(folder, out, "--resume", "--seed", 5)
    with pytest.raises(DataError), work_folder(out, wait=False):
        run(folder, out, "--resume")

    # One answer is to another request: a changed text, id or setting, or a line that is gone.
    lines = (folder / "in.jsonl").read_text().splitlines()
    other = tmp_path / "other.jsonl"
    changed = {"inputs": texts(NUMBER)[4], "id": "w3"}
    for number, line in ((60, '{"inputs": "w3"}'), (5, json.dumps(changed)), (60, "")):
        other.write_text("\n".join([*lines[: number - 1], line, *lines[number:]]))
        with pytest.raises(ConfigError, match=f"line {number}"):
            run(folder, out, "--resume", "--in", other)
    assert out.read_bytes() == whole
    out.with_name("out.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match=r"settings.json"):
        run(folder, out, "--resume")


def test_keys_of_a_request_that_have_the_name_of_ours_survive(folder, tmp_path):
    taken = {"line": 3, "finish": "x", "log_probs": 1, "error": None, "request": [2]}
    source = tmp_path / "in.jsonl"
    requests = [{"inputs": "w3", "targets": "t"}, {"inputs": ""}]
    requests = [{**request, **taken, "references": "r"} for request in requests]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    out = tmp_path / "out.jsonl"
    whole = run(folder, out, "--in", source, "--scores")
    answered, refused = [json.loads(line) for line in whole.splitlines()]
    assert answered["request"] == {**taken, "references": "r"}
    assert (answered["line"], answered["references"]) == (1, "t") and answered["targets"]
    assert len(answered["log_probs"]) >= 1 and all(x <= 0 for x in answered["log_probs"])
    assert refused["request"] == taken and refused["references"] == "r"
    assert "line 2" in refused["error"] and "targets" not in refused

    out.write_bytes(whole[: len(whole) // 2])
    assert run(folder, out, "--in", source, "--scores", "--resume") == whole


def test_settings_are_written_beside_the_answers_and_never_over_other_files(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    settings = tmp_path / "out.jsonl.settings.json"
    mine = tmp_path / "mine.json"
    for text in ('{"editor": "vim"}', "no JSON"):
        mine.write_text(text)
        settings.write_text(text)
        with pytest.raises(MoEError, match=r"settings\.json"):
            run(folder, out)
        assert settings.read_text() == text and not out.exists()
        settings.unlink()
        settings.symlink_to(mine)
        with pytest.raises(MoEError, match=r"settings\.json"):
            run(folder, out)
        assert mine.read_text() == text and not out.exists()
        settings.unlink()

    # Those of answers that were removed are ours.
    whole = run(folder, out)
    out.unlink()
    assert run(folder, out, "--seed", 5) == whole
    assert json.loads(settings.read_text())["seed"] == 5


def test_a_pipe_is_read_once(folder, tmp_path):
    pipe = tmp_path / "pipe"  # JSON without a suffix
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[(folder / "in.jsonl").read_bytes()])
    writer.start()
    whole = (folder / "whole.jsonl").read_bytes()
    assert run(folder, tmp_path / "out.jsonl", "--in", pipe) == whole
    writer.join()


def test_tables_are_read_by_their_columns(folder, tmp_path):
    questions = texts(9)
    table = pyarrow.table({"question": questions, "group": [date(2026, 1, 1)] * 9})
    lines = [json.dumps(row, default=str) + "\n" for row in table.to_pylist()]
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "in.JSONL").write_text("\ufeff" + "".join(lines))
    (tmp_path / "in.json.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (tmp_path / "in.txt").write_text("\ufeff" + "\n".join(questions))
    out = tmp_path / "out.jsonl"
    plain = run(folder, out, "--in", tmp_path / "in.txt").splitlines()
    for name in ("in.parquet", "in.JSONL", "in.json.gz"):
        out.unlink()
        records = run(folder, out, "--in", tmp_path / name, "--columns", "inputs=question")
        for line, expected in zip(records.splitlines(), plain, strict=True):
            assert json.loads(line) == {**json.loads(expected), "group": "2026-01-01"}, name


@pytest.mark.parametrize(
    ("name", "content", "noun"),
    [
        ("in.csv", b"question,targets\nw3,w4\n", "inputs is missing"),
        ("in.txt", "w3 w4\n".encode("utf-16"), "UTF-16"),
        ("in.jsonl", gzip.compress(b'{"inputs": "w3"}', mtime=0), "gzip"),
        ("in.txt", b"PAR1\0\0", "Parquet"),
        ("in.txt", b"", "no text"),
        ("missing.jsonl", None, "missing.jsonl"),
    ],
)
def test_a_file_that_is_something_else_is_refused_before_anything_is_written(
    folder, tmp_path, name, content, noun
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=noun):
        run(folder, tmp_path / "out" / "out.jsonl", "--in", tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_bad_lines_are_refused_alone_with_their_numbers(folder, tmp_path, capsys):
    bad = [
        b"no JSON",
        b"[1]",
        b'{"text": "w3"}',
        b'{"inputs": " "}',
        json.dumps({"inputs": "w3 " * 20}).encode(),
        b'{"inputs": "w3", "sampling": {"temprature": 1}}',
        b'{"inputs": "w3", "sampling": {"temperature": -1}}',
        b'{"inputs": "w\xe9"}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([b"", b'{"inputs": "w3"}', *bad, b'{"inputs": "w4"}', b""]))
    out = tmp_path / "out.jsonl"
    whole = run(folder, out, "--in", source, "--max-input", 13)
    first, *refused, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["line"] == 2 and last["line"] == 11 and first["targets"] and last["targets"]
    assert len(refused) == len(bad)
    for number, record in enumerate(refused, start=3):
        assert record["error"].startswith(f"line {number}") and "targets" not in record
    assert "temperature" in refused[5]["error"] and "xe9" in refused[7]["error"]
    assert "8 requests were refused" in capsys.readouterr().err

    # A line that was repaired since then is not taken for the one that was refused.
    source.write_bytes(source.read_bytes().replace(b"no JSON", b'{"inputs": "w5"}'))
    with pytest.raises(ConfigError, match="line 3"):
        run(folder, out, "--in", source, "--max-input", 13, "--resume")
    assert out.read_bytes() == whole


def test_texts_come_from_arguments_a_text_file_or_standard_input(
    folder, tmp_path, capsys, monkeypatch
):
    (tmp_path / "in.txt").write_text("w3 w4\nw5\n")
    options = ["--model", str(folder / "model"), "--max-new-tokens", "5"]
    main([*options, "w3 w4", "w5"])
    expected = capsys.readouterr().out
    assert expected.count("\n") == 2
    main([*options, "--in", str(tmp_path / "in.txt")])
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfw3 w4\nw5\n")))
    main(options)
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w3 w4\nw\xe9\nw5\nw\0\n")))
    with pytest.raises(DataError, match=r"line 2 .*xe9.*2 texts"):
        main(options)
    assert [*capsys.readouterr().out.splitlines()[::2]] == expected.splitlines()
    with pytest.raises(DataError, match="line 2: The text is ''"):
        main([*options, "w3 w4", "", "w5"])
    assert [*capsys.readouterr().out.splitlines()[::2]] == expected.splitlines()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(DataError, match="no text"):
        main(options)


def test_beams_are_those_of_transformers_and_exclude_what_they_would_ignore(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    source = tmp_path / "in.jsonl"
    asked = [json.dumps({"inputs": text}) for text in texts(9)]
    source.write_text("\n".join([*asked, '{"inputs": "w3", "sampling": {"seed": 1}}']))
    run(folder, out, "--in", source, "--num-beams", 3)
    *answers, refused = [json.loads(line) for line in out.read_text().splitlines()]
    assert "num_beams" in refused["error"]

    model = tiny_model(num_experts=6, eval_capacity_factor=None)
    tokenizer = word_tokenizer()
    for text, answer in zip(texts(9), answers, strict=True):
        inputs = tokenizer(text, return_tensors="pt")["input_ids"]
        tokens = model.generate(inputs, max_new_tokens=9, num_beams=3)
        assert answer["targets"] == tokenizer.decode(tokens[0], skip_special_tokens=True)
    for more in (["--stop", "w3"], ["--scores"], ["--temperature", 1]):
        with pytest.raises(ConfigError, match=more[0]):
            run(folder, tmp_path / "x.jsonl", "--num-beams", 3, *more)
