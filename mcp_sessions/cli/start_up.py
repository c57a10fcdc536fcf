from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from mcp_sessions import __version__
from mcp_sessions.cli import logs

HANDSHAKE_ERA = ("2025-03-26", "2025-06-18", "2025-11-25")
MODERN_ERA = ("2026-07-28",)
TRANSPORTS = ("Streamable HTTP", "WebSocket")


def start_up(
    options: argparse.Namespace,
    sock: socket.socket | None,
    store: str,
    paths: Sequence[str] = (),
) -> None:
    """Print what is served, and its address, eras, transports and store.

    Args:
        sock: The listening socket. None: standard input and output only.
        paths: Those of several servers.
    """
    host = f"[{options.host}]" if ":" in options.host else options.host
    urls = ["standard input and output"]
    transports = ("stdio",) if options.stdio else ()
    if sock is not None:
        scheme = "https" if options.ssl_certfile is not None else "http"
        address = f"{scheme}://{host}:{sock.getsockname()[1]}"
        urls = [f"{address}{path}" for path in paths or [options.path]]
        transports = (*TRANSPORTS, *transports)
    if options.log_format == "json":
        logs.say(
            "serving",
            version=__version__,
            target=options.target,
            url=" ".join(urls),
            eras={"handshake": HANDSHAKE_ERA, "modern": MODERN_ERA},
            transports=transports,
            store=store,
        )
        return
    lines = [
        f"mcp-sessions {__version__} serves {options.target}",
        *(f"  at          {url}" for url in urls),
        f"  eras        handshake ({', '.join(HANDSHAKE_ERA)}), modern ({', '.join(MODERN_ERA)})",
        f"  transports  {', '.join(transports)}",
        f"  store       {store}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
