"""Make one of FastMCP's identity providers: ``serve --auth github``.

Each argument of a provider's class is a variable, such as ``FASTMCP_SERVER_AUTH_GITHUB_CLIENT_ID``.

Rules, owned by ``tests/cli/test_serve_with_providers.py``:

1. A missing part (the extra, a variable, the provider itself) is reported in one line, before
   anything runs.
2. The URL of the server (``BASE_URL``) is https, or of this machine.
3. No variable makes a provider weaker: users always see the page on which they consent.
4. Tokens of the provider for other servers are refused: what says which those are must be set.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions.authentication.identity_service import IdentityService
from mcp_sessions.authentication.issuer_addresses import checked_url
from mcp_sessions.errors import ConfigurationError

PROVIDERS: Final = {
    "auth0": ("providers.auth0", "Auth0Provider"),
    "authkit": ("providers.workos", "AuthKitProvider"),
    "aws": ("providers.aws", "AWSCognitoProvider"),
    "azure": ("providers.azure", "AzureProvider"),
    "clerk": ("providers.clerk", "ClerkProvider"),
    "descope": ("providers.descope", "DescopeProvider"),
    "discord": ("providers.discord", "DiscordProvider"),
    "github": ("providers.github", "GitHubProvider"),
    "google": ("providers.google", "GoogleProvider"),
    "huggingface": ("providers.huggingface", "HuggingFaceProvider"),
    "keycloak": ("providers.keycloak", "KeycloakAuthProvider"),
    "oci": ("providers.oci", "OCIProvider"),
    "oidc": ("oidc_proxy", "OIDCProxy"),
    "propelauth": ("providers.propelauth", "PropelAuthProvider"),
    "scalekit": ("providers.scalekit", "ScalekitProvider"),
    "supabase": ("providers.supabase", "SupabaseProvider"),
    "workos": ("providers.workos", "WorkOSProvider"),
}
"""The word of ``--auth`` → module and class in ``fastmcp.server.auth``."""

VERIFY_MAIL: Final = frozenset({"github"})
"""Providers that show only addresses of which they know that they belong to the user."""

_AUDIENCE: Final = {"keycloak": "audience", "propelauth": "resource"}
"""The argument without which a provider takes tokens that it issued for other servers."""

_WEAKER: Final = frozenset(
    {"require_authorization_consent", "ssrf_safe", "enable_cimd", "forward_pkce", "strict"}
)


def provider_of(
    name: str,
    environment: Mapping[str, str] = os.environ,
    service: IdentityService | None = None,
) -> Any:
    """Return FastMCP's ``AuthProvider`` of a name, made from its variables.

    Args:
        service: Notes whether the provider's own service answers its verifier.

    Raises:
        ConfigurationError: There is no such provider, FastMCP is not installed, or a variable is
            missing or wrong.
    """
    if name not in PROVIDERS:
        raise ConfigurationError(f"--auth {name}: must be one of {', '.join(PROVIDERS)}")
    made = _class_of(name)
    prefix = f"FASTMCP_SERVER_AUTH_{name.upper()}_"
    given, missing = dict[str, Any](), list[str]()
    for each in inspect.signature(made).parameters.values():
        variable = prefix + each.name.upper()
        read = _reader(each)
        if read is None or each.name in _WEAKER:
            continue
        if environment.get(variable):
            try:
                given[each.name] = read(environment[variable])
            except ValueError as wrong:
                raise ConfigurationError(f"--auth {name}: {variable}: {wrong}") from wrong
        elif each.default is each.empty or each.name == _AUDIENCE.get(name):
            missing.append(variable)
    if missing:
        raise ConfigurationError(f"--auth {name}: set {', '.join(missing)}")
    known = {prefix + each.upper() for each in given}
    unused = sorted({each for each in environment if each.startswith(prefix)} - known)
    if unused:
        raise ConfigurationError(f"--auth {name}: {unused[0]} sets nothing of this provider")
    for each in ("base_url", "resource_base_url", "issuer_url"):
        if each in given:
            checked_url(f"{prefix}{each.upper()}", given[each])
    client = service.client(given.get("timeout_seconds")) if service is not None else None
    try:
        provider = made(**given, **_taking(made, client))
    except Exception as failed:
        # The boundary to FastMCP, which may ask the provider for its configuration.
        said = " ".join(str(failed).split()) or type(failed).__name__
        raise ConfigurationError(f"--auth {name}: {said}") from failed
    verifier = verifier_of(provider)
    if getattr(verifier, "_http_client", client) is None:
        # The verifier takes a client, and its provider passes none on.
        verifier._http_client = client
    return provider


def verifier_of(provider: Any) -> Any:
    proxied = getattr(provider, "_token_validator", None)
    return proxied if proxied is not None else getattr(provider, "token_verifier", None)


def _taking(made: Any, client: Any) -> dict[str, Any]:
    parameters = inspect.signature(made).parameters
    if client is None:
        return {}
    if "http_client" in parameters:
        return {"http_client": client}
    if "token_introspection_overrides" in parameters:
        return {"token_introspection_overrides": {"http_client": client}}
    return {}


def _class_of(name: str) -> Any:
    from importlib import import_module

    module, attribute = PROVIDERS[name]
    try:
        return getattr(import_module(f"fastmcp.server.auth.{module}"), attribute)
    except ImportError as failed:
        raise ConfigurationError(
            f"--auth {name} needs FastMCP: pip install 'mcp-sessions[fastmcp]' ({failed})"
        ) from failed


def _reader(parameter: inspect.Parameter) -> Any | None:
    kind = str(parameter.annotation).replace("pydantic.networks.", "")
    kinds = {each.strip() for each in kind.split("|")} - {"None"}
    if "<class 'bool'>" in kinds or kinds == {"bool"}:
        return _flag
    if "list[str]" in kinds:
        return _words
    if kinds & {"int", "<class 'int'>"}:
        return int
    if kinds & {"str", "<class 'str'>"} or "AnyHttpUrl" in kind or kind.startswith("Literal["):
        return str
    return None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _flag(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() in ("1", "true")
