"""Read the options of ``serve`` from the environment: ``MCP_SESSIONS_PORT`` is ``--port``.

``sessions`` reads the variables of the options that it shares with ``serve``.

Rules, owned by ``tests/cli/test_option_variables.py``:

1. Every option that the help shows has its variable. An option of the command line replaces the
   variable, even if it may be given several times.
2. A wrong value is refused as the option's would be. The error names the variable.
3. A variable with the prefix that no option has is one line of warning.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions.access import INTROSPECTION_VARIABLES
from mcp_sessions.argument_types import did_you_mean
from mcp_sessions.cli.arguments import OneLineParser
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.security import KEYFILE_PASSWORD_VARIABLE, KEYS_VARIABLE

logger = logging.getLogger(__name__)

PREFIX: Final = "MCP_SESSIONS_"
SEPARATOR: Final = "||"
"""Separator of several values that do not stand on lines of their own. A header may contain a comma
or a semicolon, a path a colon.
"""

NOTES: Final = f"""\
Each option can be a variable: --max-children is {PREFIX}MAX_CHILDREN.
The command line wins. Write a flag as 1 or 0, and several values on a line
each, or with {SEPARATOR} between them. The OTEL_ variables turn metrics and traces on."""

_FLAGS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Setting:
    variable: str
    option: str
    text: str
    value: Any

    def is_in(self, said: str) -> bool:
        words = [word.strip(":,") for word in said.split()]
        if self.option in words or (self.option == "--store" and "store" in words):
            return True
        return not isinstance(self.value, bool) and self.text in words


def variable_of(option: str) -> str:
    return PREFIX + option.lstrip("-").replace("-", "_").upper()


def parse(
    parser: OneLineParser,
    arguments: Sequence[str],
    namespace: argparse.Namespace,
    environment: Mapping[str, str],
) -> tuple[argparse.Namespace, list[str], list[Setting]]:
    """Parse the arguments, and take options that are not given from the environment.

    Returns:
        The options, the unknown arguments, and the settings that were taken.

    Raises:
        ConfigurationError: A variable has a value that its option cannot have.
    """
    settings: dict[str, Setting] = {}
    for action in parser.shown_options():
        if (setting := _setting_of(parser, action, environment)) is not None:
            settings[action.dest] = setting
    # None: not given. No value on a command line is None.
    parser.set_defaults(**dict.fromkeys(settings))
    options, more = parser.parse_known_args(arguments, namespace)
    taken = {name: each for name, each in settings.items() if getattr(options, name) is None}
    if getattr(options, "target", None) is not None or namespace.command:
        # A server on the command line replaces the file of servers.
        if "config" in taken:
            del taken["config"]
    merged = {**vars(options), **{name: each.value for name, each in taken.items()}}
    return argparse.Namespace(**merged), more, list(taken.values())


def fill(options: argparse.Namespace, shared: Mapping[str, Any]) -> list[Setting]:
    """Take options that are not given, and that ``serve`` has, too, from this process's environment
    or from their defaults. Return the settings that were taken.

    Args:
        shared: Members of the options → their defaults.

    Raises:
        ConfigurationError: A variable has a value that its option cannot have, or there is no
            store.
    """
    taken: list[Setting] = []
    for action in options.parser.shown_options():
        if action.dest in shared and getattr(options, action.dest) is None:
            setting = _setting_of(options.parser, action, os.environ)
            taken += [setting] if setting is not None else []
            value = shared[action.dest] if setting is None else setting.value
            setattr(options, action.dest, value)
    if options.store is None:
        raise ConfigurationError("which store? Give --store URL, or set MCP_SESSIONS_STORE")
    return taken


def _setting_of(
    parser: OneLineParser, action: argparse.Action, environment: Mapping[str, str]
) -> Setting | None:
    """Return what the option's variable says; None: it is not set.

    Raises:
        ConfigurationError: The variable has a value that its option cannot have.
    """
    option = action.option_strings[-1]
    variable = variable_of(option)
    text = environment.get(variable)
    if text is None:
        return None
    if not text.strip():
        # The value may come from another, unset variable. Its meaning would be lost.
        raise ConfigurationError(f"{variable} is empty: unset it, or give it a value")
    try:
        return Setting(variable, option, text, _value(parser, action, text))
    except argparse.ArgumentError as wrong:
        raise ConfigurationError(f"{variable}: {wrong.message}") from wrong


def unknown(parser: OneLineParser, environment: Mapping[str, str]) -> list[str]:
    """Return the variables that set nothing, each with a hint if another one is near."""
    known = {variable_of(action.option_strings[-1]) for action in parser.shown_options()}
    ours = {name for name in environment if name.startswith(PREFIX)}
    others = {KEYS_VARIABLE, KEYFILE_PASSWORD_VARIABLE, *INTROSPECTION_VARIABLES}
    words = {name.removeprefix(PREFIX): name for name in known | others}
    hints = {name: did_you_mean(name.removeprefix(PREFIX), words) for name in ours - known - others}
    return [
        f"{name}{hint.replace('mean ', f'mean {PREFIX}')}" for name, hint in sorted(hints.items())
    ]


def warn_of(variables: Sequence[str]) -> None:
    if variables:
        logger.warning("these variables set no option of serve: %s", ", ".join(variables))


@contextmanager
def variables_named(settings: Sequence[Setting]) -> Generator[None]:
    try:
        yield
    except ConfigurationError as error:
        said = str(error)
        names = [
            each.variable for each in settings if each.variable not in said and each.is_in(said)
        ]
        if not names:
            raise
        raise ConfigurationError(f"{said} (set by {', '.join(names)})") from error


def _value(parser: OneLineParser, action: argparse.Action, text: str) -> Any:
    if action.nargs == 0:
        word = text.strip().lower()
        if word not in _FLAGS:
            raise argparse.ArgumentError(
                action, f"must be one of {', '.join(_FLAGS)}, not {text!r}"
            )
        return _FLAGS[word]
    if is_repeated(action):
        lines = text.replace(SEPARATOR, "\n").splitlines()
        return [parser.value_of(action, line.strip()) for line in lines if line.strip()]
    return parser.value_of(action, text)


def is_repeated(action: argparse.Action) -> bool:
    # argparse has no public name for it.
    return isinstance(action, argparse._AppendAction)  # pyright: ignore[reportPrivateUsage]
