"""Floor 0: the registry and how a command ends on an error."""

import errno
import logging
import sys

import pytest

from moe import ConfigError, DataError
from moe.cli import run_main
from moe.errors import did_you_mean
from moe.registry import Registry


def test_an_unknown_name_says_which_was_meant_and_lists_all():
    shapes = Registry("shape")
    shapes.add("square", 4)
    shapes.register("circle")(0)
    assert shapes.get("square") == 4
    assert shapes.names() == ["circle", "square"]
    with pytest.raises(
        ConfigError, match=r"'sqare'. Did you mean 'square'\? Known: circle, square"
    ):
        shapes.get("sqare")
    with pytest.raises(ConfigError, match="already a shape called 'square'"):
        shapes.add("square", 5)
    assert did_you_mean("xyz", ["square"]) == ""


def run(monkeypatch, error, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *arguments])

    def main(argv):
        assert "--debug" not in argv
        raise error

    run_main(main)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("d_ff is 0"), "error: d_ff is 0"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), "a.txt"),
        (OSError(errno.ENOSPC, "No space left", "out/model"), "full while writing out/model"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_2(monkeypatch, capsys, error, text):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, error)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert text in message
    assert "Traceback" not in message


def test_debug_shows_the_traceback(monkeypatch):
    for error in (ConfigError("d_ff is 0"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            run(monkeypatch, error, "--debug")


def test_ctrl_c_says_how_to_go_on_and_names_no_option_that_a_command_lacks(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, KeyboardInterrupt())
    assert exit_.value.code == 130
    assert "Run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError"),
        (RuntimeError("sizes differ\nException raised from empty_cpu\n..."), "sizes differ"),
        (type("PanicException", (BaseException,), {})("no regex"), "no regex"),
        (AssertionError(), "no message"),
    ],
)
def test_an_unexpected_exception_is_one_line_that_names_its_place_and_exit_code_1(
    monkeypatch, capsys, error, text
):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, error)
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert "test_floor.py, line" in line
    assert line.endswith("--debug shows the traceback.")


@pytest.mark.parametrize("end", [SystemExit(7), pytest.fail.Exception("failed")])
def test_an_end_that_is_no_error_stays(monkeypatch, end):
    with pytest.raises(type(end)):
        run(monkeypatch, end)


def test_control_characters_of_names_are_shown_as_escapes_whoever_prints_them(monkeypatch, capsys):
    name = "\x1b[2Jmodel\x07\x9b31m\x7f"

    def main(argv):
        sys.stdout.write(name)
        sys.stderr.write("50 %\r100 %")  # as a progress bar does
        logging.StreamHandler(sys.stderr).emit(logging.makeLogRecord({"msg": name}))
        raise DataError(f"{name}\rerror: none")

    monkeypatch.setattr(sys, "argv", ["command"])
    for _ in range(2):  # what a second command prints is escaped once too
        with pytest.raises(SystemExit):
            run_main(main)
        out, err = capsys.readouterr()
        escaped = r"\x1b[2Jmodel\x07\x9b31m\x7f"
        assert out == escaped
        assert err.count(escaped) == 2
        assert rf"error: {escaped}\rerror: none" in err
        assert "\x1b" not in err
        assert "50 %\r100 %" in err
