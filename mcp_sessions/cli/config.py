"""Print what a host's file needs to use a server: ``mcp-sessions config HOST``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions.cli.arguments import OneLineParser
from mcp_sessions.cli.output import out
from mcp_sessions.core.addresses import HTTP, wrong_address
from mcp_sessions.errors import ConfigurationError

DEFAULT_URL: Final = "http://127.0.0.1:8000/mcp"
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Host:
    file: str
    """Where its user puts the text."""

    servers: str = "mcpServers"
    """The member of that file that has all servers."""

    http: Mapping[str, str] | None = None
    """Members of a server at a URL, besides ``url``. None: the file can only name commands."""

    bridge: Mapping[str, str] | None = None
    """Members of a command, besides ``command`` and ``args``."""

    is_toml: bool = False


HOSTS: Final[Mapping[str, Host]] = {
    "claude-code": Host(".mcp.json in your project", http={"type": "http"}),
    "claude-desktop": Host("claude_desktop_config.json (Settings > Developer > Edit Config)"),
    "vscode": Host(
        ".vscode/mcp.json in your project",
        servers="servers",
        http={"type": "http"},
        bridge={"type": "stdio"},
    ),
    "cursor": Host(".cursor/mcp.json in your project, or ~/.cursor/mcp.json", http={}),
    "codex": Host("~/.codex/config.toml", servers="mcp_servers", http={}, is_toml=True),
    "inspector": Host(
        "mcp.json, and run: npx @modelcontextprotocol/inspector --config mcp.json --server NAME",
        http={"type": "streamable-http"},
        bridge={"type": "stdio"},
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Print the text on stdout, and where it goes on stderr.

    Raises:
        ConfigurationError: The URL is none.
    """
    # Options may stand between HOST and URL.
    options = make_parser().parse_intermixed_args(arguments)
    wrong = wrong_address(options.url, HTTP)
    if wrong is not None:
        raise ConfigurationError(wrong)
    host = HOSTS[options.host]
    print(f"put this into {host.file.replace('NAME', options.name)}:", file=sys.stderr)
    is_bridged = options.bridge or host.http is None
    out(written(host, options.name, options.url, is_bridged=is_bridged))
    return 0


def written(host: Host, name: str, url: str, *, is_bridged: bool) -> str:
    if is_bridged or host.http is None:
        bridge = {"command": "mcp-sessions", "args": ["bridge", url]}
        entry: dict[str, Any] = {**(host.bridge or {}), **bridge}
    else:
        entry = {**host.http, "url": url}
    if not host.is_toml:
        return json.dumps({host.servers: {name: entry}}, indent=2, ensure_ascii=False)
    # A string of JSON, or a list of them, is one of TOML, too.
    key = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
    lines = [f"{member} = {json.dumps(value)}" for member, value in entry.items()]
    return "\n".join([f"[{host.servers}.{key}]", *lines])


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="mcp-sessions config",
        usage="%(prog)s [OPTION ...] HOST [URL]",
        description=f"""\
Print what HOST needs in its file to use the server at URL
({DEFAULT_URL}).

  HOST         {", ".join(HOSTS)}""",
        examples=(
            "mcp-sessions config claude-code https://mcp.example.com/mcp",
            "mcp-sessions config vscode --name notes",
            "mcp-sessions config claude-desktop https://mcp.example.com/mcp",
        ),
    )
    parser.add_argument("host", metavar="HOST", choices=tuple(HOSTS), help=argparse.SUPPRESS)
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=DEFAULT_URL, help=argparse.SUPPRESS
    )
    group = parser.group("the server")
    group.add("--name NAME", "its name in the file (%(default)s)", default="sessions")
    group.add("--bridge", "start a local bridge, which reconnects by itself")
    return parser
