"""Options of ``serve`` for who may use the server, and whether it may start with them.

Rules, owned by ``tests/cli/test_access.py``:

1. An address that is not loopback needs authentication, or ``--no-auth``.
2. The wrapped server's own authentication counts. Another one is not added.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mcp_sessions.authentication.issuer_addresses import checked_url
from mcp_sessions.cli.arguments import Options
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError

if TYPE_CHECKING:
    from mcp_sessions.authentication.allowing import Allowed
    from mcp_sessions.authentication.api_keys import ApiKeys
    from mcp_sessions.authentication.credential import Verifier
    from mcp_sessions.authentication.introspection import IntrospectionEndpoint
    from mcp_sessions.authentication.issuer import Issuer
    from mcp_sessions.server.upstream.sdk.authentication import Authentication

SERVER = "{server}"
"""Placeholder in the URL of a store, or in an audience, for the name of the server."""

INTROSPECTION_VARIABLES = (
    "MCP_SESSIONS_INTROSPECT_CLIENT_ID",
    "MCP_SESSIONS_INTROSPECT_CLIENT_SECRET",
)
"""The client as which the server asks about tokens. No command line shows the secret."""


def add_options(group: Options) -> None:
    group.add("--no-auth", "let every client on the network call every tool")
    group.add("--api-keys FILE", "each client needs a key of FILE, or a token")
    group.add("--auth PROVIDER", "users sign in at github, google, azure, oidc ...")
    group.add("--allow WHO", "'*@example.com', login:NAME or group:NAME *", action="append")
    group.add("--auth-issuer URL", "accept tokens of this authorization server")
    group.add("--auth-audience URL", "URL of this server in these tokens")
    group.add("--auth-introspect URL", "ask the authorization server about tokens")
    group.add("--auth-scope SCOPE", "each key or token needs this scope *", action="append")


def check_options(options: argparse.Namespace) -> None:
    for name in ("api_keys", "auth_issuer", "auth_audience", "auth_introspect", "auth"):
        if getattr(options, name) == "":
            # Often an unset variable of a shell. Without this, the server would have no lock.
            raise ConfigurationError(f"--{name.replace('_', '-')} is empty")
    ways = ("--api-keys", "--auth-issuer", "--auth")
    asks = next((way for way in ways if getattr(options, way[2:].replace("-", "_"))), None)
    if asks is not None and options.no_auth:
        raise ConfigurationError(f"--no-auth: {asks} asks for a credential; leave out one of them")
    if options.auth_scope and asks is None:
        raise ConfigurationError("--auth-scope needs --api-keys, --auth-issuer or --auth: add one")
    _check_provider(options)
    if bool(options.auth_issuer) != bool(options.auth_audience):
        raise ConfigurationError(
            "--auth-issuer and --auth-audience go together: a token for another server must not be "
            "good here"
        )
    if options.auth_introspect:
        if not options.auth_issuer:
            raise ConfigurationError(
                "--auth-introspect needs --auth-issuer URL, which clients need to get a token"
            )
        checked_url("--auth-introspect", options.auth_introspect)
    if options.auth_issuer:
        checked_url("--auth-issuer", options.auth_issuer)
        if SERVER in options.auth_audience and options.config is None:
            raise ConfigurationError(
                f"--auth-audience: {SERVER} is only for --config: leave it out"
            )
        checked_url("--auth-audience", options.auth_audience.replace(SERVER, "server"))


def _check_provider(options: argparse.Namespace) -> None:
    if not options.auth:
        if options.allow:
            raise ConfigurationError(
                "--allow needs --auth PROVIDER: name the provider of these users"
            )
        return
    for name, given in (("--auth-issuer", options.auth_issuer), ("--config", options.config)):
        if given:
            raise ConfigurationError(f"--auth {options.auth} cannot be used with {name}")
    _allowed(options)


def _allowed(options: argparse.Namespace) -> Allowed:
    from mcp_sessions.authentication.allowing import Allowed
    from mcp_sessions.cli.providers import VERIFY_MAIL

    return Allowed(options.allow or (), verifies_mail=options.auth in VERIFY_MAIL)


def authenticating(options: argparse.Namespace) -> Callable[[str], Authentication | None]:
    """Return what makes the authentication of a server. It takes the server's name.

    Raises:
        ConfigurationError: The file of keys cannot be read, or the provider cannot be made.
    """
    keys = _keys_of(options.api_keys)
    tokens = _tokens_of(options)

    if options.auth:
        return _signing_in(options, keys)

    def authentication_of(name: str) -> Authentication | None:
        if keys is None and tokens is None:
            return None
        from mcp_sessions.server.upstream.sdk import authentication

        scopes: list[str] = options.auth_scope or []
        verifiers: list[Verifier] = [keys] if keys is not None else []
        if tokens is None:
            return authentication.Authentication(authentication.SdkVerifier(verifiers), scopes)
        audience: str = options.auth_audience.replace(SERVER, name)
        verifier = authentication.SdkVerifier([*verifiers, tokens(audience)])
        return authentication.resource_server(verifier, options.auth_issuer, audience, scopes)

    return authentication_of


def _signing_in(
    options: argparse.Namespace, keys: ApiKeys | None
) -> Callable[[str], Authentication | None]:
    from mcp_sessions.authentication.identity_service import IdentityService
    from mcp_sessions.cli.providers import provider_of

    service = IdentityService(time.monotonic)
    provider = provider_of(options.auth, service=service)

    def authentication_of(name: str) -> Authentication | None:
        del name
        from mcp_sessions.server.upstream.sdk.provided import provided

        allowed = _allowed(options)
        made = provided(provider, options.auth, options.path, allowed, time.time, keys, service)
        return made.requiring(options.auth_scope or [])

    return authentication_of


def _tokens_of(options: argparse.Namespace) -> Callable[[str], Verifier] | None:
    """Return what makes a verifier of tokens for an audience. None: no token is accepted.

    Raises:
        ConfigurationError: The credential for the introspection endpoint is missing.
    """
    endpoint = introspection_of(options)
    if endpoint is not None:
        from mcp_sessions.authentication.introspection import Introspection

        return lambda audience: Introspection(
            endpoint, options.auth_issuer, audience, clock=time.time
        )
    issuer = issuer_of(options)
    if issuer is None:
        return None
    from mcp_sessions.authentication.tokens import Tokens

    return lambda audience: Tokens(issuer, audience, time.time)


def introspection_of(options: argparse.Namespace) -> IntrospectionEndpoint | None:
    if not options.auth_introspect:
        return None
    from mcp_sessions.authentication.introspection import IntrospectionEndpoint

    missing = [name for name in INTROSPECTION_VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigurationError(
            f"--auth-introspect: set {' and '.join(missing)}: the authorization server answers "
            "only clients that it knows"
        )
    client_id, secret = (os.environ[name] for name in INTROSPECTION_VARIABLES)
    return IntrospectionEndpoint(options.auth_introspect, client_id, secret)


def issuer_of(options: argparse.Namespace) -> Issuer | None:
    if not options.auth_issuer or options.auth_introspect:
        return None
    from mcp_sessions.authentication.issuer import Issuer

    return Issuer(options.auth_issuer, time.time)


def _keys_of(path: str | None) -> ApiKeys | None:
    if not path:
        return None
    from mcp_sessions.authentication.api_keys import ApiKeys

    try:
        return ApiKeys(path, time.time)
    except ConfigurationError as failed:
        hint = ""
        if not os.path.lexists(path):
            hint = f"; make it with mcp-sessions keys add NAME --file {path}"
        raise ConfigurationError(f"--api-keys {failed}{hint}") from failed


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
