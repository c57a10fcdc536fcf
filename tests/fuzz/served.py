"""A layer on a real socket, as the command line serves it, and a client that does nothing wrong."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mcp_sessions import SessionLayer, SessionPolicy, SessionSecurity
from mcp_sessions.serve.open_connections import connection_limits
from mcp_sessions.serve.uvicorn_server import HttpSettings, http_config
from tests.fuzz.fuzzer import WITHIN
from tests.fuzz.hostile import shown
from tests.support.duplex import ServerInLoop
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient, Sent, SocketCarrier, at_most

KERNEL = 32_768
"""Bytes that the system keeps for a peer that does not read."""

POLICY: dict[str, Any] = {
    "idle_timeout": 5,
    "max_sessions": 5_000,
    "max_events": 20,
    "max_age": 10,
    "request_key_lifetime": 10,
    "max_detached_requests": 20,
    "detached_timeout": 1,
    "max_unread_bytes": 262_144,
    "send_buffer": 65_536,
    "receive_buffer": 65_536,
    "slow_timeout": 1,
    "max_message": 262_144,
}
"""So small that what is kept reaches its bounds within a run, and what grows beyond them shows."""

KEEPS = 3.0
"""Seconds after its last request in which a session is surely there."""


@dataclass
class Served:
    layer: SessionLayer
    server: ServerInLoop
    port: int
    carrier: SocketCarrier

    def unsent(self) -> int:
        """Bytes that wait in this process for the slowest of all peers."""
        connections: Any = self.server.server_state.connections
        waiting = [c.transport.get_write_buffer_size() for c in connections if c.transport]
        return max(waiting, default=0)


@asynccontextmanager
async def served(
    server: Any, *, store: str = "memory://", security: SessionSecurity | None = None
) -> AsyncGenerator[Served]:
    policy = SessionPolicy(**POLICY)
    layer = SessionLayer(server, store=store, policy=policy, security=security)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL)
    limits = connection_limits([policy])
    config = http_config(layer.asgi_app(), HttpSettings(limits=limits))
    config.timeout_graceful_shutdown = 1
    running = ServerInLoop(config)
    port: int = listener.getsockname()[1]
    carrier = SocketCarrier("127.0.0.1", port)
    serving = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        await at_most(WITHIN, running.is_up.wait())
        yield Served(layer, running, port, carrier)
    finally:
        await carrier.aclose()
        running.stop.set()
        await at_most(2 * WITHIN, serving)
        listener.close()


async def answer_to(sent: Sent, what: bytes) -> Json | None:
    """The answer to a request; None: its response has ended, and there is none.

    Args:
        what: The hostile part, in words.

    Raises:
        AssertionError: It is no JSON, or neither it nor another message comes within `WITHIN`.
    """
    reply = sent.reply

    def is_here() -> bool:
        return reply.ended or (reply.is_sse and reply.answer_to(sent.id) is not None)

    before = -1
    while not is_here():
        # An answer waits behind what was said before it. That may be many messages.
        messages = len(reply.events) if reply.is_sse else 0
        assert messages > before, f"unanswered: {shown(what)}"
        before = messages
        with suppress(AssertionError):
            await reply.until(is_here, within=WITHIN)
    try:
        return reply.answer_to(sent.id)
    except ValueError:
        raise AssertionError(f"no JSON after {shown(what)}: {reply}") from None


class Good:
    """Two clients that do nothing wrong, each of its era.

    Args:
        tool: They call it with these arguments.
        is_right: Whether its result is.
    """

    def __init__(
        self,
        carrier: SocketCarrier,
        tool: str,
        arguments: Json,
        is_right: Callable[[Json], bool],
    ) -> None:
        self.modern = ModernClient(carrier)
        self.older = RawClient(carrier)
        self._expires_at = 0.0
        self._tool = tool
        self._arguments = arguments
        self._is_right = is_right

    async def expect_served(self) -> None:
        now = asyncio.get_running_loop().time()
        if now > self._expires_at:
            await at_most(WITHIN, self.older.initialize())
        asked = (
            self.modern.call(self._tool, self._arguments),
            self.older.call(self._tool, **self._arguments),
        )
        for answer in [await at_most(WITHIN, each.answer()) for each in asked]:
            assert "result" in answer, f"a client beside it is refused: {answer}"
            assert self._is_right(answer["result"]), f"a client beside it is answered: {answer}"
        self._expires_at = now + KEEPS
