"""Authentication before a server that has none: what is asked for, and how it is refused."""

import asyncio
import base64
import cProfile
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from fastmcp import FastMCP
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from mcp.server import MCPServer, Server
from mcp.server.auth.settings import (
    AuthSettings,
    ClientRegistrationOptions,
    RevocationOptions,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer, SessionPolicy, metrics
from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.authentication.key_file import ApiKeys, change, minted
from mcp_sessions.cli.logs import extra_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.sdk.authentication import (
    LONGEST,
    MADE,
    Authentication,
    SdkVerifier,
    TokenVerifier,
)
from tests.support.children import child, children_of
from tests.support.duplex import listening, websocket
from tests.support.identities import Verifier, auth_settings
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import AsgiCarrier, Carrier, RawClient, Reply, SocketCarrier, in_process

METADATA = "https://server.example/.well-known/oauth-protected-resource/mcp"
ACCEPTED = [("Accept", "application/json, text/event-stream"), ("Content-Type", "application/json")]


@pytest.fixture
def anyio_backend() -> str:
    """Real time, since processes run."""
    return "asyncio"


def verifier() -> Verifier:
    """Knows two users, and a token with another scope."""
    known = Verifier()
    known.add("alice", "alice")
    known.add("bob", "bob")
    known.add("other scope", "alice", "other")
    return known


KINDS: dict[str, Callable[[], object]] = {
    "command": child,
    "server": lambda: MCPServer[Any]("open"),
    "lowlevel": lambda: Server[Any]("open"),
    "fastmcp": lambda: FastMCP[Any]("open"),
}


@asynccontextmanager
async def serving(
    server: Any, known: TokenVerifier | None = None, **options: Any
) -> AsyncGenerator[tuple[AsgiCarrier, SessionLayer]]:
    layer = SessionLayer(
        server, auth=auth_settings(), token_verifier=known or verifier(), **options
    )
    app = layer.asgi_app(host="0.0.0.0")
    async with layer.lifespan(), in_process(app) as carrier:
        yield carrier, layer


async def ask(
    carrier: Carrier, method: str = "POST", path: str = "/mcp", token: str | None = None
) -> Reply:
    fields = [*ACCEPTED, ("Host", "server.example")]
    if token is not None:
        fields.append(("Authorization", f"Bearer {token}"))
    return await carrier.send(method, path, fields, b"{}" if method == "POST" else b"").done()


def header(reply: Reply, name: str) -> str:
    return dict(reply.headers).get(name, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_without_a_good_token_nothing_of_the_server_is_reached(
    kind: str, method: str
) -> None:
    """RFC 6750, 3 and RFC 9728, 5.1: the answer says where a token is to be had."""
    async with serving(KINDS[kind]()) as (carrier, _):
        for token in (None, "wrong", ""):
            for path in ("/mcp", "/mcp/"):
                refused = await ask(carrier, method, path, token)
                assert refused.status == 401
                said = header(refused, "www-authenticate")
                assert said.startswith("Bearer ") and f'resource_metadata="{METADATA}"' in said
                assert 'error="invalid_token"' in said
        refused = await ask(carrier, method, "/mcp", "other scope")
        assert refused.status == 403
        said = header(refused, "www-authenticate")
        assert 'error="insufficient_scope"' in said and METADATA in said


@pytest.mark.parametrize("kind", KINDS)
async def test_with_a_good_token_both_eras_are_served(kind: str) -> None:
    async with serving(KINDS[kind]()) as (carrier, layer):
        older = RawClient(BearerCarrier(carrier, "alice"))
        await older.initialize()
        session = (await older.start())["sessionId"]
        started = await ModernClient(BearerCarrier(carrier, "bob")).start()
        assert started["sessionId"] != session
        assert layer.authenticates
        owners = {info.principal.subject for info in await layer.sessions.list()}
        assert {"alice", "bob"} <= owners


async def test_no_process_is_started_for_a_client_without_a_token() -> None:
    async with serving(child(try_at_start=False)) as (carrier, _):
        before = children_of(os.getpid())
        for token in (None, "wrong", "other scope"):
            await ask(carrier, "POST", "/mcp", token)
        assert children_of(os.getpid()) == before


async def test_the_metadata_needs_no_token() -> None:
    """RFC 9728, 3: a client finds the authorization server there."""
    async with serving(child()) as (carrier, _):
        found = await ask(carrier, "GET", "/.well-known/oauth-protected-resource/mcp")
        assert found.status == 200
        value = json.loads(found.body)
        assert value["resource"] == "https://server.example/mcp"
        assert value["authorization_servers"] == ["https://issuer.example/"]
        assert value["scopes_supported"] == ["use"]
        assert value["bearer_methods_supported"] == ["header"]


def own() -> MCPServer[Any]:
    """A server with authentication of its own, and a page of its own."""
    server = MCPServer[Any]("own", auth=auth_settings(), token_verifier=verifier())

    @server.custom_route("/page", methods=["GET"])
    async def page(request: Request) -> Response:
        return PlainTextResponse(request.query_params.get("x", ""))

    assert page is not None
    return server


@pytest.mark.parametrize("is_mounted", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
async def test_the_metadata_with_a_slash_behind_it_is_no_redirect(
    is_mounted: bool, has_own: bool
) -> None:
    """A proxy that ends TLS may not say so. The client was then sent to ``http``."""
    options: dict[str, Any] = {"auth": auth_settings(), "token_verifier": verifier()}
    layer = SessionLayer(own()) if has_own else SessionLayer(child(), **options)
    app = Starlette(routes=layer.routes()) if is_mounted else layer.asgi_app()
    async with layer.lifespan(), in_process(app) as carrier:
        path = "/.well-known/oauth-protected-resource/mcp"
        bare, other = await ask(carrier, "GET", path), await ask(carrier, "GET", f"{path}/")
        assert (other.status, bytes(other.body)) == (bare.status, bytes(bare.body))
        assert bare.status == 200


@pytest.mark.parametrize("root", ["", "/api"])
async def test_a_redirect_stays_at_the_scheme_and_the_host_of_the_client(root: str) -> None:
    layer = SessionLayer(own())
    app: ASGIApp = layer.asgi_app()
    if root:
        app = Starlette(routes=[Mount(root, app=app)])
    async with layer.lifespan(), listening(app) as port:
        carrier = SocketCarrier("127.0.0.1", port)
        found = await ask(carrier, "GET", f"{root}/page/?x=1&y=%2F")
        assert (found.status, header(found, "location")) == (307, f"{root}/page?x=1&y=%2F")
        for nowhere in ("/none/", "//page", "/mcp/more"):
            assert (await ask(carrier, "GET", root + nowhere)).status == 404


@pytest.mark.parametrize("token", [None, "alice", "wrong"])
async def test_a_token_in_the_query_string_is_refused(token: str | None) -> None:
    """It gets into logs and histories, so also next to one in the header."""
    layer = SessionLayer(child(), auth=auth_settings(), token_verifier=verifier())
    async with layer.lifespan(), listening(layer.asgi_app()) as port:
        carrier = SocketCarrier("127.0.0.1", port)
        for path in ("/mcp?access_token=alice", "/mcp?a=b&access_token="):
            refused = await ask(carrier, "POST", path, token)
            assert refused.status == 400
            assert 'error="invalid_request"' in header(refused, "www-authenticate")


async def test_a_token_of_a_megabyte_is_refused_before_it_is_looked_at() -> None:
    known = verifier()
    async with serving(child(), known) as (carrier, _):
        assert (await ask(carrier, token="x" * 1_000_000)).status == 401
        assert (await ask(carrier, token="x" * LONGEST)).status == 401
        assert known.asked == 0


class Away:
    """A verifier that cannot say, until it can."""

    def __init__(self) -> None:
        self.is_away = True

    async def verify(self, token: str) -> Credential | None:
        if self.is_away:
            raise CannotVerify(7.2)
        return Credential("client", "https://issuer.example", "alice", ("use",), None)


async def test_what_cannot_be_verified_for_now_is_no_bad_token() -> None:
    """503 and not 401, after which a client would throw its token away."""
    away = Away()
    async with serving(child(), SdkVerifier([away])) as (carrier, _):
        refused = await ask(carrier, token="alice")
        assert (refused.status, header(refused, "retry-after")) == (503, "8")
        away.is_away = False
        await RawClient(BearerCarrier(carrier, "alice")).initialize()


async def test_each_denial_is_counted_and_a_record_of_the_audit_without_the_token(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason, and the user if the token is good and lacks a scope."""
    counted: list[str] = []
    monkeypatch.setattr(metrics, "denied", counted.append)
    caplog.set_level(logging.INFO, "mcp_sessions.audit")
    away = Away()
    layer = SessionLayer(child(), auth=auth_settings(), token_verifier=verifier())
    unsure = SessionLayer(child(), auth=auth_settings(), token_verifier=SdkVerifier([away]))
    async with (
        layer.lifespan(),
        listening(layer.asgi_app()) as port,
        unsure.lifespan(),
        in_process(unsure.asgi_app()) as other,
    ):
        carrier = SocketCarrier("127.0.0.1", port)
        await ask(carrier)
        await ask(carrier, token="secret-1")
        await ask(carrier, token="other scope")
        await ask(carrier, path="/mcp?access_token=secret-2")
        await ask(other, token="secret-3")
        with pytest.raises(InvalidStatus):
            async with websocket(f"ws://127.0.0.1:{port}/mcp"):
                pass
        await RawClient(BearerCarrier(carrier, "alice")).initialize()
    found = [extra_of(each) for each in caplog.records if each.name == "mcp_sessions.audit"]
    denials = [each for each in found if each.get("event.name") == "mcp_sessions.denied"]
    assert counted == [each["error.type"] for each in denials]
    assert counted == [
        "no_token",
        "bad_token",
        "insufficient_scope",
        "token_in_query",
        "unavailable",
        "no_token",
    ]
    assert [each.get("client.address") for each in denials[:4]] == ["127.0.0.1"] * 4
    assert ["enduser.pseudo.id" in each for each in denials] == [False] * 2 + [True] + [False] * 3
    assert "secret" not in str(found)


async def test_a_websocket_is_refused_and_served_as_http_is() -> None:
    known = verifier()
    layer = SessionLayer(
        child(),
        auth=auth_settings(),
        token_verifier=known,
        policy=SessionPolicy(credential_check=0.05),
    )
    async with layer.lifespan(), listening(layer.asgi_app()) as port:
        url = f"ws://127.0.0.1:{port}/mcp"
        for token, query, status in (
            (None, "", 401),
            ("wrong", "", 401),
            ("other scope", "", 403),
            ("alice", "?access_token=alice", 400),
        ):
            fields = {"Authorization": f"Bearer {token}"} if token is not None else {}
            with pytest.raises(InvalidStatus) as refused:
                async with websocket(url + query, headers=fields):
                    pass
            assert refused.value.response.status_code == status
            if status == 401:
                assert METADATA in refused.value.response.headers["WWW-Authenticate"]
        offered = "mcp.bearer." + base64.urlsafe_b64encode(b"bob").decode().rstrip("=")
        async with (
            websocket(url, headers={"Authorization": "Bearer alice"}) as first,
            websocket(url, subprotocols=("mcp", offered)) as second,
        ):
            await first.initialize()
            await second.initialize()
            del known.tokens["alice"]
            async with asyncio.timeout(10):
                await first.until(lambda: first.ended)
            assert not second.ended


async def test_a_revoked_key_ends_its_streams_and_no_others(tmp_path: Path) -> None:
    """O: they end within ``credential_check``."""
    path = str(tmp_path / "keys.json")
    keys: list[str] = []
    for name in ("alice", "bob"):
        key, entry = minted(name, [], 0, None)
        change(path, lambda known, new=entry: [*known, new])
        keys.append(key)
    now = [0.0]
    authentication = Authentication(SdkVerifier([ApiKeys(path, lambda: now[0])]))
    policy = SessionPolicy(credential_check=0.05)
    layer = SessionLayer(child(), auth=authentication, policy=policy)
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        streams: list[Reply] = []
        for key in keys:
            older = RawClient(BearerCarrier(carrier, key))
            await older.initialize()
            streams.append(await older.get().started())
            modern = ModernClient(BearerCarrier(carrier, key))
            session = (await modern.start())["sessionId"]
            streams.append((await modern.listening(session)).reply)
        change(path, lambda known: [each for each in known if each.name == "bob"])
        now[0] += 2
        async with asyncio.timeout(10):
            for stream in streams[:2]:
                await stream.done()
        assert not any(stream.ended for stream in streams[2:])
        assert (await ask(carrier, token=keys[0])).status == 401
        refused = await ask(carrier)
        assert header(refused, "www-authenticate").count("resource_metadata") == 0


async def test_a_command_of_each_principal_is_nobody_elses() -> None:
    """Two users behind one layer: neither's session is there for the other, and each has a process
    of its own.
    """
    async with serving(child(per="principal")) as (carrier, _):
        alice, bob = (ModernClient(BearerCarrier(carrier, name)) for name in ("alice", "bob"))
        session = (await alice.start())["sessionId"]
        theirs = (await bob.start())["sessionId"]
        refused = await bob.send("session/resume", {"sessionId": session}).error()
        unknown = await bob.send("session/resume", {"sessionId": "N" * 43}).error()
        assert refused["code"] == unknown["code"] == -32043
        processes = {
            await alice.text("pid", session=session),
            await bob.text("pid", session=theirs),
        }
        assert len(processes) == 2


async def test_it_goes_along_where_the_routes_are_mounted() -> None:
    layer = SessionLayer(child(), auth=auth_settings(), token_verifier=verifier())
    app = Starlette(routes=[Mount("/", routes=layer.routes())])
    async with layer.lifespan(), in_process(app) as carrier:
        assert (await ask(carrier)).status == 401
        found = await ask(carrier, "GET", "/.well-known/oauth-protected-resource/mcp")
        assert found.status == 200
        await RawClient(BearerCarrier(carrier, "alice")).initialize()


async def test_a_token_for_another_resource_is_refused_if_the_settings_say_so() -> None:
    """RFC 8707: the SDK's ``validate_token_resource``."""
    known = verifier()
    known.tokens["here"] = known.tokens["alice"].model_copy(
        update={"token": "here", "resource": "https://server.example/mcp"}
    )
    settings = auth_settings(validate_token_resource=True)
    layer = SessionLayer(child(), auth=settings, token_verifier=known)
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        assert (await ask(carrier, token="alice")).status == 401
        await RawClient(BearerCarrier(carrier, "here")).initialize()


async def test_a_verifier_that_fails_has_not_said_that_a_token_is_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of FastMCP do while their provider is away: the client keeps its token."""
    known = verifier()
    async with serving(child(), known) as (carrier, _):
        known.broken = True
        refused = await ask(carrier, token="alice")
        assert (refused.status, header(refused, "retry-after")) == (503, "5")
        assert "a token verifier failed: RuntimeError" in caplog.text
        known.broken = False
        await RawClient(BearerCarrier(carrier, "alice")).initialize()


async def test_a_verifier_of_fastmcp_fits() -> None:
    tokens: dict[str, dict[str, Any]] = {"good": {"client_id": "client", "scopes": ["use"]}}
    async with serving(child(), StaticTokenVerifier(tokens)) as (carrier, _):
        assert (await ask(carrier)).status == 401
        await RawClient(BearerCarrier(carrier, "good")).initialize()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"auth": auth_settings()}, "go together"),
        ({"token_verifier": Verifier()}, "go together"),
        (
            {
                "token_verifier": Verifier(),
                "auth": auth_settings(
                    client_registration_options=ClientRegistrationOptions(enabled=True)
                ),
            },
            "issues or revokes none",
        ),
        (
            {
                "token_verifier": Verifier(),
                "auth": auth_settings(revocation_options=RevocationOptions(enabled=True)),
            },
            "issues or revokes none",
        ),
    ],
)
def test_what_is_no_whole_setting_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SessionLayer(MCPServer[Any]("open"), **options)


def test_a_server_with_authentication_gets_no_second_one() -> None:
    """Its tokens are for the one in the header, of which there is one."""
    settings: AuthSettings = auth_settings()
    own = MCPServer[Any]("guarded", auth=settings, token_verifier=verifier())
    fast = FastMCP[Any]("guarded", auth=StaticTokenVerifier({}))
    for server in (own, fast):
        with pytest.raises(ConfigurationError, match="authentication of its own"):
            SessionLayer(server, auth=settings, token_verifier=verifier())


class Constant:
    """Returns the same credential for as long as it is good, as our verifiers do."""

    def __init__(self) -> None:
        self.credential: Credential | None = self.made()

    def made(self) -> Credential:
        """A credential like the one before."""
        return Credential("app", "https://issuer", "alice", ("use",), None)

    async def verify(self, token: str) -> Credential | None:
        """What every token stands for."""
        del token
        return self.credential


async def test_what_the_sdk_needs_of_a_token_is_made_once() -> None:
    ours = Constant()
    verifier = SdkVerifier([ours])
    first = await verifier.verify_token("one")
    assert first is not None and await verifier.verify_token("one") is first
    other = await verifier.verify_token("two")
    assert other is not None and other.token == "two"
    ours.credential = ours.made()
    again = await verifier.verify_token("two")
    assert again == other and again is not other, "it was verified again"
    ours.credential = None
    assert await verifier.verify_token("two") is None


async def test_what_is_kept_of_tokens_has_a_bound() -> None:
    ours = Constant()
    verifier = SdkVerifier([ours])
    first = await verifier.verify_token("first")
    before = ours.credential
    for number in range(MADE):
        ours.credential = ours.made()
        await verifier.verify_token(str(number))
    ours.credential = before
    again = await verifier.verify_token("first")
    assert again == first and again is not first


async def test_a_token_that_was_seen_before_takes_few_function_calls() -> None:
    """O: at most 15 % of a call. Time depends on the machine, and calls do not."""
    backend = Authentication(SdkVerifier([Constant()]))
    counted: list[int] = []

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        """Do nothing."""

    def denied(reason: str, address: str | None, principal: Principal) -> None:
        raise AssertionError(reason)

    app = backend.around(endpoint, denied)
    headers = [(b"host", b"here"), (b"authorization", b"Bearer " + b"x" * 900)]

    async def one(app: ASGIApp) -> None:
        scope = {"type": "http", "headers": headers, "query_string": b""}
        await app(scope, cast("Receive", None), cast("Send", None))

    for each in (app, app, endpoint):
        with cProfile.Profile() as profile:
            await one(each)
        counted.append(sum(entry.callcount for entry in profile.getstats()))
    _, known, without = counted
    assert known - without <= 48, counted
