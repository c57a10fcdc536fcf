"""Requests without a credential to an identity provider's routes have a bound by address."""

import logging

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mcp_sessions.core.buckets import BURST
from mcp_sessions.server.upstream.sdk.identity_providers import (
    LARGEST_BODY,
    LONGEST_QUERY,
    REGISTRATIONS,
    REQUESTS,
    bounded,
)

FEW, MANY = int(REGISTRATIONS * BURST), int(REQUESTS * BURST)


class Setup:
    """The routes of a provider, with a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registered = 0
        paths = ("/register", "/token", "/authorize", "/revoke")
        routes = [Route(path, self._page, methods=["GET", "POST"]) for path in paths]
        bounded(routes, lambda: self.now)
        self._app = Starlette(routes=routes)

    async def _page(self, request: Request) -> PlainTextResponse:
        self.registered += request.url.path == "/register"
        return PlainTextResponse(str(len(await request.body())))

    async def send(
        self, path: str, address: str = "192.0.2.1", body: bytes = b""
    ) -> httpx2.Response:
        """The answer to a request from an address."""
        transport = httpx2.ASGITransport(self._app, client=(address, 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, content=body)

    async def answered(self, path: str, count: int, address: str = "192.0.2.1") -> list[int]:
        """The statuses of so many requests."""
        return [(await self.send(path, address)).status_code for _ in range(count)]


async def test_registrations_of_one_address_are_bounded_and_others_continue() -> None:
    setup = Setup()
    assert await setup.answered("/register", FEW) == [200] * FEW
    refused = await setup.send("/register")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"] == "temporarily_unavailable"
    assert setup.registered == FEW
    assert (await setup.send("/register", "192.0.2.2")).status_code == 200
    assert (await setup.send("/token")).status_code == 200, "users who have registered go on"
    setup.now += 1
    assert await setup.answered("/register", 3) == [200, 200, 429]


async def test_all_other_routes_share_a_bound() -> None:
    setup = Setup()
    await setup.answered("/token", MANY // 2)
    await setup.answered("/revoke", MANY // 2)
    for path in ("/token", "/revoke"):
        assert (await setup.send(path)).status_code == 429
    assert (await setup.send("/register")).status_code == 200


async def test_requests_to_sign_in_are_stored_and_have_a_bound_of_their_own() -> None:
    setup = Setup()
    assert await setup.answered("/authorize", FEW + 1) == [200] * FEW + [429]
    for path in ("/token", "/register"):
        assert (await setup.send(path)).status_code == 200


async def test_a_query_has_a_bound() -> None:
    setup = Setup()
    assert (await setup.send(f"/authorize?state={'x' * LONGEST_QUERY}")).status_code == 414


async def test_one_network_of_ipv6_is_one_address() -> None:
    setup = Setup()
    statuses = [
        (await setup.send("/register", f"2001:db8::{number:x}")).status_code
        for number in range(FEW + 1)
    ]
    assert statuses == [200] * FEW + [429]
    assert (await setup.send("/register", "2001:db8:0:1::1")).status_code == 200


async def test_a_flood_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcp_sessions")
    setup = Setup()
    await setup.answered("/register", FEW + 5)
    setup.now += 60
    await setup.answered("/register", FEW + 1)
    said = "requests to sign in were refused; the last one: /register, of which one address may"
    assert [each.getMessage() for each in caplog.records] == [
        f"{count} {said} send 2 a second" for count in (1, 5)
    ]


async def test_a_large_body_is_refused() -> None:
    setup = Setup()
    assert (await setup.send("/token", body=b"x" * LARGEST_BODY)).status_code == 200
    assert (await setup.send("/token", body=b"x" * (LARGEST_BODY + 1))).status_code == 413
