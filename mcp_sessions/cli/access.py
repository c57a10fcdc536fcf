"""Options of ``serve`` for who may use the server, and whether it may start with them.

Rules, owned by ``tests/cli/test_access.py``:

1. An address that is not loopback needs authentication, or ``--no-auth``.
2. The wrapped server's own authentication counts. Another one is not put before it.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError

if TYPE_CHECKING:
    from mcp_sessions.server.upstream.sdk.authentication import Authentication


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who may use the server."""
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="serve on a --host that is not loopback without authentication: every client that "
        "reaches the port can call every tool; for a network that you trust, or behind a proxy "
        "that authenticates",
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        help="each client needs a key of this file, which mcp-sessions keys add makes; it is read "
        "again when it changes",
    )
    parser.add_argument(
        "--auth-scope",
        metavar="S",
        action="append",
        help="a scope that each key needs; may be given several times",
    )


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigurationError: Two options do not go together.
    """
    if options.api_keys and options.no_auth:
        raise ConfigurationError("--no-auth: --api-keys asks for a key; leave out one of them")
    if options.auth_scope and not options.api_keys:
        raise ConfigurationError("--auth-scope goes with --api-keys")


def authentication_of(options: argparse.Namespace) -> Authentication | None:
    """Return what the options put before the server. None: nothing.

    Raises:
        ConfigurationError: The file of keys cannot be read.
    """
    if not options.api_keys:
        return None
    from mcp_sessions.authentication.api_keys import ApiKeys
    from mcp_sessions.server.upstream.sdk.authentication import Authentication, SdkVerifier

    try:
        keys = ApiKeys(options.api_keys, time.time)
    except ConfigurationError as failed:
        hint = ""
        if not os.path.lexists(options.api_keys):
            hint = f"; make it with mcp-sessions keys add NAME --file {options.api_keys}"
        raise ConfigurationError(f"--api-keys {failed}{hint}") from failed
    return Authentication(SdkVerifier([keys]), options.auth_scope or ())


def access_of(options: argparse.Namespace, *, authenticates: bool) -> str:
    """Return who may use the server, in words.

    Args:
        authenticates: Whether each request needs a credential.

    Raises:
        ConfigurationError: Every client on the network could use it, and nobody said so.
    """
    if options.stdio and options.port is None:
        return "the program at standard input and output"
    if options.api_keys:
        return f"clients with a key of {options.api_keys}"
    if authenticates:
        return "clients with a credential"
    if is_loopback(options.host):
        return "every program on this machine"
    if options.no_auth:
        return "every client that reaches the address (--no-auth)"
    raise ConfigurationError(
        f"--host {options.host} lets every client on the network call this server, which has no "
        "authentication: give --api-keys FILE, serve on 127.0.0.1 behind a proxy that "
        "authenticates, or write --no-auth"
    )
