"""How the requests of an identity provider's verifier ended."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx2
import pytest

from mcp_sessions.authentication.identity_service import AWAY, IdentityService
from tests.support.world import Clock


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets."""
    return "asyncio"


class Setup:
    """A service that answers with a status, or not at all."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.header, self.body = "", b""
        self.asked: list[bytes] = []
        self.clock = Clock()
        self.service = IdentityService(self.clock)
        self.client = self.service.client()
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError:
            # The client connected, and then found that it cannot send the request.
            writer.close()
            return
        if self.status is not None:
            head = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.body)}\r\n{self.header}"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + self.body)
        writer.close()

    async def failure(self, requests: int = 1) -> str:
        """Why a refusal after so many requests does not count."""
        with self.service.asking() as question:
            for _ in range(requests):
                try:
                    await self.client.get(self.url)
                except httpx2.RequestError:
                    continue
        return self.service.failure(question)


@asynccontextmanager
async def served() -> AsyncGenerator[Setup]:
    """A service until the block ends."""
    setup = Setup()
    server = await asyncio.start_server(setup.connected, "127.0.0.1", 0)
    setup.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, setup.client:
        yield setup


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404])
async def test_a_refusal_counts_if_the_service_answered(status: int) -> None:
    async with served() as setup:
        setup.status = status
        assert await setup.failure() == ""


@pytest.mark.parametrize("status", [302, 408, 429, 500, 503, None])
async def test_a_refusal_does_not_count_if_the_service_did_not_answer(status: int | None) -> None:
    async with served() as setup:
        setup.status = status
        assert "127.0.0.1" in await setup.failure()
        # A verifier refuses without a request until it may fetch the keys again.
        assert "127.0.0.1" in await setup.failure(requests=0)
        setup.clock.now += AWAY
        assert await setup.failure(requests=0) == ""


async def test_a_service_that_answers_again_is_not_away() -> None:
    async with served() as setup:
        setup.status = 500
        assert await setup.failure()
        setup.status = 401
        assert await setup.failure() == ""
        assert await setup.failure(requests=0) == ""


async def test_of_several_requests_about_a_token_each_must_be_answered() -> None:
    async with served() as setup:
        setup.status = 500
        with setup.service.asking() as question:
            await setup.client.get(setup.url)
            setup.status = 200
            await setup.client.get(setup.url)
        assert setup.service.failure(question)


async def test_requests_about_other_tokens_do_not_count() -> None:
    """They run at the same time, each in its own task."""
    async with served() as setup:
        with setup.service.asking() as own:
            await setup.client.get(setup.url)
            setup.status = 500
            assert await asyncio.create_task(setup.failure())
        assert setup.service.failure(own) == ""


async def test_a_token_that_cannot_be_sent_says_nothing_of_the_service() -> None:
    async with served() as setup:
        with setup.service.asking() as question:
            with pytest.raises((httpx2.LocalProtocolError, ValueError)):
                await setup.client.get(setup.url, headers={"Authorization": "a\nb"})
        assert setup.service.failure(question) == ""


async def test_a_cookie_of_one_token_does_not_go_with_another() -> None:
    async with served() as setup:
        setup.header = "Set-Cookie: sid=alice; Path=/\r\n"
        for _ in range(2):
            await setup.client.get(setup.url)
        assert len(setup.asked) == 2 and not any(b"sid=" in each for each in setup.asked)


async def test_an_answer_that_cannot_be_read_is_none() -> None:
    async with served() as setup:
        setup.header, setup.body = "Content-Encoding: gzip\r\n", b"no gzip"
        assert await setup.failure()
