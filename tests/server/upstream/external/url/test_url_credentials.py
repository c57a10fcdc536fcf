"""A credential that a URL accepts no more while a session there goes on.

The promises are those of ``auth`` in `mcp_sessions.external_server`.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager

import httpx2
import pytest

from mcp_sessions import HTTPServer
from mcp_sessions.principal import Principal
from tests.support.children import until
from tests.support.raw import RawClient, Reply, text_of
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import connected_world, world

SECRET = "s3cr3t"
Flow = Generator[httpx2.Request, httpx2.Response, None]
UPDATED = "notifications/resources/updated"


class Issuer:
    """Gives credentials, each newer than the one before."""

    def __init__(self, server: UrlServer) -> None:
        self.server = server
        self.asked = 0
        self.gives = asyncio.Event()
        self.gives.set()
        self.is_away = False

    async def __call__(self, principal: Principal) -> Mapping[str, str]:
        self.asked += 1
        number = self.asked
        await self.gives.wait()
        if self.is_away:
            raise OSError("the secret")
        return {"Authorization": f"Bearer {number}"}

    def expire(self) -> None:
        """What it gave so far is accepted no more."""
        self.server.accepts = f"Bearer {self.asked + 1}"


@asynccontextmanager
async def issuing() -> AsyncGenerator[tuple[UrlServer, Issuer, RawClient]]:
    """A client whose session there has the first credential."""
    server = UrlServer()
    issuer = Issuer(server)
    async with url_of(server) as url:
        async with connected_world(server=HTTPServer(url, auth=issuer)) as (_, client):
            await client.start()
            assert await client.text("count") == "1"
            assert issuer.asked == 1
            yield server, issuer, client


async def subscribed(client: RawClient, server: UrlServer) -> Reply:
    """The notification stream of a client with a session that is subscribed to ``test://a``."""
    stream = await client.get().started()
    await client.start()
    await client.result("resources/subscribe", {"uri": "test://a"})
    await until(lambda: server.streams, "it is heard")
    return stream


async def expect_update(stream: Reply, server: UrlServer) -> None:
    """The server's own stream is open, and what changes comes on the client's."""
    await until(lambda: server.streams, "it is heard again")
    server.say(UPDATED, {"uri": "test://a"})
    await until(lambda: any(m["method"] == UPDATED for m in stream.messages), "the change")


async def test_another_one_is_asked_for_and_the_request_runs_once() -> None:
    async with issuing() as (server, issuer, client):
        sessions = set(server.sessions)
        issuer.expire()
        assert await client.text("count") == "2"
        assert (issuer.asked, server.calls) == (2, ["count", "count"])
        assert await client.text("count") == "3"
        assert (issuer.asked, set(server.sessions)) == (2, sessions), "the session goes on"


async def test_those_that_are_refused_at_once_ask_once() -> None:
    async with issuing() as (server, issuer, client):
        issuer.expire()
        issuer.gives.clear()
        before = len(server.headers)
        sent = [client.call("count") for _ in range(5)]
        await until(lambda: len(server.headers) == before + 5, "all of them were refused")
        # Whoever leaves takes the new credential from nobody.
        await client.notify("notifications/cancelled", {"requestId": sent[0].id})
        issuer.gives.set()
        texts = [text_of(await each.result()) for each in sent[1:]]
        assert sorted(texts) == ["2", "3", "4", "5"]
        assert issuer.asked == 2


async def test_one_that_is_refused_as_well_is_an_error_and_nothing_ran() -> None:
    async with issuing() as (server, issuer, client):
        server.accepts = "Bearer of somebody else"
        error = await client.call("count").error()
        assert "credential" in error["message"] and error["data"]["started"] is False
        assert (issuer.asked, server.calls) == (2, ["count"])
        issuer.is_away = True
        error = await client.call("count").error()
        assert "no credential" in error["message"] and "the secret" not in str(error)
        assert error["data"]["started"] is False
        issuer.is_away = False
        issuer.expire()
        assert await client.text("count") == "2", "the next one is asked for again"


async def test_a_credential_that_nobody_can_ask_for_again_is_refused() -> None:
    server = UrlServer()
    headers = {"Authorization": "Bearer 1"}
    async with url_of(server) as url, world(server=HTTPServer(url, headers=headers)) as w:
        client = await w.connected()
        server.accepts = "Bearer 2"
        before = len(server.headers)
        error = await client.call("count").error()
        assert "401" in error["message"] and error["data"]["started"] is False
        assert len(server.headers) == before + 1


async def test_what_the_server_says_by_itself_is_received_with_the_next_one() -> None:
    server = UrlServer()
    issuer = Issuer(server)
    async with url_of(server) as url, world(server=HTTPServer(url, auth=issuer)) as w:
        client = await w.connected()
        stream = await subscribed(client, server)
        issuer.expire()
        server.hang_up()
        await expect_update(stream, server)
        assert issuer.asked >= 2


class _Broken(httpx2.Auth):
    """An application's own, with a defect."""

    is_broken = False
    failed = 0

    def auth_flow(self, request: httpx2.Request) -> Flow:
        if self.is_broken:
            self.failed += 1
            raise RuntimeError(SECRET)
        yield request


@pytest.mark.fails_in_background("the authentication of a request to a URL")
async def test_a_defect_of_the_applications_own_is_an_answer_and_no_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, auth = UrlServer(), _Broken()
    async with url_of(server) as url, world(server=HTTPServer(url, auth=auth)) as w:
        client = await w.connected()
        await client.start()
        assert await client.text("count") == "1"
        auth.is_broken = True
        assert (await client.call("count").error())["code"] == -31012
        assert SECRET not in caplog.text
        auth.is_broken = False
        assert await client.text("count") == "2"
        auth.is_broken = True


@pytest.mark.fails_in_background("the authentication of a request to a URL")
async def test_a_defect_of_it_does_not_end_what_the_server_says_by_itself() -> None:
    server, auth = UrlServer(), _Broken()
    async with url_of(server) as url, world(server=HTTPServer(url, auth=auth)) as w:
        client = await w.connected()
        stream = await subscribed(client, server)
        auth.is_broken = True
        server.hang_up()
        await until(lambda: auth.failed, "it is opened again")
        auth.is_broken = False
        await expect_update(stream, server)
        assert auth.failed >= 1 and await client.text("count") == "1"
