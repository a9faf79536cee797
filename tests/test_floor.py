"""Floor 0: the registry and how a command ends on an error."""

import errno
import sys

import pytest

from moe import ConfigError
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
        ConfigError, match=r"no shape called 'sqare'. Did you mean 'square'\? Known: circle, square"
    ):
        shapes.get("sqare")
    with pytest.raises(ConfigError, match="already a shape called 'square'"):
        shapes.add("square", 5)


def test_nothing_close_suggests_nothing():
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
        (
            OSError(errno.ENOSPC, "No space left", "out/model"),
            "the disk is full while writing out/model",
        ),
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
    with pytest.raises(ConfigError):
        run(monkeypatch, ConfigError("d_ff is 0"), "--debug")


def test_ctrl_c_says_how_to_go_on_and_names_no_option_that_a_command_lacks(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, KeyboardInterrupt())
    assert exit_.value.code == 130
    assert "Run the same command again" in capsys.readouterr().err


def test_ctrl_c_does_not_tell_an_evaluation_to_resume(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["python -m eval", "list"])
    with pytest.raises(SystemExit):
        run_main(interrupt, interrupted="The same command goes on.")
    assert capsys.readouterr().err == "\nInterrupted. The same command goes on.\n"


def test_a_bug_is_not_dressed_up_as_a_user_error(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, ZeroDivisionError())
