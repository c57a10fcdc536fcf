"""Decide whether ``serve`` may start with the clients that would reach it.

Rules, owned by ``tests/cli/test_access.py``:

1. An address that is not loopback needs authentication, or ``--no-auth``.
2. The wrapped server's own authentication counts.
"""

from __future__ import annotations

import argparse

from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who may use the server."""
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="serve on a --host that is not loopback without authentication: every client that "
        "reaches the port can call every tool; for a network that you trust, or behind a proxy "
        "that authenticates",
    )


def access_of(options: argparse.Namespace, *, authenticates: bool) -> str:
    """Return who may use the server, in words.

    Args:
        authenticates: Whether each request needs a credential.

    Raises:
        ConfigurationError: Every client on the network could use it, and nobody said so.
    """
    if options.stdio and options.port is None:
        return "the program at standard input and output"
    if authenticates:
        return "clients with a credential"
    if is_loopback(options.host):
        return "every program on this machine"
    if options.no_auth:
        return "every client that reaches the address (--no-auth)"
    raise ConfigurationError(
        f"--host {options.host} lets every client on the network call this server, which has no "
        "authentication: set up authentication in the server, serve on 127.0.0.1 behind a proxy "
        "that authenticates, or write --no-auth"
    )
