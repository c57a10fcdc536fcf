"""Print what a shell needs to complete the commands and options: ``--print-completion SHELL``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from mcp_sessions.errors import ConfigurationError

SHELLS = ("bash", "zsh")
_FILES = ("FILE", "TARGET")
_PARSERS = {"serve": "serve_options"}
"""Command → the module that has its options, if it is not of the same name."""


class PrintCompletion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        """Print it, and exit.

        Raises:
            ConfigurationError: Its library is not installed.
        """
        print(_completion(str(values), self.const))
        parser.exit()


def _completion(shell: str, commands: Mapping[str, str]) -> str:
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigurationError(
            "--print-completion needs shtab: pip install 'mcp-sessions[completion]'"
        ) from None
    root = argparse.ArgumentParser(prog="mcp-sessions")
    make: Any = _parser_of
    made: Any = root.add_subparsers(parser_class=make)
    for command, what in commands.items():
        made.add_parser(command, help=what)
    _complete_files(root, shtab)
    return shtab.complete(root, shell)


def _parser_of(*, prog: str, **_: object) -> Any:
    command = prog.split()[-1]
    return import_module(f"mcp_sessions.cli.{_PARSERS.get(command, command)}").make_parser()


def _complete_files(parser: argparse.ArgumentParser, shtab: Any) -> None:
    # argparse has no public name for either.
    actions: list[Any] = parser._actions  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        if action.nargs == argparse.PARSER:
            for each in action.choices.values():
                _complete_files(each, shtab)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY
