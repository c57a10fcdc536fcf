"""The credentials that clients need: the options of ``serve``, and arguments of ``SessionLayer``.

Both doors make an :class:`Access`, so both have the same rules and texts. A text names the options;
:func:`in_python` makes it name the arguments.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcp_sessions.authentication.issuer_addresses import checked_url
from mcp_sessions.errors import ConfigurationError

if TYPE_CHECKING:
    from mcp_sessions.authentication.allowing import Allowed
    from mcp_sessions.authentication.credential import Verifier
    from mcp_sessions.authentication.issuer import Issuer
    from mcp_sessions.authentication.key_file import ApiKeys
    from mcp_sessions.authentication.tokens import IntrospectionEndpoint
    from mcp_sessions.server.upstream.sdk.authentication import Authentication

SERVER = "{server}"
"""Placeholder in the URL of a store, or in an audience, for the name of the server."""

INTROSPECTION_VARIABLES = (
    "MCP_SESSIONS_INTROSPECT_CLIENT_ID",
    "MCP_SESSIONS_INTROSPECT_CLIENT_SECRET",
)
"""The client as which the server asks about tokens. No command line shows the secret."""

_OPTION = re.compile(r"--(api-keys|allow|auth(?:-[a-z]+)?)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Each field is the option of its name.

    Raises:
        ConfigurationError: Fields do not go together.
    """

    api_keys: str | None = None
    auth: str | None = None
    allow: Sequence[str] = ()
    auth_issuer: str | None = None
    auth_audience: str | None = None
    auth_introspect: str | None = None
    auth_scope: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("api_keys", "auth_issuer", "auth_audience", "auth_introspect", "auth"):
            if getattr(self, name) == "":
                # Often an unset variable of a shell. Without this, the server would have no lock.
                raise ConfigurationError(f"--{name.replace('_', '-')} is empty")
        if self.auth_scope and self.asks_by is None:
            raise ConfigurationError(
                "--auth-scope needs --api-keys, --auth-issuer or --auth: add one"
            )
        if self.auth:
            if self.auth_issuer:
                raise apart(self.auth, "--auth-issuer")
            self._allowed()
        elif self.allow:
            raise ConfigurationError(
                "--allow needs --auth PROVIDER: name the provider of these users"
            )
        if bool(self.auth_issuer) != bool(self.auth_audience):
            raise ConfigurationError(
                "--auth-issuer and --auth-audience go together: a token for another server must "
                "not be good here"
            )
        if self.auth_introspect:
            if not self.auth_issuer:
                raise ConfigurationError(
                    "--auth-introspect needs --auth-issuer URL, which clients need to get a token"
                )
            checked_url("--auth-introspect", self.auth_introspect)
        if self.auth_issuer and self.auth_audience:
            checked_url("--auth-issuer", self.auth_issuer)
            checked_url("--auth-audience", self.auth_audience.replace(SERVER, "server"))

    @property
    def asks_by(self) -> str | None:
        """The option by which each client needs a credential. None: there is none."""
        if self.api_keys:
            return "--api-keys"
        if self.auth_issuer:
            return "--auth-issuer"
        return "--auth" if self.auth else None

    def _allowed(self) -> Allowed:
        from mcp_sessions.authentication.allowing import Allowed
        from mcp_sessions.server.upstream.sdk.identity_providers import VERIFY_MAIL

        return Allowed(self.allow, verifies_mail=self.auth in VERIFY_MAIL)

    def authenticating(self) -> Callable[[str], Authentication | None]:
        """Return what makes the authentication of a server. It takes the server's name.

        Raises:
            ConfigurationError: The file of keys cannot be read, or the provider cannot be made.
        """
        keys = _keys_of(self.api_keys)
        tokens = self._tokens()
        if self.auth:
            return self._signing_in(self.auth, keys)

        def authentication_of(name: str) -> Authentication | None:
            if keys is None and tokens is None:
                return None
            from mcp_sessions.server.upstream.sdk import authentication

            verifiers: list[Verifier] = [keys] if keys is not None else []
            if tokens is None or self.auth_issuer is None or self.auth_audience is None:
                verifier = authentication.SdkVerifier(verifiers)
                return authentication.Authentication(verifier, self.auth_scope)
            audience = self.auth_audience.replace(SERVER, name)
            verifier = authentication.SdkVerifier([*verifiers, tokens(audience)])
            return authentication.resource_server(
                verifier, self.auth_issuer, audience, self.auth_scope
            )

        return authentication_of

    def _signing_in(
        self, name: str, keys: ApiKeys | None
    ) -> Callable[[str], Authentication | None]:
        from mcp_sessions.authentication.identity_service import IdentityService
        from mcp_sessions.server.upstream.sdk.identity_providers import provider_of

        service = IdentityService(time.monotonic)
        provider = provider_of(name, service=service)

        def authentication_of(_: str) -> Authentication | None:
            from mcp_sessions.server.upstream.sdk.identity_providers import provided

            made = provided(provider, name, self._allowed(), time.time, keys, service)
            return made.requiring(self.auth_scope)

        return authentication_of

    def _tokens(self) -> Callable[[str], Verifier] | None:
        """Return what makes a verifier of tokens for an audience. None: no token is accepted.

        Raises:
            ConfigurationError: The credential for the introspection endpoint is missing.
        """
        endpoint = self.introspection()
        if endpoint is not None:
            from mcp_sessions.authentication.tokens import Introspection

            issued_by = str(self.auth_issuer)
            return lambda audience: Introspection(endpoint, issued_by, audience, clock=time.time)
        issuer = self.issuer()
        if issuer is None:
            return None
        from mcp_sessions.authentication.tokens import Tokens

        return lambda audience: Tokens(issuer, audience, time.time)

    def introspection(self) -> IntrospectionEndpoint | None:
        if not self.auth_introspect:
            return None
        from mcp_sessions.authentication.tokens import IntrospectionEndpoint

        missing = [name for name in INTROSPECTION_VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(
                f"--auth-introspect: set {' and '.join(missing)}: the authorization server answers "
                "only clients that it knows"
            )
        client_id, secret = (os.environ[name] for name in INTROSPECTION_VARIABLES)
        return IntrospectionEndpoint(self.auth_introspect, client_id, secret)

    def issuer(self) -> Issuer | None:
        if not self.auth_issuer or self.auth_introspect:
            return None
        from mcp_sessions.authentication.issuer import Issuer

        return Issuer(self.auth_issuer, time.time)


def apart(auth: str, other: str) -> ConfigurationError:
    return ConfigurationError(f"--auth {auth} cannot be used with {other}")


def in_python(error: ConfigurationError) -> ConfigurationError:
    """Return the error with arguments of ``SessionLayer`` in place of options."""
    named = _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))
    return ConfigurationError(named)


def _keys_of(path: str | None) -> ApiKeys | None:
    if not path:
        return None
    from mcp_sessions.authentication.key_file import ApiKeys

    try:
        return ApiKeys(path, time.time)
    except ConfigurationError as failed:
        hint = ""
        if not os.path.lexists(path):
            hint = f"; make it with mcp-sessions keys add NAME --file {path}"
        raise ConfigurationError(f"--api-keys {failed}{hint}") from failed
