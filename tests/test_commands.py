"""Every option of every command refuses what it cannot use with one line; Ctrl-C ends a command at
any time.
"""

import argparse
import os
import signal
import subprocess
import sys

import pytest
import torch

import stmoe
from moe import ConfigError, DataError, MoEError
from moe.cli import Parser, file_size, integer, path, real, run_main, word
from moe.commands import build_corpus as build_corpus_command
from moe.commands import convert
from moe.data.corpus import build_corpus, save_corpus
from moe.data.documents import Document
from moe.files import check_replaceable, output_path, whole_folder
from stmoe import WAIT_POLICIES

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
JUNK = ["", "lots", "nan", "1e999", "9" * 5_000, "a\0b", "-1"]


@pytest.fixture
def corpus(tmp_path):
    documents = [Document(f"Text {number}.", f"{number}.txt", "own", "MIT") for number in range(7)]
    save_corpus(build_corpus(documents), tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.mark.parametrize(
    "kind", [integer(least=0, most=7, reason="so"), real(above=0, below=1), file_size]
)
def test_a_value_that_is_no_number_of_use_is_one_line_with_its_option(kind):
    parser = Parser(prog="command")
    parser.add_argument("--size", type=kind)
    for text in JUNK:
        with pytest.raises(ConfigError, match=r"^--size is .*; expected .*\.$") as error:
            parser.parse_args([f"--size={text}"])
        assert len(str(error.value)) < 5_200


def test_sizes_are_those_that_hugging_face_reads():
    from huggingface_hub.serialization._base import parse_size_to_int

    assert file_size("1") == 1
    assert parse_size_to_int(file_size("5GB")) == 5 * 10**9
    assert parse_size_to_int(file_size("1.25MB")) == 1_250_000
    with pytest.raises(argparse.ArgumentTypeError):
        file_size("0.5gb")


@pytest.mark.parametrize("kind", [path, word])
def test_a_text_that_is_empty_or_no_path_is_refused(kind):
    for text in ("", "  "):
        with pytest.raises(argparse.ArgumentTypeError, match=r"^is ('|empty)"):
            kind(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out"], "--out: expected one argument"),
        (
            ["--data", "a", "--out", "x", "--hold-out", "0"],
            "no option --hold-out. Did you mean '--held",
        ),
        (["--out", "x"], "--data"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoEError) as error:
        stmoe.main(["corpus", *arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_what_is_read_and_what_is_finished_take_no_output(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"corpus/x is .*corpus or lies in it, which is read"):
        output_path(corpus / "x", inputs=[corpus])
    with pytest.raises(ConfigError, match=r"lies in .*corpus, a corpus"):
        output_path(corpus / "deep/x")
    assert output_path(tmp_path / "new", inputs=[corpus, None]) == tmp_path / "new"


def test_the_folder_one_is_in_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="holds the folder that you are in"):
        check_replaceable(tmp_path, kind="corpus")


def test_a_link_to_a_folder_is_replaced_twice_and_its_far_end_stays(corpus, tmp_path):
    (tmp_path / "link").symlink_to(corpus)
    for text in ("first", "second"):
        with whole_folder(tmp_path / "link", kind="corpus") as partial:
            (partial / "corpus.json").write_text(text)
    assert (tmp_path / "link/corpus.json").read_text() == "second"
    assert "num_repeated" in (corpus / "corpus.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "link"]


def test_a_model_that_the_hub_does_not_give_is_named_in_one_line():
    with pytest.raises(MoEError, match="nobody/nothing") as error:
        convert.main(["--from", "nobody/nothing"])
    assert "\n" not in str(error.value)


def hear_ctrl_c():
    """Undoes what a background shell sets in all that it starts: to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stmoe tokenizer", "eval run"])
def test_ctrl_c_while_a_command_imports_ends_it_with_a_word(command):
    environment = {name: ENVIRONMENT[name] for name in ENVIRONMENT.keys() - set(WAIT_POLICIES)}
    with subprocess.Popen(
        [sys.executable, "-m", *command.split(), "--help"],
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=hear_ctrl_c,
        bufsize=0,  # what is not read yet stays in the pipe
    ) as process:
        assert process.stderr is not None
        assert b"GOMP_SPINCOUNT" in process.stderr.readline()  # it hears from now on
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    said = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"
    assert errors == said


@pytest.mark.slow
def test_a_reader_that_goes_away_and_letters_that_a_terminal_lacks_are_no_failure():
    lines = "def main(argv):\n    print('漢\\udcff')\n    for _ in range(30_000): print('line')\n"
    code = f"from moe.cli import run_main\n{lines}\nrun_main(main)"
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout.readline() == b"\\u6f22\\udcff\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_debug_shows_the_traceback_of_arguments_too(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command", "--debug", "--seed", "x"])
    with pytest.raises(ConfigError):
        run_main(build_corpus_command.main)


def test_ctrl_c_is_an_exception_again_once_a_command_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command"])
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    with pytest.raises(SystemExit, match="130"):
        run_main(lambda argv: os.kill(os.getpid(), signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "Interrupted" in capsys.readouterr().err


def test_too_little_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command"])
    for run in (lambda argv: torch.empty(2**61, dtype=torch.int8), lambda argv: bytearray(2**61)):
        with pytest.raises(SystemExit, match="2"):
            run_main(run)
        assert "error: There is not enough memory." in capsys.readouterr().err
