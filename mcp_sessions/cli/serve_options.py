from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from urllib.parse import urlsplit, urlunsplit

from mcp_sessions.cli import access
from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.limit_options import add_limits
from mcp_sessions.cli.option_variables import NOTES, parse, unknown, variable_of, variables_named
from mcp_sessions.cli.targets import SHAPE, program_of
from mcp_sessions.core.addresses import HTTP, has_scheme, wrong_address
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy

DEFAULT_STORE = "memory://"
DEFAULT_PORT = 8000
DEFAULT_GRACE = 10
EXTERNAL_OPTIONS = (
    "per",
    "max_children",
    "max_children_per_principal",
    "child_idle",
    "start_timeout",
)
"""Options of a server that is a command or a URL, as `StdioServer` and `HTTPServer` call them."""

COMMAND_OPTIONS = ("env", "cwd", "warm")
URL_OPTIONS = ("header",)


def parsed(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """Parse the arguments and the environment.

    Args:
        environment: Variables for options that the arguments do not set. None: this process's.

    Raises:
        ConfigurationError: Options do not go together, or a variable is wrong.
    """
    variables = os.environ if environment is None else environment
    own = _own(arguments)
    parser = make_parser()
    command = list(arguments[len(own) + 1 :])
    empty = argparse.Namespace(
        command=command, url=None, unknown_variables=unknown(parser, variables)
    )
    options, more, settings = parse(parser, own, empty, variables)
    options = argparse.Namespace(**vars(options), settings=settings)
    target: str = options.target or ""
    program = program_of(target)
    if not command and program is not None:
        quotes = ", without quotes" if program != target else ""
        parser.error(f"write a command after --{quotes}: mcp-sessions serve -- {program} ...")
    if has_scheme(target) and not is_url(target):
        raise ConfigurationError(wrong_address(target, HTTP))
    if more:
        near = nearest(parser, more[0])
        hint = f"; did you mean {near}?" if near is not None else ""
        parser.error(f"unrecognized arguments: {' '.join(more)}{hint}")
    if options.config is not None:
        if options.target is not None or command:
            parser.error("--config serves the servers of its file: leave out the other server")
        options = argparse.Namespace(**{**vars(options), "target": options.config})
    elif options.target is None and not command:
        parser.error("no server to serve: give TARGET, a URL, --config FILE or -- COMMAND")
    elif options.target is not None and command:
        parser.error(f"only one server is served: leave out {options.target}, or the command")
    if command:
        # It is for the log. Later arguments may be a secret.
        options = argparse.Namespace(**{**vars(options), "target": command[0]})
    elif options.config is None and is_url(str(options.target)):
        shown = urlunsplit(urlsplit(options.target)._replace(query="", fragment=""))
        options = argparse.Namespace(**{**vars(options), "target": shown, "url": options.target})
    with variables_named(settings):
        _check(options)
    return options


def nearest(parser: types.OneLineParser, text: str) -> str | None:
    known = [option for action in parser.shown_options() for option in action.option_strings]
    return next(iter(get_close_matches(text.partition("=")[0], known, 1, 0.75)), None)


def is_url(target: str) -> bool:
    return target.lower().startswith(("http://", "https://"))


def _own(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the log is to be JSON. This is read before all other options."""
    own = _own(arguments)
    if any(each.partition("=")[0] == "--log-format" for each in own):
        return "--log-format=json" in own or ("--log-format", "json") in pairwise(own)
    return os.environ.get(variable_of("--log-format")) == "json"


def _check(options: argparse.Namespace) -> None:
    if options.allowed_origin and not options.allowed_host and not is_loopback(options.host):
        raise ConfigurationError(
            f"--allowed-origin on --host {options.host} needs --allowed-host NAME, too: "
            "give the name that clients call"
        )
    access.check_options(options)
    more = {
        "--per-principal": options.per_principal,
        "--platform-ids": options.platform_ids,
        "--handle": options.handle,
    }
    given = [name for name, value in more.items() if value]
    if given and not options.conversations:
        raise ConfigurationError(
            f"{given[0]} needs --conversations: add it, or leave out {given[0]}"
        )
    is_external = bool(options.command or options.url or options.config)
    if options.config is not None and options.stdio:
        raise ConfigurationError(
            "--stdio serves one server, --config serves several over HTTP: leave out one of them"
        )
    for names, fits, what in (
        (COMMAND_OPTIONS, bool(options.command), "-- COMMAND"),
        (URL_OPTIONS, bool(options.url), "a URL"),
        ((*EXTERNAL_OPTIONS, "lazy", "max_answer"), is_external, "-- COMMAND, a URL or --config"),
    ):
        given = [name for name in names if getattr(options, name) is not None]
        if given and not fits:
            name = f"--{given[0].replace('_', '-')}"
            raise ConfigurationError(f"{name} is only for {what}: leave it out for this server")
    if options.health is not None and options.path.endswith(("/healthz", "/readyz")):
        if options.path.rpartition("/")[0] == options.health.rstrip("/"):
            raise ConfigurationError(
                f"--path {options.path} is the path of a health check: choose another --path, or "
                "another --health"
            )
    if options.stdio and options.workers is not None:
        raise ConfigurationError("--workers: --stdio needs one process: leave out one of them")
    if options.stdio and options.audit == "-":
        raise ConfigurationError(
            "--audit -: with --stdio, the standard output belongs to the client: name a file"
        )
    if options.reload_config and options.config is None:
        raise ConfigurationError("--reload-config needs --config FILE: name the file to reload")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise ConfigurationError("--ssl-keyfile needs --ssl-certfile FILE: name the certificate")
    if options.stdio and options.port is None:
        given = {
            "--allowed-host": options.allowed_host,
            "--allowed-origin": options.allowed_origin,
            "--health": options.health,
            "--drain-delay": options.drain_delay,
            "--access-log": options.access_log,
            "--forwarded-allow-ips": options.forwarded_allow_ips,
            "--api-keys": options.api_keys,
            "--auth": options.auth,
            "--auth-issuer": options.auth_issuer,
            "--ssl-certfile": options.ssl_certfile,
        }
        refused = [name for name, value in given.items() if value]
        if refused:
            raise ConfigurationError(
                f"{' '.join(refused)}: --stdio serves no HTTP: add --port, or leave out the option"
            )


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions serve",
        usage="%(prog)s [OPTION ...] (TARGET | URL | --config FILE | -- COMMAND [ARG ...])",
        description=f"""\
Serve an MCP server whose sessions survive a cut connection. The server is one of:

  TARGET       {SHAPE}: a server or a SessionLayer
               of your code; without attr the only one in the file
  URL          a server that speaks Streamable HTTP
  FILE         the servers of a host, as {{"mcpServers": ...}}
  COMMAND      a server in any language, on its standard input and output""",
        examples=(
            "mcp-sessions serve server.py",
            "mcp-sessions serve server.py --store sqlite:///sessions.db --port 9000",
            "mcp-sessions serve -- npx -y @modelcontextprotocol/server-everything",
            "mcp-sessions serve https://mcp.example.com/mcp \\\n"
            "      --header 'Authorization: Bearer ${TOKEN}'",
            "mcp-sessions serve --config mcp.json --check",
        ),
        notes=f"{types.LEGEND}\n\n{NOTES}",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=argparse.SUPPRESS)
    # The process that keeps the workers sets it for each.
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    _add_address(parser.add_argument_group("server and address"))
    _add_access(parser.add_argument_group("who may call"))
    _add_sessions(parser.add_argument_group("sessions"))
    _add_conversations(parser.add_argument_group("conversations, for hosts that start no session"))
    add_limits(parser.add_argument_group("requests of clients"))
    _add_start_and_stop(parser.add_argument_group("start and stop"))
    _add_logs(parser.add_argument_group("log"))
    _add_external(parser.add_argument_group("-- COMMAND, a URL and --config"))
    _add_command(parser.add_argument_group("-- COMMAND"))
    _add_url(parser.add_argument_group("a URL"))
    return parser


def _add_address(group: types.Options) -> None:
    group.add_argument("--config", metavar="FILE", help="serve each server of FILE on /NAME/mcp")
    group.add_argument(
        "--reload-config", action="store_true", help="read FILE again when it changes"
    )
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument(
        "--port",
        type=types.port,
        help=f"port; 0: any free one ({DEFAULT_PORT}; none with --stdio)",
    )
    group.add_argument(
        "--path", type=types.url_path, default="/mcp", help="path of the endpoint (%(default)s)"
    )
    group.add_argument(
        "--stdio", action="store_true", help="serve the client at standard input and output"
    )
    group.add_argument(
        "--workers",
        metavar="N",
        type=types.count,
        help="processes on the port; they need a shared store",
    )


def _add_access(group: types.Options) -> None:
    access.add_options(group)
    group.add_argument(
        "--allowed-host",
        metavar="NAME",
        type=types.host,
        action="append",
        default=[],
        help="accept this Host header: mcp.example.com *",
    )
    group.add_argument(
        "--allowed-origin",
        metavar="URL",
        type=types.origin,
        action="append",
        default=[],
        help="accept web pages of this origin *",
    )
    group.add_argument(
        "--forwarded-allow-ips",
        metavar="IPS",
        type=types.proxies,
        help="proxies to trust, as 10.0.0.0/8 (127.0.0.1)",
    )
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (HTTP)"
    )
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="the key, if the certificate's file has none"
    )


def _add_sessions(group: types.Options) -> None:
    limits = SessionPolicy()
    group.add_argument(
        "--store", metavar="URL", help=f"sessions: sqlite:///notes.db ({DEFAULT_STORE})"
    )
    group.add_argument(
        "--idle-timeout",
        type=types.seconds,
        metavar="S",
        help=f"idle time until a session ends or sleeps ({limits.idle_timeout:g})",
    )
    group.add_argument(
        "--forget-after",
        type=types.seconds,
        metavar="S",
        help=f"sleeping time until a session ends ({FORGET_AFTER})",
    )
    group.add_argument(
        "--max-sessions",
        type=types.count,
        metavar="N",
        help=f"open sessions in the store ({limits.max_sessions})",
    )
    group.add_argument(
        "--max-sleeping-bytes",
        type=types.count,
        metavar="BYTES",
        help=f"size of sleeping sessions ({limits.max_sleeping_bytes})",
    )
    group.add_argument(
        "--max-events",
        type=types.count,
        metavar="N",
        help=f"events that a session keeps ({limits.max_events})",
    )
    group.add_argument(
        "--hide",
        action="append",
        metavar="PATTERN",
        help="hide names that match, until they are revealed *",
    )
    group.add_argument(
        "--readable-state",
        action="store_true",
        help="let clients read their state, but not change it",
    )


def _add_conversations(group: types.Options) -> None:
    group.add_argument(
        "--conversations",
        action="store_true",
        help="make a session for each conversation",
    )
    group.add_argument(
        "--platform-ids",
        action="store_true",
        help="take a platform's Mcp-Session-Id as a name",
    )
    group.add_argument(
        "--per-principal",
        action="store_true",
        help="one session per user who names no conversation",
    )
    group.add_argument(
        "--handle",
        action="append",
        metavar="TOOL",
        help="TOOL returns a handle for later calls *",
    )


def _add_start_and_stop(group: types.Options) -> None:
    group.add_argument(
        "--check",
        action="store_true",
        help="print what a start would do, and exit",
    )
    group.add_argument(
        "--health",
        metavar="PATH",
        type=types.url_path,
        help="serve PATH/healthz and PATH/readyz",
    )
    group.add_argument(
        "--grace",
        metavar="S",
        type=types.duration,
        default=DEFAULT_GRACE,
        help="time for running calls at a stop (%(default)s)",
    )
    group.add_argument(
        "--drain-delay",
        metavar="S",
        type=types.duration,
        help="time with readyz 503 at a stop (0; replicas: 3)",
    )


def _add_logs(group: types.Options) -> None:
    types.add_log_options(group, level="info")
    group.add_argument(
        "--access-log",
        action="store_true",
        help="log a line for each HTTP request and WebSocket",
    )
    group.add_argument(
        "--audit",
        metavar="FILE",
        help="append a JSON line for each request; -: stdout",
    )


def _add_external(group: types.Options) -> None:
    group.add_argument(
        "--per",
        choices=("session", "principal", "shared"),
        metavar="SCOPE",
        help="process per session (default), principal, shared",
    )
    group.add_argument(
        "--max-children",
        metavar="N",
        type=types.count,
        help="processes, or sessions at a URL (64; 1000)",
    )
    group.add_argument(
        "--max-children-per-principal",
        metavar="N",
        type=types.count,
        help="the same for one user (no limit)",
    )
    group.add_argument(
        "--lazy",
        action="store_true",
        default=None,
        help="start no server before a client needs it",
    )
    group.add_argument(
        "--child-idle",
        metavar="S",
        type=types.seconds,
        help="idle time until a process is stopped (900)",
    )
    group.add_argument(
        "--start-timeout",
        metavar="S",
        type=types.seconds,
        help="time for the answer to initialize (30)",
    )
    group.add_argument(
        "--max-answer",
        metavar="BYTES",
        type=types.count,
        help=f"largest message of the server ({SessionPolicy().max_answer})",
    )


def _add_command(group: types.Options) -> None:
    group.add_argument(
        "--warm",
        metavar="N",
        type=types.count_or_none,
        help="processes started before they are needed (0)",
    )
    group.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        type=types.variable,
        action="append",
        help="set a variable, or pass it on as it is here *",
    )
    group.add_argument("--cwd", metavar="DIR", help="directory of the command (this one)")


def _add_url(group: types.Options) -> None:
    group.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        type=types.header,
        action="append",
        help="send this header; ${NAME} is a variable *",
    )
