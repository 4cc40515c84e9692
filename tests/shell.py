"""The commands, run in this process as a shell runs them."""

from __future__ import annotations

from inspect import signature

from typer.testing import CliRunner, Result

from varprop.cli import app

# click 8.1 mixes messages into the output unless it is told not to; 8.2 never does, and cannot be told.
APART = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner(**APART).invoke(app, [str(argument) for argument in arguments], input=stdin)
