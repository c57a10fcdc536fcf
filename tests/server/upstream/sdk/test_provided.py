"""An identity provider of FastMCP before an endpoint: whose token it is, and who is refused."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from mcp.server.auth.provider import AccessToken
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mcp_sessions import SessionLayer
from mcp_sessions.authentication.allowing import Allowed
from mcp_sessions.authentication.credential import OPERATOR, CannotVerify, Credential, NotAllowed
from mcp_sessions.authentication.key_file import minted
from mcp_sessions.authentication.verdicts import KEPT, REMEMBERED
from mcp_sessions.server.upstream.sdk.identity_providers import (
    FRESH,
    LARGEST_BODY,
    REFUSED,
    ProvidedVerifier,
    provided,
)
from tests.support.children import child
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import in_process
from tests.support.world import Clock


@pytest.fixture
def anyio_backend() -> str:
    """Real time, since processes run."""
    return "asyncio"


class Provider:
    """As FastMCP's ``AuthProvider``: it knows some tokens, and has a route."""

    required_scopes = ("use",)

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {
            "alice": {"sub": "1", "email": "alice@example.com"},
            "bob": {"sub": "2", "email": "bob@other.com"},
            "nobody": {"email": "nobody@example.com"},
            "empty": {"sub": "", "email": "nobody@example.com"},
        }
        self.asked: list[str] = []
        self.scopes = ["use"]
        self.is_away = False

    async def verify_token(self, token: str) -> AccessToken | None:
        self.asked.append(token)
        if self.is_away:
            raise RuntimeError("the provider is away")
        claims = self.users.get(token)
        if claims is None:
            return None
        return AccessToken(token=token, client_id="app", scopes=self.scopes, claims=claims)

    def get_routes(self, mcp_path: str) -> list[Route]:
        """Where users sign in."""

        async def page(request: Request) -> PlainTextResponse:
            return PlainTextResponse(f"{request.method} {mcp_path} {len(await request.body())}")

        return [Route("/authorize", page, methods=["GET", "POST"])]

    def _get_resource_url(self, path: str) -> str:
        return f"https://mcp.example{path}"


class Setup:
    """A provider, and what asks it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.provider = Provider()
        self.allowed = Allowed(["*@example.com"], verifies_mail=True)
        self.verifier = ProvidedVerifier(self.provider, "test", self.allowed, clock=self.clock)


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_a_user_is_known_by_issuer_and_subject(setup: Setup) -> None:
    """All users of one app would else own the same sessions."""
    found = await setup.verifier.verify_token("alice")
    assert found is not None
    assert (found.subject, (found.claims or {})["iss"]) == ("1", "urn:mcp-sessions:auth:test")
    assert await setup.verifier.verify_token("wrong") is None
    for token in ("nobody", "empty"):
        assert await setup.verifier.verify_token(token) is None


async def test_no_user_has_the_scope_of_an_operator(setup: Setup) -> None:
    """A client registers itself, and asks for the scopes that it likes. Some providers grant each:
    any user had the page with the sessions of all.
    """
    setup.provider.scopes = ["use", OPERATOR]
    found = await setup.verifier.verify_token("alice")
    assert found is not None and found.scopes == ["use"]


async def test_a_user_who_is_not_allowed_is_refused_each_time(setup: Setup) -> None:
    for _ in range(2):
        with pytest.raises(NotAllowed):
            await setup.verifier.verify_token("bob")


@pytest.mark.parametrize("token", ["wrong", "bob", "nobody"])
async def test_a_token_that_was_refused_is_not_asked_about_all_the_time(
    setup: Setup, token: str
) -> None:
    for _ in range(10):
        with nullcontext() if token != "bob" else pytest.raises(NotAllowed):
            assert await setup.verifier.verify_token(token) is None
    assert setup.provider.asked == [token]
    setup.clock.now += REFUSED
    setup.provider.users[token] = {"sub": "3", "email": "now@example.com"}
    assert await setup.verifier.verify_token(token)


async def test_an_api_key_is_not_shown_to_the_provider(setup: Setup) -> None:
    """Also one that was revoked."""
    key, _ = minted("ci", [], 0.0, None)
    assert await setup.verifier.verify_token(key) is None
    assert setup.provider.asked == []


async def test_an_answer_counts_for_a_minute(setup: Setup) -> None:
    for _ in range(10):
        assert await setup.verifier.verify_token("alice")
    assert setup.provider.asked == ["alice"]
    setup.clock.now += FRESH
    setup.provider.users = {}
    assert await setup.verifier.verify_token("alice") is None


async def test_a_provider_that_is_away_is_no_reason_to_refuse_a_token(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await setup.verifier.verify_token("alice")
    setup.provider.is_away = True
    assert await setup.verifier.verify_token("alice")
    for _ in range(2):
        with pytest.raises(CannotVerify):
            await setup.verifier.verify_token("bob")
    assert caplog.text.count("the identity provider does not answer: RuntimeError") == 1
    setup.provider.is_away = False
    assert await setup.verifier.verify_token("wrong") is None
    assert "the identity provider answers again" in caplog.text


async def test_a_good_token_counts_on_while_the_provider_is_away(setup: Setup) -> None:
    """A stream is checked once a minute: a short outage ends none."""
    assert await setup.verifier.verify_token("alice")
    setup.provider.is_away = True
    setup.clock.now += KEPT - 1
    assert await setup.verifier.verify_token("alice")
    setup.clock.now += 1
    with pytest.raises(CannotVerify):
        await setup.verifier.verify_token("alice")


async def test_all_requests_with_one_token_share_one_question(setup: Setup) -> None:
    found = await asyncio.gather(*(setup.verifier.verify_token("alice") for _ in range(50)))
    assert all(found) and setup.provider.asked == ["alice"]


async def test_tokens_that_name_no_user_are_one_line_a_minute(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for number in range(20):
        setup.provider.users[f"t{number}"] = {"email": "nobody@example.com"}
        assert await setup.verifier.verify_token(f"t{number}") is None
    assert [each.getMessage() for each in caplog.records] == [
        "1 tokens were refused; the last one: it names no user"
    ]


async def test_what_is_kept_has_a_bound(setup: Setup) -> None:
    for number in range(REMEMBERED + 1):
        token = f"t{number}"
        setup.provider.users[token] = {"sub": token, "email": "a@example.com"}
        assert await setup.verifier.verify_token(token)
    assert await setup.verifier.verify_token("t0")
    assert setup.provider.asked.count("t0") == 2


async def test_before_an_endpoint_it_refuses_with_403_and_serves_its_routes(setup: Setup) -> None:
    made = provided(setup.provider, "test", setup.allowed, setup.clock).at("/mcp")
    layer = SessionLayer(child(scopes=["use"]), auth=made)
    app = layer.asgi_app(host="0.0.0.0")
    async with layer.lifespan(), in_process(app) as carrier:
        host = [("Host", "mcp.example")]
        page = await carrier.send("GET", "/authorize", host, b"").done()
        assert (page.status, bytes(page.body)) == (200, b"GET /mcp 0")
        for size, status in ((LARGEST_BODY, 200), (LARGEST_BODY + 1, 413)):
            sent = await carrier.send("POST", "/authorize", host, b"x" * size).done()
            assert sent.status == status
        refused = ModernClient(BearerCarrier(carrier, "bob")).send("tools/list")
        assert (await refused.reply.done()).status == 403
        assert refused.reply.json["error"] == "access_denied"
        unknown = ModernClient(BearerCarrier(carrier, "wrong")).send("tools/list")
        assert (await unknown.reply.done()).status == 401
        said = unknown.reply.header("www-authenticate") or ""
        assert "https://mcp.example/.well-known/oauth-protected-resource/mcp" in said
        setup.provider.is_away = True
        away = ModernClient(BearerCarrier(carrier, "other")).send("tools/list")
        assert (await away.reply.done()).status == 503
        setup.provider.is_away = False
        listed = await ModernClient(BearerCarrier(carrier, "alice")).send("tools/list").result()
        assert [each["name"] for each in listed["tools"]] == ["echo"]


async def test_a_key_is_good_in_addition_to_the_tokens_of_the_provider(setup: Setup) -> None:
    """And the provider does not get to see it."""

    class Keys:
        async def verify(self, token: str) -> Credential | None:
            """The owner of the one key."""
            return Credential("ci", "urn:keys", None, ("use",), None) if token == "key" else None

    made = provided(setup.provider, "test", setup.allowed, setup.clock, Keys()).at("/mcp")
    layer = SessionLayer(child(), auth=made)
    app = layer.asgi_app(host="0.0.0.0")
    async with layer.lifespan(), in_process(app) as carrier:
        for token in ("key", "alice"):
            await ModernClient(BearerCarrier(carrier, token)).send("tools/list").result()
        assert setup.provider.asked == ["alice"]
