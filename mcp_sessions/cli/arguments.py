from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

from mcp_sessions.argument_types import did_you_mean
from mcp_sessions.cli.logs import FORMATS, LEVELS, complain
from mcp_sessions.cli.output import out
from mcp_sessions.core.proxies import Proxies
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import MAY_BE_ZERO, SessionPolicy

_VARIABLE = re.compile(
    r"\$\{(?:(?:input|command|config|prompt):(?!-)[^}]*|userHome|workspaceFolder\w*)\}"
    r"|\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}"
)
"""Variables. The first alternative is an editor's own. Passed on as it is, it would be taken for a
key.
"""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]+)?", re.ASCII)
"""A host as clients send it: no pattern, and no letter that IDNA writes in another way."""

_OTHER = re.compile(r"\$\{[^}]*\}")

INTERRUPTED = 130
"""Exit status that shells give to a command that Ctrl-C ended."""

USAGE_ERROR = 2
"""Exit status for an error that the user can correct. argparse has the same."""

_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,9})?|\.\d{1,9})([smhdw]?)", re.ASCII)
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}

LEGEND = """\
TIME is 30s, 15m, 12h or 90d; a number alone is seconds. Parentheses have the
default. You may give an option with * several times."""
"""Notes on how options are written."""


class WrongOption(ConfigurationError):
    """An option that cannot be used. A file that is loaded with it is not to blame."""


class Unlisted(str):
    """What an option does that the help leaves out: few need it."""

    __slots__ = ()


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action.help, Unlisted):
            super().add_argument(action)


@dataclass(frozen=True, slots=True)
class Options:
    """Group of options in the help."""

    _add_argument: Callable[..., argparse.Action]

    def add(
        self, option: str, what: str, kind: Callable[[str], object] | None = None, **settings: Any
    ) -> None:
        """Add an option. Without it, and without a default, its value is None.

        Args:
            option: As the help shows it: ``--port PORT``. Without a value it is a flag.
            what: Its line in the help. With a star at the end it may be given several times.
            kind: Reads the value. None: it is text.
        """
        name, _, value = option.partition(" ")
        if value:
            settings |= {"metavar": value, "type": kind}
        else:
            settings |= {"action": "store_true", "default": None}
        if what.endswith("*"):
            settings["action"] = "append"
        self._add_argument(name, help=what, **settings)

    def add_rare(
        self, option: str, what: str, kind: Callable[[str], object] | None = None, **settings: Any
    ) -> None:
        """Add an option that the help leaves out. The documentation has it."""
        self.add(option, Unlisted(what), kind, **settings)


class OneLineParser(argparse.ArgumentParser):
    """Parse arguments, and print an error in one line. argparse prints the whole usage first."""

    def __init__(self, *, examples: Sequence[str] = (), notes: str = "", **options: Any) -> None:
        shown = "\n".join(["examples:", *(f"  {each}" for each in examples)]) if examples else ""
        epilog = "\n\n".join(each for each in (notes, shown) if each)
        # The beginning of an option could become another one with the next release.
        super().__init__(
            epilog=epilog or None, formatter_class=_Help, allow_abbrev=False, **options
        )

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        found, more = self.parse_known_args(args, namespace)
        if more:
            self.unrecognized(more)
        return found

    def unrecognized(self, more: Sequence[str]) -> NoReturn:
        parsers = [self]
        for action in self._actions:
            commands: Any = action.choices
            parsers += commands.values() if isinstance(commands, dict) else ()
        known = [
            option
            for parser in parsers
            for action in parser.shown_options()
            for option in action.option_strings
        ]
        hint = did_you_mean(more[0].partition("=")[0], known)
        self.error(f"unrecognized arguments: {' '.join(more)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(
                action, f"must be one of {', '.join(known)}, not {value!r}{hint}"
            )

    def value_of(self, action: argparse.Action, text: str) -> Any:
        """Read the text of a value as on a command line.

        Raises:
            argparse.ArgumentError: The option cannot have it.
        """
        value = self._get_value(action, text)  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue, reportUnknownMemberType]
        self._check_value(action, value)
        return value

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores that it cannot be written. Errors do not come here.
        out(message, end="")

    def error(self, message: str) -> NoReturn:
        complain(self.prog, f"{message} (see {self.prog} --help)")
        raise SystemExit(USAGE_ERROR)

    def group(self, title: str) -> Options:
        return Options(self.add_argument_group(title).add_argument)

    def sub_commands(self, *names: str, notes: str) -> Callable[[str, str, str], Any]:
        """Return what adds a sub-command: its name, what it does, and an example."""
        commands = self.add_subparsers(dest="what", required=True, metavar="|".join(names))

        def add(name: str, what: str, example: str) -> OneLineParser:
            described = f"{what.capitalize()}."
            made = commands.add_parser(
                name, help=what, description=described, examples=(example,), notes=notes
            )
            made.set_defaults(parser=made)
            return made

        return add

    def shown_options(self) -> list[argparse.Action]:
        return [
            action
            for action in self._actions
            if action.option_strings
            and action.dest != "help"
            and action.help is not argparse.SUPPRESS
        ]


def add_log_options(group: Options, *, level: str) -> None:
    group.add(
        "--log-level LEVEL",
        "debug, info, warning or error (%(default)s)",
        choices=LEVELS,
        default=level,
    )
    group.add("--log-format FORMAT", "text or json (%(default)s)", choices=FORMATS, default="text")


def one_line(error: object) -> str:
    """Return the text of ``error`` without line breaks. The messages of some libraries have
    them.
    """
    return " ".join(str(error).split())


# The functions below are argparse types: argparse prints the text of the error.


def port(text: str) -> int:
    """Parse a TCP port. 0 stands for any free one."""
    if not text.isascii() or not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time: ``90``, ``30s``, ``15m``, ``12h``, ``90d`` or ``2w``."""
    value = _time(text)
    if not value:
        raise argparse.ArgumentTypeError(
            f"must be a time above 0, such as 30s or 15m, not {text!r}"
        )
    return value


def duration(text: str) -> float:
    """Parse a time that may be 0."""
    value = _time(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a time, such as 30s, 15m or 0, not {text!r}")
    return value


def _time(text: str) -> float | None:
    found = _TIME.fullmatch(text)
    return float(found[1]) * _SECONDS[found[2] or "s"] if found is not None else None


def shown(time: float) -> str:
    """Write a time as an option takes it."""
    unit = next((unit for unit, size in _SECONDS.items() if time and time % size == 0), "s")
    return f"{time / _SECONDS[unit]:g}{unit}"


def count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def count_or_none(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def rate(text: str) -> float:
    # With a unit it would be a time.
    if _TIME.fullmatch(f"{text}s") is None or not float(text):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return float(text)


def limit(name: str) -> tuple[Callable[[str], float], str, str]:
    """Return what reads a limit of ``SessionPolicy``, the word for its value, and its default."""
    (field,) = (each for each in fields(SessionPolicy) if each.name == name)
    usual: Any = field.default
    if "float" not in str(field.type) or name == "max_requests_per_principal":
        kind = rate if "float" in str(field.type) else count
        return kind, "N", "none" if usual is None else str(usual)
    return (
        duration if name in MAY_BE_ZERO else seconds,
        "TIME",
        "30d" if usual is None else shown(usual),
    )


def variable(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE`` of an environment. ``NAME`` alone takes this process's value."""
    name, sign, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE or NAME, not {text!r}")
    if not sign and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} has no value here: write {name}=VALUE")
    return name, value if sign else os.environ[name]


def source(*kinds: str) -> Callable[[str], tuple[str, str]]:
    """Return a parser of ``KIND:NAME``, the place of a value in a request."""
    *others, last = (f"{kind}:NAME" for kind in kinds)

    def parsed(text: str) -> tuple[str, str]:
        kind, _, name = text.partition(":")
        if kind not in kinds or not name:
            raise argparse.ArgumentTypeError(f"must be {', '.join(others)} or {last}, not {text!r}")
        return kind, name

    return parsed


def place(text: str) -> str:
    # Imported here, since it loads a parser of JSON, which few commands need.
    from mcp_sessions.core.conversation_keys import place_of

    try:
        place_of(text)
    except ConfigurationError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None
    return text


def header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition(":")
    if not sign or not name.strip():
        # The error leaves out the text: it may be a secret.
        raise argparse.ArgumentTypeError("must be 'NAME: VALUE'")
    try:
        return name.strip(), expanded(value.strip())
    except ConfigurationError as failed:
        raise argparse.ArgumentTypeError(str(failed)) from failed


def once(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of several ``--header``.

    Raises:
        ConfigurationError: A name is there twice, and one value would be lost.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name in found:
            raise ConfigurationError(f"the header {name!r} is there twice: give it once")
        found[name] = value
    return found


def expanded(text: str, *, may_be_others: bool = False) -> str:
    """Replace ``${NAME}``, ``${env:NAME}`` and ``${NAME:-default}`` with variables of the
    environment.

    Args:
        may_be_others: Leaves any other ``${}`` as it is, for the program that reads the text.

    Raises:
        ConfigurationError: A variable is not set and has no default, or a ``${}`` is not a
            variable.
    """

    def value(found: re.Match[str]) -> str:
        name: str | None = found[1]
        default: str | None = found[2]
        if name is None:
            raise ConfigurationError(
                f"only editors know {found[0]}: write ${{NAME}}, a variable of the environment"
            )
        if default is not None and "${" in default:
            raise ConfigurationError(
                f"the default of ${{{name}}} has a variable in it: write the value itself"
            )
        known = os.environ.get(name)
        if default is not None:
            # As in shells, the default also replaces an empty value.
            known = known or default
        if known is None:
            raise ConfigurationError(
                f"the variable {name} is not set: set it, or write ${{{name}:-default}}"
            )
        return known

    other = _OTHER.search(_VARIABLE.sub("\0", text))
    if other is not None and not may_be_others:
        # Passed on as it is, it would be taken for a key.
        raise ConfigurationError(
            f"{other[0]} is no variable: write ${{NAME}} or ${{NAME:-default}}"
        )
    return _VARIABLE.sub(value, text)


def url_path(text: str) -> str:
    # What begins with two is a host for a browser.
    if not re.match("/(?!/)", text) or any(character in text for character in "?#{} "):
        raise argparse.ArgumentTypeError(f"must be a path that begins with '/', not {text!r}")
    return text


def proxies(text: str) -> str:
    try:
        Proxies(text)
    except ConfigurationError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None
    return text


def host(text: str) -> str:
    parts = urlsplit(f"//{text}")
    try:
        is_one = bool(parts.hostname) and parts.netloc == text and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or not _HOST.fullmatch(text.lower()):
        raise argparse.ArgumentTypeError(
            f"must be a name that clients call, such as mcp.example.com, not {text!r}"
        )
    return text.lower()


def origin(text: str) -> str:
    parts = urlsplit(text)
    is_one = parts.netloc and text == f"{parts.scheme}://{parts.netloc}"
    if not is_one or not _HOST.fullmatch(parts.netloc.lower().removesuffix(":*")):
        raise argparse.ArgumentTypeError(
            f"must be an origin, such as https://app.example.com, not {text!r}"
        )
    return text.lower()


_CREDENTIAL = re.compile(r"(?i)\b((?:\w*pass\w*|username)=)[^&]*")
"""Parameters of a store's query that may name a user or a password."""


def redacted(url: str) -> str:
    """Return the URL without its password, which may stand in the authority or in the query."""
    parts = urlsplit(url)
    if _CREDENTIAL.search(parts.query):
        parts = parts._replace(query=_CREDENTIAL.sub(r"\1***", parts.query))
        url = urlunsplit(parts)
    if parts.password is None:
        return url
    _, _, host_port = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host_port}"))


def without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "an address that cannot be read"
    host = f"[{host}]" if ":" in host else host
    host_port = host if port is None else f"{host}:{port}"
    path = "" if "@" in parts.path else parts.path
    return urlunsplit((parts.scheme, host_port, path, "", "")).removeprefix("//")
