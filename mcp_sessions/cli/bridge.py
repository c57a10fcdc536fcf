"""``mcp-sessions bridge URL …``: stdio on one side, a resumable session on the other.

For hosts that only start local servers: they start this one, and get a remote server that
survives sleep, network changes and restarts. Nothing but protocol goes to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli import logs
from mcp_sessions.cli.logs import complain
from mcp_sessions.errors import ConfigurationError

NEVER_ANSWERED = 1
"""The exit status if no request of the host was ever answered by the server."""


def main(arguments: Sequence[str]) -> int:
    """Bridge until stdin ends, and return the exit status.

    Raises:
        ConfigurationError: A URL, a header or the jar is wrong.
    """
    options = _parser().parse_args(arguments)
    logs.configure(level=options.log_level, format=options.log_format)
    headers = dict(options.header)
    jar_folder = Path(options.jar).resolve().parent if options.jar else None
    if jar_folder is not None and not jar_folder.is_dir():
        raise ConfigurationError(f"--jar: there is no folder {jar_folder}")

    import anyio

    try:
        return anyio.run(_bridge, options.url, headers, options.jar, options.user)
    except KeyboardInterrupt:
        return types.INTERRUPTED


async def _bridge(
    urls: Sequence[str], headers: dict[str, str], jar_path: str | None, user: str
) -> int:
    """Pass messages on until stdin ends, or the other side is gone for good.

    Returns:
        0, or `NEVER_ANSWERED`; the reason for it was written to stderr.
    """
    import anyio

    from mcp_sessions.client.jar import FileJar
    from mcp_sessions.client.sdk import Answers, over_stdio
    from mcp_sessions.client_transport import resumable

    jar = FileJar(jar_path) if jar_path is not None else None
    transport = resumable(*urls, headers=headers, jar=jar, user=user)
    answers = Answers()
    # Stdio ends only when what is written to it is closed.
    async with over_stdio() as (from_host, to_host), to_host, transport as (read, write):
        async with anyio.create_task_group() as tasks:

            async def pass_on(source: Any, sink: Any) -> None:
                async for item in source:
                    if not isinstance(item, Exception):
                        if sink is to_host:
                            answers.note(item)
                        await sink.send(item)
                tasks.cancel_scope.cancel()

            tasks.start_soon(pass_on, from_host, write)
            tasks.start_soon(pass_on, read, to_host)
    if answers.has_result or answers.last_error is None:
        return 0
    complain("mcp-sessions bridge", answers.last_error)
    return NEVER_ANSWERED


def _url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https", "ws", "wss") or not urlsplit(text).netloc:
        raise argparse.ArgumentTypeError(f"must be an http, https, ws or wss URL, not {text!r}")
    return text


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        # Without the text: it may be a credential.
        raise argparse.ArgumentTypeError("must be 'Name: value'")
    return name.strip(), value.strip()


def _parser() -> argparse.ArgumentParser:
    parser = types.OneLineParser(
        prog="mcp-sessions bridge",
        description="Serve a remote MCP server on stdin and stdout, in one resumable session.",
        epilog="Several URLs are addresses of one server, tried in this order. Logs go to stderr.",
    )
    parser.add_argument("url", metavar="URL", nargs="+", type=_url, help="where the server is")
    parser.add_argument(
        "--jar", metavar="FILE", help="keep the session there between runs (file mode 0600)"
    )
    parser.add_argument(
        "--user", default="", help="whose session it is, if one jar serves several users"
    )
    parser.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        default=[],
        type=_header,
        help="send it with every request; may be given several times",
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="warning")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    return parser
