"""In which order a URL gets what is no request, and who waits for it."""

import asyncio

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.external.url_requests import Messages
from tests.support.puppets import settled


class Server:
    """What it was sent. It takes nothing until it is told to."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.takes = asyncio.Event()
        self.background = Background()
        self.messages = Messages(self.background, self._send)

    async def _send(self, message: bytes) -> None:
        self.received.append(message)
        await self.takes.wait()

    def keeps_a_request(self) -> bool:
        wait = self.messages.until_taken()
        if wait is not None:
            wait.close()
        return wait is not None


async def test_neither_a_request_nor_what_a_client_says_waits_for_cancellations() -> None:
    """Several clients may share the child. One of them that cancels all the time kept the others
    waiting for ten seconds each, and what it left in the queue left no place for an answer.
    """
    server = Server()
    for _ in range(2_000):
        server.messages.add(b"cancelled")
    await settled()
    assert not server.keeps_a_request()
    await server.messages.add_in_turn(b"an answer")
    await settled()
    assert server.received == [b"cancelled", b"an answer"]
    assert server.keeps_a_request()
    await server.background.close()


async def test_no_request_overtakes_what_its_client_said_before() -> None:
    server = Server()
    await server.messages.add_in_turn(b"1")
    second = asyncio.create_task(server.messages.add_in_turn(b"2"))
    await settled()
    assert server.received == [b"1"]
    server.takes.set()
    for _ in range(40):
        if not server.keeps_a_request():
            break
        await asyncio.sleep(0)
    assert server.received == [b"1", b"2"]
    await second
    await server.background.close()
