"""Find a command's file and run it: ``mcp-sessions COMMAND …``.

Rules, owned by ``tests/cli/test_main.py``:

1. An error of the user is one line on stderr, and exit status 2. An unavailable store is one line
   too, and exit status 1: the same command may work later.
2. If the reader of stdout leaves, as ``head`` does, the command ends without a word. Another
   failure of stdout, such as a full disk, is one line on stderr, and exit status 1.
3. Ctrl+C is one line, and exit status 130. SIGTERM is one line, and exit status 143. A server that
   stopped in order says so itself.
4. A command's file is imported only when that command runs: the help must not wait for the MCP SDK.

``--print-completion SHELL`` prints what a shell needs to complete commands and options.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from mcp_sessions import __version__
from mcp_sessions.cli.arguments import INTERRUPTED, USAGE_ERROR, OneLineParser, one_line
from mcp_sessions.cli.logs import complain
from mcp_sessions.cli.output import READER_LEFT, OutputFailed, flush, give_up_output, out
from mcp_sessions.errors import ConfigurationError, StoreUnavailable

STORE_AWAY = 1
OUTPUT_FAILED = 1

TERMINATED = 143
"""Exit status that shells give to a program that SIGTERM ended."""

# Each is a module of this package.
COMMANDS = {
    "serve": "serve an MCP server with resumable sessions",
    "bridge": "give a stdio-only host a remote server that outlives connections",
    "config": "print what a host needs in its file to use a server",
    "sessions": "list, show and end the sessions of a store",
    "dashboard": "serve a page that shows the sessions of a store",
    "store": "check, dump, load, copy and back up a store",
    "acp": "serve an ACP agent whose conversations can be loaded",
    "conformance": "test a server or a client against the sessions extension",
    "keys": "make, list and revoke API keys",
    "keygen": "print a new random key",
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        command_line: Arguments after the program's name; by default from ``sys.argv``.

    Raises:
        SystemExit: ``--help``, ``--version``, or invalid arguments.
    """
    _fill_standard_files()
    try:
        try:
            return _main(command_line)
        finally:
            flush()
    except OutputFailed as failed:
        give_up_output()
        if failed.reader_left:
            return READER_LEFT
        complain("mcp-sessions", str(failed))
        return OUTPUT_FAILED


def _main(command_line: Sequence[str] | None) -> int:
    given = sys.argv[1:] if command_line is None else list(command_line)
    parser = _parser()
    if not given:
        parser.error(f"which command? {' or '.join(COMMANDS)}")
    # Arguments after "--" are another program's. argparse would lose that sign.
    own = given.index("--") if "--" in given else len(given)
    try:
        chosen = parser.parse_args(given[:own])
    except ConfigurationError as error:
        parser.error(str(error))
    arguments = [*chosen.arguments, *given[own:]]
    terminated: list[int] = []
    try:
        with _interrupting(terminated) if chosen.command != "serve" else nullcontext():
            command = import_module(f"mcp_sessions.cli.{chosen.command}")
            return command.main(arguments)
    except ConfigurationError as error:
        complain(f"mcp-sessions {chosen.command}", one_line(error))
        return USAGE_ERROR
    except StoreUnavailable as error:
        complain(f"mcp-sessions {chosen.command}", one_line(error))
        return STORE_AWAY
    except KeyboardInterrupt:
        why, status = ("terminated", TERMINATED) if terminated else ("interrupted", INTERRUPTED)
        complain(f"mcp-sessions {chosen.command}", why)
        return status


@contextmanager
def _interrupting(terminated: list[int]) -> Generator[None]:
    """Let SIGTERM do what Ctrl+C does, so that a command cleans up.

    Args:
        terminated: Gets the number of the signal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        known = signal.getsignal(signal.SIGINT)
        # A background job of a shell ignores SIGINT.
        (known if callable(known) else signal.default_int_handler)(number, frame)

    if threading.current_thread() is not threading.main_thread():
        # Signals are for the main thread, which another program has.
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mcp-sessions",
        usage="%(prog)s [--help] [--version] COMMAND ...",
        description="Resumable sessions for the Model Context Protocol.",
        examples=("mcp-sessions serve server.py", "mcp-sessions serve --help"),
        notes="commands:\n" + "\n".join(f"  {name:<12} {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"mcp-sessions {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        const=COMMANDS,
        metavar="SHELL",
        help="print the completion for bash or zsh",
    )
    parser.add_argument(
        "command", choices=tuple(COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS
    )
    # Not argparse's sub-parsers: they would need the options, and the file, of every command here.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _fill_standard_files() -> None:
    """Open standard input, output and error if they are closed. Otherwise the next file that is
    opened would get their number, and child processes would use it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


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
        out(_completion(str(values), self.const))
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
