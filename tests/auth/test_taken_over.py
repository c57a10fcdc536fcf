"""Authentication is taken over, never dropped.

"What ``MCPServer.streamable_http_app()`` and FastMCP's ``http_app()`` set up … is
there in ``layer.asgi_app()``. What cannot be taken over makes it refuse to start, naming it: it
never serves openly what was closed."
"""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import fastmcp
import pytest
from fastmcp.server.auth import require_scopes
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from fastmcp.server.dependencies import get_access_token, get_http_headers, get_http_request
from mcp.server import MCPServer, Server
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import ClientRegistrationOptions, RevocationOptions
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from mcp_sessions import SessionLayer
from mcp_sessions.errors import ConfigurationError
from tests.support.identities import Verifier, auth_settings, guarded_server
from tests.support.modern import MODERN, BearerCarrier, ModernClient, envelope
from tests.support.raw import (
    NEWEST,
    AsgiCarrier,
    Json,
    RawClient,
    Reply,
    in_process,
    initialize_params,
    text_of,
)
from tests.support.virtual_time import cycles
from tests.support.world import Gate

Kind = Literal["verifier", "provider", "open", "fastmcp verifier", "fastmcp provider", "fastmcp"]
KINDS: tuple[Kind, ...] = (
    "verifier",
    "provider",
    "open",
    "fastmcp verifier",
    "fastmcp provider",
    "fastmcp",
)
CLOSED: tuple[Kind, ...] = ("verifier", "provider", "fastmcp verifier", "fastmcp provider")


@pytest.fixture
def anyio_backend() -> str:
    """Real time: the bare applications use threads."""
    return "asyncio"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def make(kind: Kind) -> Any:
    """A fresh server of that kind; it knows the tokens ``good`` and ``other scope``."""
    match kind:
        case "verifier":
            verifier = Verifier()
            verifier.add("good", "alice", "use", "more")
            verifier.add("other scope", "alice", "other")
            server: Any = guarded_server(verifier)[0]
        case "provider":
            server = guarded_server(
                Verifier(),
                token_verifier=None,
                auth_server_provider=_provider(),
                auth=auth_settings(
                    client_registration_options=ClientRegistrationOptions(
                        enabled=True, valid_scopes=["use"], default_scopes=["use"]
                    ),
                    revocation_options=RevocationOptions(enabled=True),
                ),
            )[0]
        case "open":
            server = MCPServer[Any]("open")
        case "fastmcp verifier":
            tokens: dict[str, dict[str, Any]] = {
                "good": {"client_id": "client", "scopes": ["use", "more"], "sub": "alice"},
                "other scope": {"client_id": "client", "scopes": ["other"], "sub": "alice"},
            }
            server = fastmcp.FastMCP[Any](
                "guarded", auth=StaticTokenVerifier(tokens, required_scopes=["use"])
            )
        case "fastmcp provider":
            server = fastmcp.FastMCP[Any]("guarded", auth=_provider())
        case "fastmcp":
            server = fastmcp.FastMCP[Any]("open")

    async def health(request: Request) -> Response:
        return JSONResponse({"user": str(request.scope.get("user") is not None)})

    async def hook(request: Request) -> Response:
        return PlainTextResponse((await request.body()).decode()[::-1], status_code=201)

    server.custom_route("/health", methods=["GET"])(health)
    server.custom_route("/hook/{name}", methods=["POST"], name="hook")(hook)
    return server


def _provider() -> InMemoryOAuthProvider:
    provider = InMemoryOAuthProvider(
        base_url="https://server.example",
        required_scopes=["use"],
        client_registration_options=ClientRegistrationOptions(
            enabled=True, valid_scopes=["use"], default_scopes=["use"]
        ),
        revocation_options=RevocationOptions(enabled=True),
    )
    for token, scopes in (("good", ["use", "more"]), ("other scope", ["other"])):
        provider.access_tokens[token] = AccessToken(
            token=token, client_id="client", scopes=scopes, subject="alice"
        )
    return provider


def bare_app(server: Any) -> Starlette:
    """The server's own HTTP application."""
    if isinstance(server, fastmcp.FastMCP):
        return server.http_app(path="/mcp")
    app: Starlette = server.streamable_http_app()
    return app


@asynccontextmanager
async def bare(kind: Kind) -> AsyncGenerator[AsgiCarrier]:
    app = bare_app(make(kind))
    async with app.router.lifespan_context(app), in_process(app) as carrier:
        yield carrier


@asynccontextmanager
async def wrapped(kind: Kind) -> AsyncGenerator[AsgiCarrier]:
    layer = SessionLayer(make(kind))
    app = layer.asgi_app()
    async with layer.lifespan(), in_process(app) as carrier:
        yield carrier


@asynccontextmanager
async def mounted(kind: Kind) -> AsyncGenerator[AsgiCarrier]:
    layer = SessionLayer(make(kind))
    app = Starlette(routes=layer.routes(), lifespan=layer.lifespan)
    async with app.router.lifespan_context(app), in_process(app) as carrier:
        yield carrier


# --- the same routes -----------------------------------------------------------------------


def table(routes: list[BaseRoute]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Kind, path and methods of each route, but for the methods of the MCP endpoint."""
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for route in routes:
        if isinstance(route, Route):
            methods = () if route.path == "/mcp" else tuple(sorted(route.methods or ()))
            rows.append(("route", route.path, methods))
        elif isinstance(route, Mount):
            rows.append(("mount", route.path, ()))
    return rows


async def test_the_routes_are_the_servers_own(kind: Kind) -> None:
    """OAuth, protected-resource metadata, custom routes: each is there, in the same order. The
    endpoint's path with a slash at its end follows.
    """
    expected = table(list(bare_app(make(kind)).routes))
    assert ("route", "/health", ("GET", "HEAD")) in expected
    assert len(expected) > (3 if kind in CLOSED else 2) - ("verifier" in kind)

    assert table(SessionLayer(make(kind)).routes())[: len(expected)] == expected


# --- the same answers ----------------------------------------------------------------------


def requests() -> list[tuple[str, str, list[tuple[str, str]], bytes]]:
    """Requests to every route, with every credential, and to the endpoint in both eras."""
    host = ("Host", "127.0.0.1:8000")
    form = ("Content-Type", "application/x-www-form-urlencoded")
    as_json = ("Content-Type", "application/json")
    accept = ("Accept", "application/json, text/event-stream")
    client = json.dumps(
        {"redirect_uris": ["https://client.example/back"], "scope": "nonsense"}
    ).encode()
    rows: list[tuple[str, str, list[tuple[str, str]], bytes]] = [
        ("GET", "/health", [host], b""),
        ("HEAD", "/health", [host], b""),
        ("POST", "/health", [host], b""),
        ("POST", "/hook/x", [host], b"abc"),
        ("GET", "/nowhere", [host], b""),
        ("GET", "/.well-known/oauth-protected-resource", [host], b""),
        ("GET", "/.well-known/oauth-protected-resource/mcp", [host], b""),
        ("OPTIONS", "/.well-known/oauth-protected-resource/mcp", [host, ("Origin", "x")], b""),
        ("GET", "/.well-known/oauth-authorization-server", [host], b""),
        ("GET", "/authorize", [host], b""),
        ("POST", "/authorize", [host, form], b"client_id=unknown"),
        ("POST", "/token", [host, form], b"grant_type=authorization_code&client_id=unknown"),
        ("POST", "/register", [host, as_json], client),
        ("POST", "/register", [host, as_json], b"{"),
        ("POST", "/revoke", [host, form], b"token=good"),
    ]
    initialize = json.dumps(
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": initialize_params("x"),
        }
    ).encode()
    listing = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": envelope()}}
    ).encode()
    older = [host, accept, as_json, ("Mcp-Protocol-Version", NEWEST)]
    modern = [
        host,
        accept,
        as_json,
        ("Mcp-Protocol-Version", MODERN),
        ("Mcp-Method", "tools/list"),
    ]
    for credential in (
        None,
        "Bearer good",
        "bearer good",
        "Bearer other scope",
        "Bearer unknown",
        "Bearer ",
        "Bearer",
        "Basic Z29vZA==",
        "good",
    ):
        line = [("Authorization", credential)] if credential is not None else []
        rows += [("POST", "/mcp", [*modern, *line], listing)]
        rows += [("GET", "/mcp", [host, accept, ("Mcp-Session-Id", "x"), *line], b"")]
        if credential is None or "good" not in credential or credential == "good":
            # With a good one it would open a session, which is ours to describe.
            rows += [("POST", "/mcp", [*older, *line], initialize)]
            rows += [("DELETE", "/mcp", [*older, ("Mcp-Session-Id", "x"), *line], b"")]
    rows += [(method, "/mcp", [*older], b"{}") for method in ("PUT", "PATCH", "OPTIONS", "HEAD")]
    rows += [
        ("GET", "/mcp", [("Host", "evil.example"), accept], b""),
        ("POST", "/mcp", [("Host", "evil.example"), *modern[1:]], listing),
        ("POST", "/mcp", [*modern, ("Origin", "http://evil.example")], listing),
        ("GET", "/health", [("Host", "evil.example")], b""),
    ]
    return rows


def said(reply: Reply) -> tuple[Any, ...]:
    # The SDK gives even a refused GET a session id.
    unsteady = {"date", "content-length", "mcp-session-id"}
    headers = sorted((n, v) for n, v in reply.headers if n not in (*unsteady, "allow"))
    # Starlette keeps the methods of a route in a set.
    headers += [(n, ", ".join(sorted(v.split(", ")))) for n, v in reply.headers if n == "allow"]
    # Our 404 also names the path that is served.
    body, _, more = bytes(reply.body).partition(b". This server speaks MCP at ")
    if more:
        headers = [(n, str(len(body)) if n == "content-length" else v) for n, v in headers]
    return reply.status, headers, body


@pytest.mark.parametrize("way", [wrapped, mounted], ids=lambda way: way.__name__)
async def test_the_answers_are_the_servers_own(kind: Kind, way: Any) -> None:
    """401 and 403 with their ``WWW-Authenticate``, metadata, registration, custom routes: what
    the bare application answers, in ``asgi_app()`` and in ``routes()``.
    """
    async with bare(kind) as one, way(kind) as other:
        for method, path, headers, body in requests():
            expected = await one.send(method, path, headers, body).done()
            answered = await other.send(method, path, headers, body).done()
            if b"initialize" in body and expected.status == 200:
                # A session opened: its id and its framing are our own.
                assert answered.status == 200
                continue
            assert said(answered) == said(expected), (method, path, headers)


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("way", [wrapped, mounted], ids=lambda way: way.__name__)
async def test_what_was_closed_is_closed(kind: Kind, way: Any) -> None:
    """Nothing of the endpoint answers without a credential that has the scopes: not a method of
    ours either.
    """
    async with way(kind) as carrier:
        requests_of_ours: list[tuple[str, Json]] = [
            ("session/start", {}),
            ("sessions/create", {}),
            ("session/resume", {"sessionId": "x"}),
            ("subscriptions/listen", {"notifications": {}}),
            ("tools/list", {}),
        ]
        for method, params in requests_of_ours:
            modern, older = ModernClient(carrier), RawClient(carrier)
            assert (await modern.send(method, params).done()).status == 401
            assert (await older.send(method, params).reply.done()).status == 401
            weak = ModernClient(BearerCarrier(carrier, "other scope"))
            assert (await weak.send(method, params).done()).status in (401, 403)
        started = await ModernClient(BearerCarrier(carrier, "good")).start()
        assert started["sessionId"]
        client = RawClient(BearerCarrier(carrier, "good"))
        await client.initialize()
        assert (await client.start())["sessionId"]


async def test_settings_for_host_and_origin_are_used() -> None:
    """Given by the application, for both eras and before anything else."""
    security = TransportSecuritySettings(
        allowed_hosts=["mcp.example"], allowed_origins=["https://app.example"]
    )
    layer = SessionLayer(MCPServer[Any]("open"))
    app = layer.asgi_app(host="0.0.0.0", security=security)
    async with layer.lifespan(), in_process(app) as carrier:
        for host, origin, status in (
            ("mcp.example", None, 200),
            ("mcp.example", "https://app.example", 200),
            ("mcp.example", "https://evil.example", 403),
            ("127.0.0.1:8000", None, 421),
        ):
            headers = {"Host": host, "Origin": origin}
            modern = ModernClient(carrier).send("tools/list", headers=headers)
            assert (await modern.done()).status == status
            older = RawClient(carrier).send("session/start", headers=headers)
            assert (await older.reply.done()).status == status


async def test_on_another_host_everybody_may_come_as_for_the_sdk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so, once."""
    layer = SessionLayer(MCPServer[Any]("open"))
    async with layer.lifespan(), in_process(layer.asgi_app(host="0.0.0.0")) as carrier:
        headers = {"Host": "anything.example", "Origin": "https://anything.example"}
        assert (
            await ModernClient(carrier).send("tools/list", headers=headers).done()
        ).status == 200
    assert caplog.text.count("nothing authenticates it") == 1


@pytest.mark.parametrize("named", [(), ("mcp.example",)])
def test_who_may_call_an_open_server_is_a_warning_where_others_than_this_machine_may(
    kind: Kind, named: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A name of its own is for clients on other machines. A server with authentication needs no
    warning.
    """
    security = TransportSecuritySettings(allowed_hosts=["localhost:*", *named])
    layer = SessionLayer(make(kind))
    layer.asgi_app(security=security)

    assert layer.authenticates == (kind in CLOSED)
    warned = "nothing authenticates it" in caplog.text
    assert warned == (bool(named) and kind not in CLOSED)


async def test_the_path_is_the_applications_choice() -> None:
    """Metadata and endpoint go along with it."""
    verifier = Verifier()
    verifier.add("good", "alice")
    layer = SessionLayer(guarded_server(verifier)[0])
    async with layer.lifespan(), in_process(layer.asgi_app("/v1/tools")) as carrier:
        good = ModernClient(BearerCarrier(carrier, "good"), path="/v1/tools")
        assert (await good.start())["sessionId"]
        assert (
            await ModernClient(carrier, path="/v1/tools").send("tools/list").done()
        ).status == 401
        assert (await ModernClient(BearerCarrier(carrier, "good")).send("x").done()).status == 404


# --- what cannot be taken over -------------------------------------------------------------


@dataclass
class _Closure:
    """Guards an endpoint that nobody can get at."""

    guarded: Any

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class _Other(MCPServer[Any]):
    """A server whose own application puts its endpoint where nobody finds it."""

    how: str = ""

    def streamable_http_app(self, **options: Any) -> Starlette:
        app = super().streamable_http_app(**options)
        endpoint: Any = app.routes[0]
        assert isinstance(endpoint, Route)

        async def guarded(request: Request) -> Response:
            return PlainTextResponse("closed", status_code=401)

        match self.how:
            case "function":
                app.router.routes[0] = Route("/mcp", guarded)
            case "mount":
                app.router.routes[0] = Mount("/mcp", app=endpoint.app)
            case "other path":
                app.router.routes[0] = Route("/elsewhere", endpoint.endpoint)
            case _:
                app.router.routes.clear()
        return app


class _FastOther(fastmcp.FastMCP[Any]):
    def http_app(self, *args: Any, **options: Any) -> Any:
        app = super().http_app(*args, **options)
        endpoint: Any = app.router.routes[0]
        app.router.routes[:] = [Mount("/", app=endpoint.app)]
        return app


@pytest.mark.parametrize("how", ["function", "mount", "other path", "none"])
@pytest.mark.parametrize("way", ["asgi_app", "routes", "run"])
async def test_what_cannot_be_taken_over_is_not_served(how: str, way: str) -> None:
    """Rule: "makes it refuse to start, naming it"."""
    server = _Other("closed")
    server.how = how
    layer = SessionLayer(server)
    with pytest.raises(ConfigurationError, match="authentication"):
        getattr(layer, way)()


async def test_fastmcps_endpoint_must_be_found_too() -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        SessionLayer(_FastOther("closed")).asgi_app()


# --- FastMCP -------------------------------------------------------------------------------


@dataclass
class Fast:
    """A FastMCP server with authentication, wrapped and running."""

    carrier: AsgiCarrier
    gates: dict[str, Gate]
    notified: list[str]


@asynccontextmanager
async def fast() -> AsyncGenerator[Fast]:
    tokens: dict[str, dict[str, Any]] = {
        user: {"client_id": "client", "scopes": ["use", *more], "sub": user}
        for user, more in (("alice", ["admin"]), ("bob", []))
    }
    server: fastmcp.FastMCP[Any] = fastmcp.FastMCP(
        "guarded", auth=StaticTokenVerifier(tokens, required_scopes=["use"])
    )
    gates: dict[str, Gate] = {}
    notified: list[str] = []

    def caller() -> str:
        request, token = get_http_request(), get_access_token()
        headers = get_http_headers(include_all=True)
        assert headers["x-mine"] == request.headers["x-mine"]
        return f"{token.subject if token else None} {headers['x-mine']} {request.url.path}"

    @server.tool
    async def whoami() -> str:
        return caller()

    @server.tool
    async def wait(gate: str) -> str:
        await gates.setdefault(gate, Gate()).arrive()
        notified.append(caller())
        return notified[-1]

    @server.tool(auth=require_scopes("admin"))
    async def secret() -> str:
        return "secret"

    del whoami, wait, secret
    layer = SessionLayer(server)
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        yield Fast(carrier, gates, notified)


def _mine(value: str) -> dict[str, str | None]:
    return {"X-Mine": value}


async def test_fastmcps_request_and_token_are_there_in_handlers() -> None:
    """Promised: "``get_access_token()`` and FastMCP's ``get_http_request()`` work in handlers", in
    both eras, in a session and without, and in a keyed one that outlives its stream.
    """
    async with fast() as server:
        for user in ("alice", "bob"):
            carrier = BearerCarrier(server.carrier, user)
            client, older = ModernClient(carrier), RawClient(carrier)
            await older.initialize()
            session = (await client.start())["sessionId"]
            for named in (None, session):
                seen = await client.text("whoami", session=named, headers=_mine("1"))
                assert seen == f"{user} 1 /mcp"
            called = older.send("tools/call", {"name": "whoami"}, headers=_mine("2"))
            assert text_of(await called.result()) == f"{user} 2 /mcp"

            call = client.call("wait", {"gate": user}, session=session, key="k", headers=_mine("3"))
            gate = server.gates.setdefault(user, Gate())
            await gate.started.wait()
            await call.gone()
            again = client.call(
                "wait", {"gate": user}, session=session, key="k", headers=_mine("4")
            )
            await cycles()
            gate.go.set()
            # The request that it was called with.
            assert text_of(await again.result()) == f"{user} 3 /mcp"


async def test_fastmcps_own_authorization_is_asked_for_each_caller() -> None:
    """A tool that is for some is listed to them and served to them only."""
    async with fast() as server:
        for user, may in (("alice", True), ("bob", False)):
            carrier = BearerCarrier(server.carrier, user)
            client, older = ModernClient(carrier), RawClient(carrier)
            await older.initialize()
            session = (await client.start())["sessionId"]
            listings = [
                await client.send("tools/list").result(),
                await client.send("tools/list", session=session).result(),
                await older.result("tools/list"),
            ]
            for listing in listings:
                assert ("secret" in [tool["name"] for tool in listing["tools"]]) is may
            answers = [
                await client.call("secret").answer(),
                await client.call("secret", session=session).answer(),
                await older.call("secret").answer(),
            ]
            for answer in answers:
                result: Json = answer.get("result") or {"isError": True}
                assert (not result.get("isError", False)) is may


async def test_fastmcps_guard_stands_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Host and Origin middleware, in its own words, if it was asked for."""
    monkeypatch.setattr(fastmcp.settings, "http_host_origin_protection", "auto")
    async with wrapped("fastmcp verifier") as carrier, bare("fastmcp verifier") as other:
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            replies = [
                await ModernClient(BearerCarrier(c, "good"))
                .send("tools/list", headers=headers)
                .done()
                for c in (carrier, other)
            ]
            assert said(replies[0].reply) == said(replies[1].reply)
            assert replies[0].status in (403, 421)


# --- what is no server with authentication -------------------------------------------------


@pytest.mark.parametrize(
    "make_one", [lambda: Server[Any]("open"), lambda: MCPServer[Any]("open")], ids=["low", "mcp"]
)
async def test_without_authentication_everyone_is_one_principal(
    make_one: Callable[[], Any],
) -> None:
    """Rule: "Without authentication everyone is one principal and the id is the credential": an
    ``Authorization`` header changes nothing.
    """
    layer = SessionLayer(make_one())
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        session = (await ModernClient(BearerCarrier(carrier, "x")).start())["sessionId"]
        resumed = await ModernClient(BearerCarrier(carrier, "y")).resume(session)
        assert resumed["resumed"] is True
        [info] = await layer.sessions.list()
        assert (info.principal.client_id, info.principal.subject) == (None, None)


def test_a_closed_server_says_where_to_get_a_credential() -> None:
    """The metadata URL of ``WWW-Authenticate`` is one that the application serves."""
    layer = SessionLayer(make("verifier"))
    paths = [route.path for route in layer.routes() if isinstance(route, Route)]
    assert AnyHttpUrl("https://server.example/.well-known/oauth-protected-resource/mcp").path in (
        paths
    )
