"""The options of ``serve`` as variables of the environment: ``MCP_SESSIONS_PORT`` is ``--port``.

Rules, owned by ``tests/cli/test_environment.py``:

1. Every option that the help shows has its variable. An option of the command line replaces the
   variable, also one that may be given several times.
2. A wrong value is refused as that of the option is, and the variable is named.
3. A variable with the prefix that is nobody's is one line of warning.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions.cli.arguments import OneLineParser
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.security import KEYS_VARIABLE

logger = logging.getLogger(__name__)

PREFIX: Final = "MCP_SESSIONS_"
SEPARATOR: Final = "||"
"""Between several values, if they do not stand on lines of their own. A header may have a comma or
a semicolon in it, a path a colon."""

EPILOG: Final = (
    f"Each option can be set by a variable of the environment, such as {PREFIX}PORT or "
    f"{PREFIX}MAX_CHILDREN. An option of the command line replaces the variable. A flag is 1, true "
    f"or yes, or 0, false or no. Several values stand on a line each, or with {SEPARATOR} between "
    "them. The variables OTEL_... of OpenTelemetry say where metrics and traces are exported to."
)

_YES: Final = ("1", "true", "yes")
_NO: Final = ("0", "false", "no")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that a variable sets."""

    variable: str
    option: str
    text: str
    value: Any

    def is_in(self, said: str) -> bool:
        """Whether a text is about it: the option or its value stands there."""
        words = [word.strip(":,") for word in said.split()]
        if self.option in words or (self.option == "--store" and "store" in words):
            return True
        return not isinstance(self.value, bool) and self.text in words


def variable_of(option: str) -> str:
    """The variable that sets an option, such as ``--max-children``."""
    return PREFIX + option.lstrip("-").replace("-", "_").upper()


def parse(
    parser: OneLineParser,
    arguments: Sequence[str],
    namespace: argparse.Namespace,
    environment: Mapping[str, str],
) -> tuple[argparse.Namespace, list[str], list[Setting]]:
    """What the arguments and, where they are silent, the environment say.

    Returns:
        The options, the arguments that are none, and the settings that were taken.

    Raises:
        ConfigurationError: A variable has no value that its option can have.
    """
    settings: dict[str, Setting] = {}
    for action in parser.shown_options():
        option = action.option_strings[-1]
        variable = variable_of(option)
        if variable in environment:
            text = environment[variable]
            settings[action.dest] = Setting(variable, option, text, _value(variable, action, text))
    # None: not given. Of no option is that a value on a command line.
    parser.set_defaults(**dict.fromkeys(settings))
    options, more = parser.parse_known_args(arguments, namespace)
    taken = {name: each for name, each in settings.items() if getattr(options, name) is None}
    if getattr(options, "target", None) is not None or namespace.command:
        # One server of the command line replaces a file of servers.
        if "config" in taken:
            del taken["config"]
    merged = {**vars(options), **{name: each.value for name, each in taken.items()}}
    return argparse.Namespace(**merged), more, list(taken.values())


def unknown(parser: OneLineParser, environment: Mapping[str, str]) -> list[str]:
    """The variables with our prefix that set nothing."""
    known = {variable_of(action.option_strings[-1]) for action in parser.shown_options()}
    ours = {name for name in environment if name.startswith(PREFIX)}
    return sorted(ours - known - {KEYS_VARIABLE})


def warn_of(variables: Sequence[str]) -> None:
    """Log those that set nothing."""
    if variables:
        logger.warning("these variables set no option of serve: %s", ", ".join(variables))


@contextmanager
def variables_named(settings: Sequence[Setting]) -> Generator[None]:
    """Let an error that is about an option of the environment name its variable.

    Raises:
        ConfigurationError: What is raised inside.
    """
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


def _value(variable: str, action: argparse.Action, text: str) -> Any:
    if not text.strip():
        # It may stand for another variable that is not set, and what is meant would be lost.
        raise ConfigurationError(f"{variable} is empty: unset it, or give it a value")
    if action.nargs == 0:
        word = text.strip().lower()
        if word not in _YES + _NO:
            raise ConfigurationError(
                f"{variable}: must be one of {', '.join(_YES + _NO)}, not {text!r}"
            )
        return word in _YES
    if is_repeated(action):
        lines = text.replace(SEPARATOR, "\n").splitlines()
        return [_one(variable, action, line.strip()) for line in lines if line.strip()]
    return _one(variable, action, text)


def is_repeated(action: argparse.Action) -> bool:
    """Whether an option may be given several times."""
    # There is no public name for it.
    return isinstance(action, argparse._AppendAction)  # pyright: ignore[reportPrivateUsage]


def _one(variable: str, action: argparse.Action, text: str) -> Any:
    value: Any = text
    if callable(action.type):
        try:
            value = action.type(text)
        except argparse.ArgumentTypeError as wrong:
            raise ConfigurationError(f"{variable}: {wrong}") from wrong
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ConfigurationError(f"{variable}: must be one of {choices}, not {text!r}")
    return value
