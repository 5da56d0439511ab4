"""The command line as a whole: version, help, errors without a traceback, nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import fxengine
from fxengine.cli import main
from fxengine.cli.options import add_option, documented, plain, size
from tests.cli.conftest import Run, one_line_error


def test_version(cli: Callable[..., Run]) -> None:
    run = cli("--version")
    assert (run.status, run.out) == (0, f"fxengine {fxengine.__version__}\n")


def test_help_names_the_commands(cli: Callable[..., Run]) -> None:
    run = cli("--help")
    assert run.status == 0
    assert all(name in run.out for name in ("train", "rl", "trade", "info", "inspect", "verify"))


@pytest.mark.parametrize("command", ["train", "rl", "trade", "info", "inspect", "verify"])
def test_every_command_has_help(cli: Callable[..., Run], command: str) -> None:
    run = cli(command, "--help")
    assert run.status == 0
    assert "--device" in run.out
    assert "--json" in run.out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["verify"], ["train", "--steps", "many"]])
def test_bad_usage(cli: Callable[..., Run], arguments: list[str]) -> None:
    run = cli(*arguments)
    assert run.status == 2
    assert "usage: fxengine" in run.err
    assert run.out == ""


def test_an_error_is_one_line(cli: Callable[..., Run]) -> None:
    assert "expected 'auto', 'sim', 'cuda' or 'cuda:N'" in one_line_error(cli("inspect", "--device", "abacus"))


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXENGINE_DEBUG", "1")
    with pytest.raises(Exception, match="abacus"):
        main(["inspect", "--device", "abacus"])


def test_optional_packages_are_not_imported_early(command: tuple[list[str], dict[str, str]]) -> None:
    """The command line must work without the extra `demo`."""
    _, environment = command
    program = (
        "import sys; from fxengine.cli import main; main(['--version']); "
        "print(sorted({'pandas', 'matplotlib', 'rich', 'gymnasium'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


class Example:
    """Something.

    Attributes:
        first: one line.
        second: two lines,
            with 5 % in them.

    Raises:
        ValueError: never.
    """


def test_help_texts_come_from_docstrings() -> None:
    assert documented(Example) == {"first": "one line.", "second": "two lines, with 5 % in them."}


def test_percent_signs_survive_argparse() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_option(parser, "share_of", 0.5, "5 % of it.")
    assert "--share-of X  5 % of it (default: 0.5)" in parser.format_help()


def test_plain_data_is_strict_json() -> None:
    nested = {"a": [float("nan"), 1.0], "b": {"c": float("inf")}}
    assert plain(nested) == {"a": [None, 1.0], "b": {"c": None}}


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB")])
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
