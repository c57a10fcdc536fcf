"""Options of ``serve`` for who may use the server, and whether it may start with them.

Rules, owned by ``tests/cli/test_access.py``:

1. An address that is not loopback needs authentication, or ``--no-auth``.
2. The wrapped server's own authentication counts. Another one is not added.
"""

from __future__ import annotations

import argparse

from mcp_sessions.access import SERVER, Access, apart
from mcp_sessions.cli.arguments import Options
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError


def add_options(group: Options) -> None:
    group.add("--no-auth", "let every client on the network call every tool")
    group.add("--api-keys FILE", "each client needs a key of FILE, or a token")
    group.add("--auth PROVIDER", "users sign in at github, google, azure, oidc ...")
    group.add("--allow WHO", "'*@example.com', login:NAME or group:NAME *")
    group.add("--auth-issuer URL", "accept tokens of this authorization server")
    group.add("--auth-audience URL", "URL of this server in these tokens")
    group.add_rare("--auth-introspect URL", "ask the authorization server about tokens")
    group.add_rare("--auth-scope SCOPE", "each key or token needs this scope *")


def access_given(options: argparse.Namespace) -> Access:
    """Return what the options say.

    Raises:
        ConfigurationError: They do not go together.
    """
    given = {name: getattr(options, name) for name in Access.__dataclass_fields__}
    return Access(**{name: value for name, value in given.items() if value is not None})


def check_options(options: argparse.Namespace) -> None:
    given = access_given(options)
    if given.asks_by is not None and options.no_auth:
        raise ConfigurationError(
            f"--no-auth: {given.asks_by} asks for a credential; leave out one of them"
        )
    if given.auth and options.config:
        raise apart(given.auth, "--config")
    if given.auth_audience and SERVER in given.auth_audience and options.config is None:
        raise ConfigurationError(f"--auth-audience: {SERVER} is only for --config: leave it out")


def access_of(options: argparse.Namespace, *, authenticates: bool) -> str:
    """Return who may use the server, in words.

    Args:
        authenticates: Whether each request needs a credential.

    Raises:
        ConfigurationError: Every client on the network could use it, and nobody said so.
    """
    if options.stdio and options.port is None:
        return "the program at standard input and output"
    if options.api_keys or options.auth_issuer or options.auth:
        keys = f"a key of {options.api_keys}" if options.api_keys else ""
        token = f"a token of {options.auth_issuer}" if options.auth_issuer else ""
        user = f"a user of {options.auth} ({' '.join(options.allow)})" if options.auth else ""
        return f"clients with {' or '.join(filter(None, (keys, token, user)))}"
    if authenticates:
        return "clients with a credential"
    if is_loopback(options.host):
        return "every program on this machine"
    if options.no_auth:
        return "every client that reaches the address (--no-auth)"
    raise ConfigurationError(
        f"--host {options.host} lets every client on the network call this server, which has no "
        "authentication: give --api-keys FILE, --auth-issuer URL and --auth-audience URL, or "
        "--auth PROVIDER and --allow WHO, serve on 127.0.0.1 behind a proxy that authenticates, or "
        "write --no-auth"
    )
