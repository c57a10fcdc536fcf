"""Bridge stdio to a resumable session: ``mcp-sessions bridge URL …``.

It is for hosts that only start local servers. The host starts this command, and gets a remote
server that survives sleep, network changes and restarts. Nothing but protocol goes to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli import logs
from mcp_sessions.cli.logs import complain
from mcp_sessions.core.addresses import HTTP_AND_WEBSOCKET, wrong_address
from mcp_sessions.serve.garbage import setting_aside

UNANSWERED = 1
"""Exit status if the server answered nothing, or left requests unanswered at the end."""


def main(arguments: Sequence[str]) -> int:
    """Bridge until stdin ends, and return the exit status.

    Raises:
        ConfigurationError: A URL, a header or the jar is wrong.
    """
    options = make_parser().parse_args(arguments)
    logs.configure(level=options.log_level, format=options.log_format)

    import anyio

    return anyio.run(_bridge, options)


async def _bridge(options: argparse.Namespace) -> int:
    """Pass messages on until the host is done, or the other side has ended for good.

    Returns:
        0, or `UNANSWERED`. In that case the reason was written to stderr.
    """
    with setting_aside():
        import asyncio
        import signal

        import anyio.to_thread

        from mcp_sessions.cli.bridging import HostPipe
        from mcp_sessions.client.jar import FileJar
        from mcp_sessions.client.reconnect_policy import ReconnectPolicy
        from mcp_sessions.client_transport import dial_with
        from mcp_sessions_transports.stdio.stdio_server import standard_streams

    policy = ReconnectPolicy(max_message=options.max_message)
    dial = dial_with(headers=types.once(options.header or ()), policy=policy)
    dialers = [dial(url) for url in options.url]
    slot = None
    if options.jar is not None:
        jar, target = FileJar(options.jar), dialers[0].target
        slot = await anyio.to_thread.run_sync(jar.open, target, options.user)
    with standard_streams() as (wire_in, wire_out):
        pipe = HostPipe(
            wire_in, wire_out, max_message=options.max_message, last_wait=options.last_wait
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pipe.close)
        await pipe.run(dialers, policy, slot)
    if pipe.unanswered:
        number, names = len(pipe.unanswered), ", ".join(sorted(set(pipe.unanswered)))
        complain(
            "mcp-sessions bridge",
            f"the input ended, and nothing came for {options.last_wait:g} s: "
            f"{number} not answered ({names}). Raise --last-wait, or look at the server",
        )
        return UNANSWERED
    if pipe.why_ended is not None:
        complain("mcp-sessions bridge", pipe.why_ended)
        return UNANSWERED
    if pipe.has_result or pipe.last_error is None:
        return 0
    complain("mcp-sessions bridge", pipe.last_error)
    return UNANSWERED


def _url(text: str) -> str:
    wrong = wrong_address(text, HTTP_AND_WEBSOCKET)
    if wrong is not None:
        raise argparse.ArgumentTypeError(wrong)
    return text


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions bridge",
        description="Serve a remote MCP server on stdin and stdout, in one resumable session.",
        examples=(
            "mcp-sessions bridge https://mcp.example.com/mcp",
            "mcp-sessions bridge https://mcp.example.com/mcp --jar ~/.mcp-sessions.json",
            "mcp-sessions bridge wss://mcp.example.com/mcp --header 'X-Api-Key: ${KEY}'",
        ),
        notes=f"{types.LEGEND}\nLogs go to stderr.",
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="+",
        type=_url,
        help="address of the server; several: in this order",
    )
    session = parser.group("session")
    session.add("--jar FILE", "keep the session in FILE between runs")
    session.add("--user USER", "user of the session, if a jar has several", default="")
    messages = parser.group("messages")
    messages.add(
        "--header 'NAME: VALUE'",
        "send this header; ${NAME} is a variable *",
        types.header,
    )
    messages.add(
        "--max-message BYTES",
        "size of a message, both ways (%(default)s)",
        types.count,
        default=4_194_304,
    )
    messages.add(
        "--last-wait TIME",
        "time for answers after the input ends (1m)",
        types.seconds,
        default=60.0,
    )
    types.add_log_options(parser.group("log"), level="warning")
    return parser
