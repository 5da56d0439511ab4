"""The command line: `fxengine train`, `trade`, `rl`, `info`, `inspect`, `verify`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from fxengine import __version__
from fxengine.cli import info, inspect, rl, trade, train, verify
from fxengine.driver.errors import CompileError, FxError, SimulatedDeviceWarning

__all__ = ["main"]

#: Exit statuses besides 0: a failed verification, an input or device that cannot be used, an interrupt (128 + SIGINT).
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Errors of the package become one line on stderr; FXENGINE_DEBUG=1 shows where they come from.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as done:  # argparse has printed the help, the version or what is wrong
        return done.code if isinstance(done.code, int) else UNUSABLE
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command(arguments)
    except KeyboardInterrupt:
        print("fxengine: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, for example `| head`. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE
    except (FxError, ValueError, OSError) as error:
        if os.environ.get("FXENGINE_DEBUG") == "1":
            raise
        print(f"fxengine: error: {_readable(error)}", file=sys.stderr)
        return UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxengine",
        description="Train with one captured CUDA graph per step, on an NVIDIA GPU or on the simulated device.",
        epilog="FXENGINE_DEBUG=1 shows the traceback of an error, FXENGINE_CACHE names the folder of compiled kernels.",
    )
    parser.add_argument("--version", action="version", version=f"fxengine {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (train, trade, rl, info, inspect, verify):
        module.add_parser(commands)
    return parser


def _readable(error: Exception) -> str:
    """The message on one line, except for a compiler's log."""
    if isinstance(error, CompileError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, SimulatedDeviceWarning):
        print(f"fxengine: note: {' '.join(str(message).split())}", file=sys.stderr)
    else:
        print(f"fxengine: warning: {message} ({filename}:{lineno})", file=sys.stderr)
