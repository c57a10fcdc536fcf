from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from urllib.parse import urlsplit, urlunsplit

from mcp_sessions.cli import access
from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.option_variables import NOTES, parse, unknown, variable_of, variables_named
from mcp_sessions.cli.targets import SHAPE, program_of
from mcp_sessions.core.addresses import HTTP, has_scheme, is_own_path, wrong_address
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import (
    DEFAULT_GRACE,
    LIMITS,
    TaskPolicy,
)
from mcp_sessions.protocol_versions import ERAS

_UNLISTED = """\
More options, which few servers need, are in the documentation: see its pages
Authentication, Deployment, Limits, Tasks, Conversations, Commands and URLs."""

DEFAULT_STORE = "memory://"
DEFAULT_PORT = 8000
EXTERNAL_OPTIONS = ("per", "max_children", "child_idle", "start_timeout")
"""Options of a server that is a command or a URL, as `StdioServer` and `HTTPServer` call them."""

_LISTED = {
    "idle_timeout": "idle time until a session ends or sleeps",
    "max_sessions": "open sessions in the store",
}
"""Limits that the help lists, and what they are."""

_NEEDS = {
    "task_after": "tasks",
    "task_tools": "tasks",
    "per_principal": "conversations",
    "platform_ids": "conversations",
    "handle": "conversations",
    "conversation_key": "conversations",
    "dashboard_actions": "dashboard",
    "reload_config": "config",
    "ssl_keyfile": "ssl_certfile",
}
"""Option → the one without which it says nothing."""

_ONLY_FOR = (
    (("env",), ("command", "config"), "-- COMMAND or --config"),
    (("cwd", "warm"), ("command",), "-- COMMAND"),
    (("header",), ("url",), "a URL"),
    (
        (*EXTERNAL_OPTIONS, "lazy", "max_answer"),
        ("command", "url", "config"),
        "-- COMMAND, a URL or --config",
    ),
)
"""Options, the kinds of servers that have them, and these in words."""

_OF_HTTP = (
    "allowed_host",
    "allowed_origin",
    "health",
    "dashboard",
    "drain_delay",
    "access_log",
    "forwarded_allow_ips",
    "api_keys",
    "auth",
    "auth_issuer",
    "ssl_certfile",
)
"""Options that say nothing about a client at standard input and output."""


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
    options.settings = settings
    target: str = options.target or ""
    program = program_of(target)
    if not command and program is not None:
        quotes = ", without quotes" if program != target else ""
        parser.error(f"write a command after --{quotes}: mcp-sessions serve -- {program} ...")
    if has_scheme(target) and not is_url(target):
        raise ConfigurationError(wrong_address(target, HTTP))
    if more and more[0].partition("=")[0] == "--limit":
        parser.error("--limit is gone: each limit is an option by its name, such as --max-events 5")
    if more:
        parser.unrecognized(more)
    if options.config is not None:
        if options.target is not None or command:
            parser.error("--config serves the servers of its file: leave out the other server")
        options.target = options.config
    elif options.target is None and not command:
        parser.error("no server to serve: give TARGET, a URL, --config FILE or -- COMMAND")
    elif options.target is not None and command:
        parser.error(f"only one server is served: leave out {options.target}, or the command")
    if command:
        # It is for the log. Later arguments may be a secret.
        options.target = command[0]
    elif options.config is None and is_url(str(options.target)):
        options.url = options.target
        options.target = urlunsplit(urlsplit(options.url)._replace(query="", fragment=""))
    with variables_named(settings):
        _check(options)
    return options


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


def option_of(name: str) -> str:
    """Return the option that a member of the options is filled by."""
    return f"--{name.replace('_', '-')}"


def _given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the options that say something, as 0 does."""
    values = {name: getattr(options, name) for name in names}
    return [
        option_of(name)
        for name, value in values.items()
        if value not in (None, []) and value is not False
    ]


def _check(options: argparse.Namespace) -> None:
    if options.allowed_origin and not options.allowed_host and not is_loopback(options.host):
        raise ConfigurationError(
            f"--allowed-origin on --host {options.host} needs --allowed-host NAME, too: "
            "give the name that clients call"
        )
    access.check_options(options)
    for name, needed in _NEEDS.items():
        if _given(options, [name]) and not getattr(options, needed):
            raise ConfigurationError(
                f"{option_of(name)} needs {option_of(needed)}: add it, or leave out "
                f"{option_of(name)}"
            )
    if options.stdio:
        _check_stdio(options)
    for names, kinds, what in _ONLY_FOR:
        given = _given(options, names)
        if given and not any(getattr(options, kind) for kind in kinds):
            raise ConfigurationError(f"{given[0]} is only for {what}: leave it out for this server")
    if options.dashboard is not None:
        if options.config is not None:
            raise ConfigurationError(
                "--dashboard shows one server, --config serves several: leave out --dashboard, and "
                "run mcp-sessions dashboard --store URL for the store of each"
            )
        if not is_own_path(options.dashboard, options.path):
            raise ConfigurationError(
                f"--dashboard {options.dashboard}: choose a path of its own, such as /sessions"
            )
    if options.health is not None and options.path.endswith(("/healthz", "/readyz")):
        if options.path.rpartition("/")[0] == options.health.rstrip("/"):
            raise ConfigurationError(
                f"--path {options.path} is the path of a health check: choose another --path, or "
                "another --health"
            )


def _check_stdio(options: argparse.Namespace) -> None:
    if options.config is not None:
        raise ConfigurationError(
            "--stdio serves one server, --config serves several over HTTP: leave out one of them"
        )
    if options.workers is not None:
        raise ConfigurationError("--workers: --stdio needs one process: leave out one of them")
    if options.audit == "-":
        raise ConfigurationError(
            "--audit -: with --stdio, the standard output belongs to the client: name a file"
        )
    refused = _given(options, _OF_HTTP)
    if options.port is None and refused:
        raise ConfigurationError(
            f"{' '.join(refused)}: --stdio serves no HTTP: add --port, or leave out the option"
        )


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions serve",
        usage="%(prog)s [OPTION ...] TARGET|URL|--config FILE|-- COMMAND ...",
        description=f"""\
Serve an MCP server whose sessions survive a cut connection. The server is one
of:

  TARGET       {SHAPE}: a server or a SessionLayer
               of your code; without attr the only one in the file
  URL          a server that speaks Streamable HTTP
  FILE         the servers of a host, as {{"mcpServers": ...}}
  COMMAND      a server in any language, on its standard input and output""",
        examples=(
            "mcp-sessions serve server.py",
            "mcp-sessions serve server.py --store sqlite:///sessions.db --port 9000",
            "mcp-sessions serve -- npx -y @modelcontextprotocol/server-everything",
            "mcp-sessions serve https://example.com/mcp --header 'X-Api-Key: ${KEY}'",
            "mcp-sessions serve --config mcp.json --check",
        ),
        notes=f"{types.LEGEND}\n\n{NOTES}\n\n{_UNLISTED}",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=argparse.SUPPRESS)
    # The process that keeps the workers sets it for each.
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    _add_address(parser.group("server and address"))
    _add_access(parser.group("who may call"))
    _add_sessions(parser.group("sessions"))
    _add_conversations(parser.group("conversations, for hosts that start no session"))
    _add_requests(parser.group("requests of clients"))
    _add_start_and_stop(parser.group("start and stop"))
    _add_logs(parser.group("log"))
    _add_external(parser.group("-- COMMAND, a URL and --config"))
    _add_commands(parser)
    return parser


def _add_address(group: types.Options) -> None:
    group.add("--config FILE", "serve each server of FILE on /NAME/mcp")
    group.add_rare("--reload-config", "read FILE again when it changes")
    group.add("--host HOST", "address to listen on (%(default)s)", default="127.0.0.1")
    group.add(
        "--port PORT", f"port; 0: any free one ({DEFAULT_PORT}; none with --stdio)", types.port
    )
    group.add("--path PATH", "path of the endpoint (%(default)s)", types.url_path, default="/mcp")
    group.add("--eras ERAS", "eras of MCP: both (default), 2025, 2026", choices=ERAS)
    group.add("--stdio", "serve the client at standard input and output")
    group.add("--workers N", "processes on the port; they need a shared store", types.count)


def _add_access(group: types.Options) -> None:
    access.add_options(group)
    group.add("--allowed-host NAME", "accept this Host header: mcp.example.com *", types.host)
    group.add("--allowed-origin URL", "accept web pages of this origin *", types.origin)
    group.add("--forwarded-allow-ips IPS", "your proxies, as 10.0.0.0/8 (none)", types.proxies)
    group.add("--ssl-certfile FILE", "serve HTTPS with this certificate (HTTP)")
    group.add_rare("--ssl-keyfile FILE", "the key, if the certificate's file has none")


def _add_sessions(group: types.Options) -> None:
    group.add("--store URL", f"sessions: sqlite:///notes.db ({DEFAULT_STORE})")
    group.add("--encrypt-store", "encrypt events, answers and data in the store")
    for name in LIMITS:
        kind, value, usual = types.limit(name)
        add = group.add if name in _LISTED else group.add_rare
        what = f"{_LISTED.get(name, 'see the page Limits')} ({usual})"
        add(f"{option_of(name)} {value}", what, kind)
    group.add("--hide PATTERN", "hide names that match, until they are revealed *")
    group.add_rare("--readable-state", "let clients read their state, but not change it")


def _add_conversations(group: types.Options) -> None:
    group.add("--conversations", "make a session for each conversation")
    group.add(
        "--conversation-key WHERE",
        "meta:NAME, header:NAME or env:NAME has a name *",
        types.source("meta", "header", "env"),
    )
    group.add_rare("--platform-ids", "take a platform's Mcp-Session-Id as a name")
    group.add_rare("--per-principal", "one session per user who names no conversation")
    group.add_rare("--handle TOOL", "TOOL returns a handle for later calls *")


def _add_requests(group: types.Options) -> None:
    after = types.shown(TaskPolicy().after)
    group.add("--tasks", "turn long calls into tasks of the protocol")
    group.add_rare("--task-after TIME", f"time until a call is a task ({after})", types.duration)
    group.add_rare("--task-tools", "two plain tools, for clients that know no tasks")
    group.add("--request-key WHERE", "header:NAME or meta:NAME is a request key *", types.place)


def _add_start_and_stop(group: types.Options) -> None:
    group.add("--check", "print what a start would do, and exit")
    group.add("--health PATH", "serve PATH/healthz and PATH/readyz", types.url_path)
    grace = f"time for running calls at a stop ({types.shown(DEFAULT_GRACE)})"
    group.add("--grace TIME", grace, types.duration, default=DEFAULT_GRACE)
    delay = "time with readyz 503 at a stop (0; replicas: 3s)"
    group.add_rare("--drain-delay TIME", delay, types.duration)


def _add_logs(group: types.Options) -> None:
    types.add_log_options(group, level="info")
    group.add("--dashboard PATH", "serve a page that shows the sessions", types.url_path)
    group.add_rare("--dashboard-actions", "let it end sessions, and more")
    group.add("--access-log", "log a line for each HTTP request and WebSocket")
    group.add("--audit FILE", "append a JSON line for each request; -: stdout")
    group.add_rare("--audit-key-names", "name API keys in the audit")


def _add_external(group: types.Options) -> None:
    group.add(
        "--per SCOPE",
        "process per session (default), principal, shared",
        choices=("session", "principal", "shared"),
    )
    group.add("--max-children N", "processes, or sessions at a URL (64; 1000)", types.count)
    group.add_rare("--lazy", "start no server before a client needs it")
    group.add_rare("--child-idle TIME", "idle time until a process is stopped (15m)", types.seconds)
    group.add_rare("--start-timeout TIME", "time for its first answer (30s)", types.seconds)


def _add_commands(parser: types.OneLineParser) -> None:
    both = parser.group("-- COMMAND and --config")
    both.add("--env NAME[=VALUE]", "set a variable, or pass it on as it is here *", types.variable)
    one = parser.group("-- COMMAND")
    one.add_rare("--warm N", "processes started before they are needed (0)", types.count_or_none)
    one.add("--cwd DIR", "directory of the command (this one)")
    url = parser.group("a URL")
    url.add("--header 'NAME: VALUE'", "send this header; ${NAME} is a variable *", types.header)
