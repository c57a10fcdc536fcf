"""Tokens that the authorization server is asked about, and every way in which it may not answer."""

import asyncio
import base64
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from mcp_sessions.authentication import tokens
from mcp_sessions.authentication.credential import ASKER, CannotVerify, Credential
from mcp_sessions.authentication.fetching import FetchFailed
from mcp_sessions.authentication.tokens import (
    FRESH,
    Introspection,
    IntrospectionEndpoint,
)
from mcp_sessions.authentication.verdicts import KEPT, PATIENCE, REMEMBERED, WAITING
from tests.support.issuers import AUDIENCE, URL
from tests.support.world import Clock

ENDPOINT = f"{URL}/introspect"
KEY = f"mcp_sessions_key_01234567_{'0' * 64}"


class Server:
    """An authorization server that is asked about tokens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tokens: dict[str, Any] = {"good": self.claims()}
        self.asked: list[str] = []
        self.forms: list[Mapping[str, str]] = []
        self.credentials: set[str] = set()
        self.is_away = False
        self.takes = 0.0
        self.open = self.most_open = 0
        endpoint = IntrospectionEndpoint(ENDPOINT, "layer", "s3cr:et%")
        self.verifier = Introspection(endpoint, URL, AUDIENCE, clock=self.clock, post=self.post)

    def claims(self, **claims: Any) -> dict[str, Any]:
        """Its answer about a token of alice's."""
        return {
            "active": True,
            "iss": URL,
            "aud": AUDIENCE,
            "sub": "alice",
            "client_id": "app",
            "scope": "use more",
            "exp": int(self.clock.now) + 3_600,
            **claims,
        }

    async def post(self, url: str, form: Mapping[str, str], authorization: str) -> Any:
        assert url == ENDPOINT
        self.asked.append(form["token"])
        self.forms.append(form)
        self.credentials.add(authorization)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.takes)
        finally:
            self.open -= 1
        if self.is_away:
            raise FetchFailed(f"{url} answers 502")
        return self.tokens.get(form["token"], {"active": False})

    async def accepts(self, token: str = "good") -> bool:
        return await self.verifier.verify(token) is not None

    async def says(self, **claims: Any) -> bool:
        """Whether a token is good about which it says so."""
        token = f"t{len(self.tokens)}"
        self.tokens[token] = self.claims(**claims)
        return await self.accepts(token)

    async def seconds(self) -> float:
        """How long a request with the good token waits."""
        begun = asyncio.get_running_loop().time()
        assert await self.accepts()
        return asyncio.get_running_loop().time() - begun


@pytest.fixture
def server() -> Server:
    return Server()


async def test_a_token_stands_for_issuer_subject_and_client(server: Server) -> None:
    ends = int(server.clock.now) + 3_660
    expected = Credential("app", URL, "alice", ("use", "more"), ends)
    assert await server.verifier.verify("good") == expected


async def test_the_layer_says_who_it_is_as_rfc_6749_has_it(server: Server) -> None:
    """RFC 6749, 2.3.1: a colon in a secret is encoded."""
    assert await server.accepts()
    (basic,) = server.credentials
    assert base64.b64decode(basic.removeprefix("Basic ")) == b"layer:s3cr%3Aet%25"
    assert server.forms == [{"token": "good", "token_type_hint": "access_token"}]
    assert "s3cr" not in repr(IntrospectionEndpoint(ENDPOINT, "layer", "s3cr"))


@pytest.mark.parametrize(
    ("claims", "is_good"),
    [
        ({}, True),
        ({"active": False}, False),
        ({"iss": "https://other.example"}, False),
        ({"iss": None}, False),
        ({"aud": ["https://a.example", f"{AUDIENCE}/"]}, True),
        ({"aud": "https://other.example"}, False),
        ({"aud": ["https://other.example"]}, False),
        ({"aud": [AUDIENCE + "x"]}, False),
        ({"aud": None}, False),
        ({"aud": {AUDIENCE: 1}}, False),
        ({"exp": 1}, False),
        ({"exp": "soon"}, False),
        ({"exp": None}, True),
        ({"nbf": 4_000_000_000}, False),
        ({"sub": None}, False),
        ({"sub": ""}, False),
        ({"sub": 7}, False),
        ({"cnf": {"jkt": "x"}}, False),
        ({"token_type": "DPoP"}, False),
        ({"token_type": "refresh_token"}, False),
        ({"token_type": "bearer"}, True),
        ({"token_use": "refresh_token"}, False),
        ({"token_use": "access_token"}, True),
    ],
)
async def test_what_is_said_of_a_token_is_checked(
    server: Server, claims: Any, is_good: bool
) -> None:
    assert await server.says(**claims) == is_good


async def test_an_answer_need_not_name_the_issuer(server: Server) -> None:
    """RFC 7662, 2.2: it is optional. The answer comes from the issuer itself."""
    del server.tokens["good"]["iss"]
    found = await server.verifier.verify("good")
    assert found is not None and found.issuer == URL


@pytest.mark.parametrize("leeway", [-50, 50])
async def test_clocks_may_be_a_minute_apart(server: Server, leeway: int) -> None:
    now = int(server.clock.now)
    assert await server.says(exp=now + leeway, nbf=now + leeway)
    assert not await server.says(exp=now - 300)
    assert not await server.says(nbf=now + 300)


@pytest.mark.parametrize("active", [None, 1, "true", "missing"])
async def test_without_a_clear_answer_a_token_is_neither_good_nor_bad(
    server: Server, active: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.tokens["good"]["active"] = active
    if active == "missing":
        del server.tokens["good"]["active"]
    with pytest.raises(CannotVerify):
        await server.accepts()
    assert "does not say whether a token is active" in caplog.text


async def test_an_answer_counts_for_half_a_minute(server: Server) -> None:
    for _ in range(100):
        assert await server.accepts()
        assert not await server.accepts("bad")
    assert server.asked == ["good", "bad"]
    server.clock.now += FRESH
    server.tokens = {"bad": server.claims()}
    assert not await server.accepts()
    assert await server.accepts("bad")


async def test_a_token_that_expires_in_between_is_not_good(server: Server) -> None:
    server.tokens["good"]["exp"] = int(server.clock.now) - 50
    assert await server.accepts()
    server.clock.now += 11
    assert not await server.accepts()


async def test_a_clock_that_is_put_back_means_a_new_question(server: Server) -> None:
    server.clock.now += 1_000
    assert await server.accepts() and not await server.accepts("bad")
    server.clock.now -= 1_000
    assert await server.accepts() and not await server.accepts("bad")
    assert server.asked == ["good", "bad"] * 2


@pytest.mark.parametrize("token", [KEY, "with space", "é", "a=b", "", "a\nb", "a" * 16 + "\x00"])
async def test_what_is_no_token_or_a_key_is_shown_to_nobody(server: Server, token: str) -> None:
    """A key of --api-keys that was revoked is one of an owner of this server."""
    server.tokens[token] = server.claims()
    assert not await server.accepts(token)
    assert server.asked == []


async def test_all_requests_share_one_question_and_it_outlives_the_first(server: Server) -> None:
    server.takes = 2
    tasks = [asyncio.create_task(server.accepts()) for _ in range(50)]
    await asyncio.sleep(1)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert all(task.result() for task in tasks[1:])
    assert server.asked == ["good"]


async def test_an_endpoint_that_is_away_is_no_reason_to_refuse_a_token(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """O: 503 for tokens that are not known. Those that are known count on for a while."""
    caplog.set_level(logging.INFO)
    assert await server.accepts()
    server.is_away = True
    for _ in range(9):
        server.clock.now += FRESH
        assert await server.accepts()
        with pytest.raises(CannotVerify) as unknown:
            await server.accepts("new")
        assert unknown.value.retry_after == 5
    assert caplog.text.count("the introspection endpoint does not answer") == 1
    assert "answers 502" in caplog.text
    server.clock.now += KEPT - 9 * FRESH
    with pytest.raises(CannotVerify):
        await server.accepts()
    server.is_away = False
    assert await server.accepts()
    assert "the introspection endpoint answers again" in caplog.text


async def test_an_endpoint_that_takes_a_minute_is_given_up_after_ten_seconds(
    server: Server,
) -> None:
    server.takes = 60
    begun = asyncio.get_running_loop().time()
    with pytest.raises(CannotVerify):
        await server.accepts()
    assert asyncio.get_running_loop().time() - begun == pytest.approx(10)
    assert server.open == 0


async def test_while_it_hangs_a_known_token_waits_a_second_each_five(server: Server) -> None:
    assert await server.accepts()
    server.clock.now += FRESH
    server.takes = 60
    assert await server.seconds() == pytest.approx(PATIENCE)
    for _ in range(4):
        server.clock.now += 1
        assert await server.seconds() == 0
    server.clock.now += 1
    assert await server.seconds() == pytest.approx(PATIENCE)
    await asyncio.sleep(60)
    assert server.open == 0


async def test_a_late_answer_still_counts(server: Server) -> None:
    assert await server.accepts()
    server.clock.now += FRESH
    server.takes, server.tokens = 3, {}
    assert await server.accepts()
    await asyncio.sleep(3)
    assert not await server.accepts()


async def test_a_flood_of_bad_tokens_has_bounds_and_no_entry_of_a_good_one(server: Server) -> None:
    """O: 10,000 bad tokens next to one good client."""
    assert await server.accepts()
    server.clock.now += FRESH
    server.takes = 0.5
    flood = [asyncio.create_task(server.accepts(f"bad{number}")) for number in range(10_000)]
    await asyncio.sleep(0.1)
    assert await server.seconds() == pytest.approx(0.5)
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert server.most_open == 17
    assert not any(result is True for result in results)
    assert sum(isinstance(result, CannotVerify) for result in results) >= 10_000 - WAITING
    assert server.asked.count("good") == 2


async def test_an_endpoint_that_answers_is_not_away_because_questions_wait_for_their_turn(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A flood made the log say "did not answer within 10 s" of one that answers in 0.4 s."""
    server.takes = 0.4
    flood = [asyncio.create_task(server.accepts(f"bad{number}")) for number in range(1_000)]
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert any(isinstance(result, CannotVerify) for result in results)
    assert "does not answer" not in caplog.text
    server.takes = 60
    flood = [asyncio.create_task(server.accepts(f"late{number}")) for number in range(100)]
    await asyncio.gather(*flood, return_exceptions=True)
    assert caplog.text.count("did not answer within 10 s") == 1


@pytest.mark.parametrize("network", ["198.51.100.9", "2001:db8:1::1"])
async def test_a_flood_from_one_address_refuses_no_new_token_of_another(
    server: Server, network: str
) -> None:
    """1,200 connections with made-up tokens got fresh good tokens refused with 503."""
    server.takes = 0.5
    flood = [
        asyncio.create_task(from_address(server, "198.51.100.1", f"bad{number}"))
        for number in range(1_200)
    ]
    await asyncio.sleep(0.1)
    assert server.open == 16
    begun = asyncio.get_running_loop().time()
    assert await from_address(server, network, "good") is True
    assert asyncio.get_running_loop().time() - begun == pytest.approx(0.5)
    assert True not in await asyncio.gather(*flood)


async def test_one_client_has_one_share_of_all_its_addresses(server: Server) -> None:
    """An IPv6 network of 64 bits is one client, as for the limits of callers."""
    server.takes = 0.5
    flood = [
        asyncio.create_task(from_address(server, f"2001:db8::{number:x}", f"bad{number}"))
        for number in range(1_200)
    ]
    await asyncio.sleep(0.1)
    assert server.open == 16
    assert await from_address(server, "2001:db8:0:1::1", "good") is True
    await asyncio.gather(*flood)


async def from_address(server: Server, address: str, token: str) -> bool | None:
    """Whether a token is good that comes from there. None: that is not known."""
    ASKER.set({"client": (address, 1)})
    try:
        return await server.accepts(token)
    except CannotVerify:
        return None


async def test_what_is_kept_has_a_bound(server: Server) -> None:
    """Bad tokens push out no good one."""
    assert await server.accepts()
    for number in range(REMEMBERED + 1):
        assert not await server.accepts(f"bad{number}")
    assert await server.accepts()
    assert server.asked.count("good") == 1
    assert not await server.accepts("bad0")
    assert server.asked.count("bad0") == 2
    for number in range(REMEMBERED):
        assert await server.says(sub=str(number))
    assert await server.accepts()
    assert server.asked.count("good") == 2


async def test_the_log_says_why_and_has_no_token(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert not await server.accepts("very-secret-token")
    assert "1 tokens were refused; the last one: the authorization server says" in caplog.text
    server.is_away = True
    with pytest.raises(CannotVerify):
        await server.accepts("other-secret-token")
    assert "secret-token" not in caplog.text


async def test_a_made_up_token_that_is_active_is_a_fault(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``serve --check`` sees an endpoint that says yes to everything."""
    endpoint = IntrospectionEndpoint(ENDPOINT, "layer", "secret")
    monkeypatch.setattr(tokens, "post_form", server.post)
    await endpoint.try_once()
    server.tokens["mcp-sessions-check"] = {"active": True}
    with pytest.raises(FetchFailed, match="an invented token is active"):
        await endpoint.try_once()
    server.takes = 60
    with pytest.raises(FetchFailed, match="did not answer within 10 s"):
        await endpoint.try_once()
