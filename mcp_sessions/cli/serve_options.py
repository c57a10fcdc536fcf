"""Define the options of ``mcp-sessions serve``, and check which of them go together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from urllib.parse import urlsplit, urlunsplit

from mcp_sessions.cli import access, logs
from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.environment import EPILOG, parse, unknown, variable_of, variables_named
from mcp_sessions.cli.targets import SHAPE, program_of
from mcp_sessions.core.addresses import HTTP, has_scheme, wrong_address
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

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        quotes = ", unquoted" if program != target else ""
        parser.error(f"a command stands after --{quotes}: mcp-sessions serve -- {program} ...")
    if has_scheme(target) and not is_url(target):
        raise ConfigurationError(wrong_address(target, HTTP))
    if more:
        near = nearest(parser, more[0])
        hint = f"; did you mean {near}?" if near is not None else ""
        parser.error(f"unrecognized arguments: {' '.join(more)}{hint}")
    if options.config is not None:
        if options.target is not None or command:
            parser.error("either --config or one server is served, not both")
        options = argparse.Namespace(**{**vars(options), "target": options.config})
    elif options.target is None and not command:
        parser.error(
            "the following arguments are required: TARGET or -- COMMAND, a URL or --config"
        )
    elif options.target is not None and command:
        parser.error(f"either {options.target} or a command is served, not both")
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
    """Return the option that was probably meant. None: none is similar."""
    known = [option for action in parser.shown_options() for option in action.option_strings]
    return next(iter(get_close_matches(text.partition("=")[0], known, 1, 0.75)), None)


def is_url(target: str) -> bool:
    """Whether a target is a server's address."""
    return target.lower().startswith(("http://", "https://"))


def _own(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments before a command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the log is to be JSON. This is read before all other options."""
    own = _own(arguments)
    if any(each.partition("=")[0] == "--log-format" for each in own):
        return "--log-format=json" in own or ("--log-format", "json") in pairwise(own)
    return os.environ.get(variable_of("--log-format")) == "json"


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigurationError: Two options do not go together.
    """
    if options.allowed_origin and not options.allowed_host and options.host not in LOOPBACK:
        raise ConfigurationError(
            f"--allowed-origin on --host {options.host} also needs --allowed-host NAME: "
            "what checks the one header checks the other"
        )
    access.check_options(options)
    more = {
        "--per-principal": options.per_principal,
        "--platform-ids": options.platform_ids,
        "--handle": options.handle,
    }
    given = [name for name, value in more.items() if value]
    if given and not options.conversations:
        raise ConfigurationError(f"{given[0]} goes with --conversations")
    is_external = bool(options.command or options.url or options.config)
    if options.config is not None and options.stdio:
        raise ConfigurationError("--config serves several servers, on HTTP: not with --stdio")
    for names, fits, what in (
        (COMMAND_OPTIONS, bool(options.command), "-- COMMAND"),
        (URL_OPTIONS, bool(options.url), "a URL"),
        ((*EXTERNAL_OPTIONS, "lazy", "max_answer"), is_external, "-- COMMAND, a URL or --config"),
    ):
        given = [name for name in names if getattr(options, name) is not None]
        if given and not fits:
            raise ConfigurationError(f"--{given[0].replace('_', '-')} goes with {what}")
    if options.health is not None and options.path.endswith(("/healthz", "/readyz")):
        if options.path.rpartition("/")[0] == options.health.rstrip("/"):
            raise ConfigurationError("--path is that of a health check, see --health")
    if options.stdio and options.workers is not None:
        raise ConfigurationError("--workers: standard input and output belong to one process")
    if options.stdio and options.audit == "-":
        raise ConfigurationError("--audit -: standard output is the client's; name a file")
    if options.stdio and options.port is None:
        given = {
            "--allowed-host": options.allowed_host,
            "--allowed-origin": options.allowed_origin,
            "--health": options.health,
            "--drain-delay": options.drain_delay,
            "--access-log": options.access_log,
            "--forwarded-allow-ips": options.forwarded_allow_ips,
            "--api-keys": options.api_keys,
            "--auth-issuer": options.auth_issuer,
        }
        refused = [name for name, value in given.items() if value]
        if refused:
            raise ConfigurationError(
                f"{' '.join(refused)}: for HTTP, and --stdio without --port serves none"
            )


def make_parser() -> types.OneLineParser:
    """Make the parser of the command line's options, which the environment has as well."""
    limits = SessionPolicy()
    parser = types.OneLineParser(
        prog="mcp-sessions serve",
        usage="%(prog)s [OPTION ...] (TARGET | URL | --config FILE | -- COMMAND [ARG ...])",
        description="Serve an MCP server whose sessions survive a cut connection.",
        epilog="COMMAND is a server in any language that speaks MCP on its standard input and "
        "output, such as: -- npx -y @modelcontextprotocol/server-everything. " + EPILOG,
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help=f"{SHAPE}: a server or a SessionLayer; without attr the only one in the file; "
        "or the URL of a server that speaks Streamable HTTP",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help='serve each server that this file names as hosts do ({"mcpServers": ...}) on '
        "/NAME/mcp",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--port",
        type=types.port,
        help=f"0: any free one; default: {DEFAULT_PORT}, with --stdio: none",
    )
    parser.add_argument(
        "--stdio",
        action="store_true",
        help="serve the client at standard input and output; with --port HTTP and WebSocket too",
    )
    parser.add_argument("--path", type=types.url_path, default="/mcp", help="default: %(default)s")
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        type=types.host,
        action="append",
        default=[],
        help="a name that clients call this server by, such as mcp.example.com behind a proxy; "
        "may be given several times; default: on a loopback --host loopback names, else any",
    )
    parser.add_argument(
        "--allowed-origin",
        metavar="URL",
        type=types.origin,
        action="append",
        default=[],
        help="whose pages may call this server from a browser, such as https://app.example.com; "
        "may be given several times",
    )
    access.add_options(parser)
    parser.add_argument(
        "--health",
        metavar="PATH",
        type=types.url_path,
        help="serve PATH/healthz (200: alive) and PATH/readyz (200: store reachable and not "
        "draining, else 503); '/' for /healthz and /readyz; default: neither",
    )
    parser.add_argument(
        "--grace",
        metavar="S",
        type=types.duration,
        default=DEFAULT_GRACE,
        help="seconds that running calls get when the server is stopped; default: %(default)s",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=types.count,
        help="serve with N processes on the one port, each started again if it ends; needs a "
        "store that processes share (redis://...)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="serve nothing: print what a start would do and what is wrong with it, and exit with "
        "0 or 2; reaches the store, and starts each command or tries each URL once",
    )
    # The process that keeps the workers sets it for each.
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--drain-delay",
        metavar="S",
        type=types.duration,
        help="seconds after SIGTERM in which new connections are still taken and readyz is 503, "
        "for a load balancer to notice; default: 3 where replicas share the store, else 0",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help=f"where sessions are kept, such as sqlite:///notes.db; default: {DEFAULT_STORE}",
    )
    parser.add_argument(
        "--conversations",
        action="store_true",
        help="hosts that start no session have one for each of their conversations",
    )
    parser.add_argument(
        "--platform-ids",
        action="store_true",
        help="with --conversations: an Mcp-Session-Id that is none of the server's names one, too",
    )
    parser.add_argument(
        "--per-principal",
        action="store_true",
        help="with --conversations: who is authenticated and names none has one for everything",
    )
    parser.add_argument(
        "--handle",
        action="append",
        metavar="TOOL",
        help="with --conversations: this tool's answer tells the model a handle for later calls, "
        "for hosts that name no conversation; may be given again",
    )
    parser.add_argument(
        "--forget-after",
        type=types.seconds,
        metavar="S",
        help="seconds after which an unused session expires, which sleeps after --idle-timeout; "
        f"default: {FORGET_AFTER} with a store that outlives the process, else as --idle-timeout",
    )
    parser.add_argument(
        "--hide",
        action="append",
        metavar="PATTERN",
        help="no session sees a tool, prompt or resource of that name, or URI (* is any text), if "
        "the server reveals it to none; may be given again",
    )
    parser.add_argument(
        "--readable-state",
        action="store_true",
        help="sign the state that clients keep, instead of sealing it: they can read it and not "
        "change it",
    )
    parser.add_argument(
        "--idle-timeout",
        type=types.seconds,
        metavar="S",
        help="seconds after which an unused session expires, or sleeps (see --forget-after); "
        f"default: {limits.idle_timeout:g}",
    )
    parser.add_argument(
        "--max-sessions",
        type=types.count,
        metavar="N",
        help="open sessions in the store; above it those that sleep are ended, the least recently "
        f"used first; default: {limits.max_sessions}",
    )
    parser.add_argument(
        "--max-sleeping-bytes",
        type=types.count,
        metavar="BYTES",
        help="that the sessions that sleep hold in the store; above it the least recently used are "
        f"ended; default: {limits.max_sleeping_bytes}",
    )
    parser.add_argument(
        "--max-events",
        type=types.count,
        metavar="N",
        help=f"events that one session keeps for replay; default: {limits.max_events}",
    )
    parser.add_argument(
        "--progress-every",
        type=types.duration,
        metavar="S",
        help="seconds after which a silent call with a progress token is sent a progress message; "
        f"0: never; default: {limits.progress_every:g}",
    )
    parser.add_argument(
        "--max-message",
        type=types.count,
        metavar="BYTES",
        help=f"of one message of a client; default: {limits.max_message}",
    )
    parser.add_argument(
        "--receive-timeout",
        type=types.seconds,
        metavar="S",
        help="seconds in which a whole request arrives, or it is answered 408; default: "
        f"{limits.receive_timeout:g}",
    )
    parser.add_argument(
        "--max-connections",
        type=types.count,
        metavar="N",
        help="open connections; above it an idle one is closed for a new one; default: as many "
        "as the limit of file descriptors allows, but for a few",
    )
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="of mcp_sessions.*; default: %(default)s",
    )
    parser.add_argument(
        "--access-log",
        action="store_true",
        help="log a line for each HTTP request and WebSocket: client, path, status, MCP method, "
        "digest of the session, milliseconds",
    )
    parser.add_argument(
        "--forwarded-allow-ips",
        metavar="ADDRESSES",
        type=types.proxies,
        help="proxies whose X-Forwarded-For names the client, separated by commas: addresses, "
        "networks such as 10.0.0.0/8, or '*' for any; default: 127.0.0.1",
    )
    parser.add_argument(
        "--audit",
        metavar="FILE",
        help="append a line of JSON for each request that was served: who, what, in which session, "
        "how it ended; no arguments, results, ids or keys; '-': standard output; default: none",
    )
    parser.add_argument(
        "--log-format", choices=logs.FORMATS, default="text", help="default: %(default)s"
    )
    _add_external_options(parser)
    return parser


def _add_external_options(parser: argparse.ArgumentParser) -> None:
    external = parser.add_argument_group("options of -- COMMAND, of a URL and of --config")
    external.add_argument(
        "--per",
        choices=("session", "principal", "shared"),
        help="who shares a process, or a session there; default: session, each has its own",
    )
    external.add_argument(
        "--max-children",
        metavar="N",
        type=types.count,
        help="processes, or sessions there, at a time; default: 64, of a URL 1000",
    )
    external.add_argument(
        "--max-children-per-principal",
        metavar="N",
        type=types.count,
        help="of these, those of one principal; default: all",
    )
    external.add_argument(
        "--lazy",
        action="store_true",
        default=None,
        help="start no server before a client needs it; default: each is started once when serve "
        "starts, and a warning says why one fails",
    )
    external.add_argument(
        "--child-idle",
        metavar="S",
        type=types.seconds,
        help="seconds after its last request in which one ends; default: 900",
    )
    external.add_argument(
        "--start-timeout",
        metavar="S",
        type=types.seconds,
        help="seconds that the server has to answer initialize; default: 30",
    )
    external.add_argument(
        "--max-answer",
        metavar="BYTES",
        type=types.count,
        help=f"of one message of the server; default: {SessionPolicy().max_answer}",
    )
    of_url = parser.add_argument_group("options of a URL")
    of_url.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        type=types.header,
        action="append",
        help="sent with each request, such as 'Authorization: Bearer ${TOKEN}', where ${TOKEN} is "
        "a variable of the environment; may be given several times",
    )
    of_command = parser.add_argument_group("options of -- COMMAND")
    of_command.add_argument(
        "--warm",
        metavar="N",
        type=types.count_or_none,
        help="processes that wait for a session; default: 0",
    )
    of_command.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        type=types.variable,
        action="append",
        help="a variable of its environment, without VALUE as it is here; may be given several "
        "times; of itself it has PATH, HOME and the like only",
    )
    of_command.add_argument("--cwd", metavar="DIR", help="where it runs; default: here")
