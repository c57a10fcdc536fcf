"""``serve --auth PROVIDER``: users sign in at a provider, by way of FastMCP's OAuth proxy."""

import inspect
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from mcp_sessions.authentication.allowing import Allowed
from mcp_sessions.authentication.credential import CannotVerify
from mcp_sessions.authentication.identity_service import IdentityService
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.server.upstream.sdk.identity_providers import (
    PROVIDERS,
    ProvidedVerifier,
    provider_of,
    verifier_of,
)
from tests.support.children import CHILD
from tests.support.issuers import Login, jwk
from tests.support.processes import free_port
from tests.support.serving import read_lines, serving
from tests.support.world import Clock

COMMAND = ("--lazy", "--", sys.executable, "-S", CHILD)
PREFIX = "FASTMCP_SERVER_AUTH_"
_FIELD = re.compile(r'name="(txn_id|csrf_token)" value="([^"]+)"')
CALLBACK = "http://127.0.0.1:1/callback"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the environment, and a folder of its own for what the proxy keeps."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("FASTMCP_HOME", str(tmp_path / "fastmcp"))
    monkeypatch.chdir(tmp_path)


class SignIn:
    """A provider where one user is signed in already, and consents to everything."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.user: dict[str, Any] = {"sub": "1", "email": "alice@example.com"}
        self.signed_in = 0

    def answer(self, path: str, query: dict[str, list[str]]) -> dict[str, Any] | str | None:
        """A document, or where to go. None: there is no such page."""
        match path:
            case "/.well-known/openid-configuration":
                return {
                    "issuer": self.url,
                    "authorization_endpoint": f"{self.url}/authorize",
                    "token_endpoint": f"{self.url}/token",
                    "jwks_uri": f"{self.url}/keys",
                    "response_types_supported": ["code"],
                    "subject_types_supported": ["public"],
                    "id_token_signing_alg_values_supported": ["ES256"],
                }
            case "/keys":
                return {"keys": [jwk("P-256", "one")]}
            case "/authorize":
                self.signed_in += 1
                back = {"code": "code", "state": query["state"][0]}
                return f"{query['redirect_uri'][0]}?{urlencode(back)}"
            case "/token":
                login = Login(Clock(time.time()))
                claims: dict[str, Any] = {
                    "iss": self.url,
                    "aud": "app",
                    "email_verified": True,
                    **self.user,
                }
                return {
                    "access_token": "opaque",
                    "id_token": login.token("P-256", **claims),
                    "token_type": "Bearer",
                    "expires_in": 300,
                    "scope": "openid",
                }
            case _:
                return None


@contextmanager
def signing_in() -> Generator[SignIn]:
    """A provider, in a thread, until the block ends."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            said = provider.answer(parts.path, parse_qs(parts.query))
            body = json.dumps(said).encode()
            self.send_response(302 if isinstance(said, str) else 200 if said else 404)
            if isinstance(said, str):
                self.send_header("Location", said)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        provider = SignIn(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """A user's browser, and what the client keeps."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None
        self.consents = 0
        self._back = ""

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info

    async def show(self, url: str) -> None:
        """Open the page to sign in, consent, and go wherever that leads."""
        async with httpx2.AsyncClient(timeout=20, trust_env=False) as http:
            answer = await http.get(url)
            for _ in range(10):
                if answer.status_code == 200:
                    fields = dict(_FIELD.findall(answer.text))
                    self.consents += 1
                    answer = await http.post(
                        str(answer.url), data={**fields, "submit": "true", "action": "approve"}
                    )
                    continue
                assert answer.is_redirect, answer.text
                url = str(answer.url.join(answer.headers["location"]))
                if url.startswith(CALLBACK):
                    self._back = url
                    return
                answer = await http.get(url)
        raise AssertionError("it leads nowhere")

    async def came_back(self) -> AuthorizationCodeResult:
        """The answer at the address to which the browser was sent."""
        query = {name: each for name, [each] in parse_qs(urlsplit(self._back).query).items()}
        return AuthorizationCodeResult(**query)


async def tools(url: str, browser: Browser) -> list[str]:
    """The tools that the stock client of the SDK sees."""
    auth = OAuthClientProvider(
        url,
        OAuthClientMetadata(client_name="stock", redirect_uris=[AnyUrl(CALLBACK)]),
        browser,
        browser.show,
        browser.came_back,
    )
    async with httpx2.AsyncClient(auth=auth, timeout=20, trust_env=False) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            return [tool.name for tool in (await client.list_tools()).tools]


async def test_a_stock_client_registers_and_its_user_signs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O: one command before an unmodified server. The client's registration and its token outlive
    the server.
    """
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with signing_in() as provider:
        for name, value in {
            "CONFIG_URL": f"{provider.url}/.well-known/openid-configuration",
            "CLIENT_ID": "app",
            "CLIENT_SECRET": "a secret of the app that is long enough",
            "BASE_URL": base,
            "ALGORITHM": "ES256",
            "VERIFY_ID_TOKEN": "true",
            "REQUIRED_SCOPES": "openid",
        }.items():
            monkeypatch.setenv(f"{PREFIX}OIDC_{name}", value)
        lock = ("--auth", "oidc", "--allow", "*@example.com", "--port", str(port))
        browser = Browser()
        for _ in range(2):
            with serving(tmp_path, *lock, *COMMAND) as process:
                assert base in read_lines(process, 5)
                assert await tools(f"{base}/mcp", browser) == ["echo"]
                assert (provider.signed_in, browser.consents) == (1, 1)
        with serving(tmp_path, *lock, *COMMAND) as process:
            assert base in read_lines(process, 5)
            provider.user = {"sub": "2", "email": "mallory@other.com"}
            other = Browser()
            with pytest.raises(ExceptionGroup):
                await tools(f"{base}/mcp", other)
            assert other.tokens is not None
            answer = httpx2.post(
                f"{base}/mcp",
                json={},
                headers={"Authorization": f"Bearer {other.tokens.access_token}"},
                trust_env=False,
            )
            assert (answer.status_code, answer.json()["error"]) == (403, "access_denied")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--auth", "github"), "give --allow '*@example.com', --allow login:NAME"),
        (("--auth", "github", "--allow", "example.com"), "--allow example.com: must be"),
        (("--allow", "*"), "--allow needs --auth PROVIDER"),
        (("--auth", "", "--allow", "*"), "--auth is empty"),
        (("--auth", "gitlab", "--allow", "*"), "--auth gitlab: must be one of auth0, "),
        (
            ("--auth", "github", "--allow", "*"),
            "--auth github: set FASTMCP_SERVER_AUTH_GITHUB_CLIENT_ID, "
            "FASTMCP_SERVER_AUTH_GITHUB_CLIENT_SECRET, FASTMCP_SERVER_AUTH_GITHUB_BASE_URL",
        ),
        (
            ("--auth", "github", "--allow", "*", "--no-auth"),
            "--auth asks for a credential; leave out one of them",
        ),
        (
            (
                *("--auth", "github", "--allow", "*", "--auth-issuer", "https://a"),
                *("--auth-audience", "https://a"),
            ),
            "--auth github cannot be used with --auth-issuer",
        ),
        (("--stdio", "--auth", "github", "--allow", "*"), "--auth: --stdio serves no HTTP"),
    ],
)
def test_a_start_with_weak_or_half_settings_is_refused_in_one_line(
    refused: Callable[..., str], arguments: tuple[str, ...], said: str
) -> None:
    """Every user of a public provider could else use the server."""
    assert said in refused("serve", *arguments, *COMMAND)


def test_with_a_file_of_servers_it_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "mcp.json").write_text("{}")
    given = ("--auth", "github", "--allow", "*", "--config", "mcp.json")
    assert "--auth github cannot be used with --config" in refused("serve", *given)


GITHUB = {
    f"{PREFIX}GITHUB_CLIENT_ID": "id",
    f"{PREFIX}GITHUB_CLIENT_SECRET": "a secret of the app that is long enough",
    f"{PREFIX}GITHUB_BASE_URL": "https://mcp.example.com",
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"BASE_URL": "http://mcp.example.com"}, "GITHUB_BASE_URL: must be an https URL"),
        ({"TIMEOUT_SECONDS": "soon"}, "GITHUB_TIMEOUT_SECONDS: invalid literal"),
        ({"CLIENT_NAME": "x"}, "GITHUB_CLIENT_NAME sets nothing of this provider"),
        (
            {"REQUIRE_AUTHORIZATION_CONSENT": "false"},
            "GITHUB_REQUIRE_AUTHORIZATION_CONSENT sets nothing of this provider",
        ),
    ],
)
def test_a_variable_that_is_wrong_is_named(more: dict[str, str], said: str) -> None:
    given = {**GITHUB, **{f"{PREFIX}GITHUB_{name}": value for name, value in more.items()}}
    with pytest.raises(ConfigurationError, match=said):
        provider_of("github", given)


@pytest.mark.parametrize("name", ["STRICT", "ENABLE_CIMD", "REQUIRE_AUTHORIZATION_CONSENT"])
def test_what_makes_a_provider_weaker_has_no_variable(name: str) -> None:
    given = {
        f"{PREFIX}OIDC_{each}": "https://mcp.example.com"
        for each in ("CONFIG_URL", "CLIENT_ID", "CLIENT_SECRET", "BASE_URL")
    }
    with pytest.raises(ConfigurationError, match=f"OIDC_{name} sets nothing of this provider"):
        provider_of("oidc", {**given, f"{PREFIX}OIDC_{name}": "false"})


def test_the_variables_of_a_provider_become_its_arguments() -> None:
    more = {f"{PREFIX}GITHUB_REQUIRED_SCOPES": "user, repo", f"{PREFIX}GITHUB_TIMEOUT_SECONDS": "3"}
    made = provider_of("github", {**GITHUB, **more})
    assert made.required_scopes == ["user", "repo"]
    assert str(made.base_url) == "https://mcp.example.com/"


@pytest.mark.parametrize("name", PROVIDERS)
def test_each_provider_is_there_and_names_what_it_needs(name: str) -> None:
    """With the FastMCP that is installed: a provider may have moved."""
    with pytest.raises(ConfigurationError) as missing:
        provider_of(name, {})
    said = str(missing.value)
    assert f"set {PREFIX}{name.upper()}_" in said or name in ("descope", "scalekit")
    assert "pip install" not in said


OFFLINE = {name: each for name, each in PROVIDERS.items() if name != "aws"}
"""The provider for AWS asks Amazon for its configuration. It is a subclass of ``oidc``."""

VALUES = {
    "CLIENT_SECRET": "a secret of the app that is long enough",
    "BASE_URL": "https://mcp.example.com",
    "REQUIRED_SCOPES": "use",
    "PROJECT_ID": "P1",
    "DOMAIN": "example.com",
    "AUTHKIT_DOMAIN": "https://example.com",
    **{
        f"{each}_URL": "https://example.com" for each in ("AUTH", "ENVIRONMENT", "REALM", "PROJECT")
    },
    "DESCOPE_BASE_URL": "https://example.com",
}


@pytest.mark.parametrize("name", OFFLINE)
def test_each_verifier_asks_by_the_client_that_notes_failures(name: str) -> None:
    """With the FastMCP that is installed: else a good token is refused while the provider is away,
    and each check takes 50 ms to make a client.
    """
    module, made = OFFLINE[name]
    provider_class = getattr(import_module(f"fastmcp.server.auth.{module}"), made)
    given = dict[str, str]()
    with signing_in() as provider:
        known = {**VALUES, "CONFIG_URL": f"{provider.url}/.well-known/openid-configuration"}
        if name == "descope":
            del known["CONFIG_URL"]
        for each in inspect.signature(provider_class).parameters.values():
            needed = each.default is each.empty or each.name in ("resource", "audience")
            value = known.get(each.name.upper(), "x" if needed else "")
            if value and each.name != "resource_id":
                given[f"{PREFIX}{name.upper()}_{each.name.upper()}"] = value
        if name == "scalekit":
            given[f"{PREFIX}SCALEKIT_RESOURCE_ID"] = "x"
        service = IdentityService(time.monotonic)
        verifier = verifier_of(provider_of(name, given, service))
    assert type(verifier._http_client).__name__ == "NotingClient"


async def test_a_service_that_is_away_is_no_reason_to_refuse_a_token() -> None:
    """Of a provider that asks about each token, and of one that fetches keys."""
    with socket.socket() as nothing:
        nothing.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nothing.getsockname()[1]}"
        asked = {
            "propelauth": {
                "AUTH_URL": url,
                "INTROSPECTION_CLIENT_ID": "id",
                "INTROSPECTION_CLIENT_SECRET": "secret",
                "RESOURCE": "https://mcp.example.com/mcp",
            },
            "keycloak": {"REALM_URL": url, "AUDIENCE": "https://mcp.example.com/mcp"},
        }
        token = Login(Clock(time.time())).token("RSA", iss=url)
        for name, values in asked.items():
            given = {
                f"{PREFIX}{name.upper()}_{variable}": value
                for variable, value in {**values, "BASE_URL": "https://mcp.example.com"}.items()
            }
            clock = Clock()
            service = IdentityService(clock)
            provider = provider_of(name, given, service)
            allowed = Allowed(["*"], verifies_mail=True)
            verifier = ProvidedVerifier(provider, name, allowed, clock=clock, service=service)
            # FastMCP fetches keys once in half a minute, and refuses in between.
            for _ in range(3):
                with pytest.raises(CannotVerify):
                    await verifier.verify_token(token)
            await verifier_of(provider)._http_client.aclose()


@pytest.mark.parametrize(
    ("name", "variable"), [("keycloak", "AUDIENCE"), ("propelauth", "RESOURCE")]
)
def test_a_provider_must_know_which_tokens_are_for_this_server(name: str, variable: str) -> None:
    """Otherwise a token of another application of that provider would be good here."""
    with pytest.raises(ConfigurationError, match=f"{PREFIX}{name.upper()}_{variable}"):
        provider_of(name, {})


def test_without_fastmcp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastmcp.server.auth.providers.github", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'mcp-sessions\[fastmcp\]'"):
        provider_of("github", GITHUB)
