"""A client that gave up one of its own requests, which a server serves all the same."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp import Client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client_transport import resumable
from tests.support.proxy import TcpProxy
from tests.support.resuming import Received, app_of, text_of
from tests.support.scripted import Exchange, ScriptedServer, never
from tests.support.servers import serve

DETACHED = "notifications/sessions/detached"
INSTANCE = "io.github.mcp-sessions/instance"
IMPATIENT = ReconnectPolicy(
    backoff_base=0.02, backoff_cap=0.1, connect_timeout=2, give_up_after=25, closing_timeout=1
)
"""It gives up attempts that are stalled. A busy machine answers the others in time."""


class Stalling:
    """An app whose first ``session/resume`` comes to it late, as through a stalled replica."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.held = anyio.Event()
        self.go_on = anyio.Event()
        self.served = anyio.Event()
        self._resumes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return first.pop() if first else await receive()

        if b'"session/resume"' not in body:
            await self.app(scope, again, send)
            return
        self._resumes += 1
        is_first = self._resumes == 1
        if is_first:
            self.held.set()
            await self.go_on.wait()
        await self.app(scope, again, send)
        if is_first:
            self.served.set()

    async def release(self) -> None:
        """Serve what was held back; return when that is done."""
        self.go_on.set()
        await self.served.wait()


async def test_a_resume_of_its_own_that_is_served_late_does_not_end_a_client() -> None:
    """TKO13."""
    app, layer = app_of()
    stalling = Stalling(layer.asgi_app())
    received = Received()
    with serve(stalling) as server:
        async with TcpProxy(server.host, server.port) as proxy:
            transport = resumable(proxy.url(), on_resume=received.on_resume, policy=IMPATIENT)
            with anyio.fail_after(30):
                async with (
                    Client(transport, mode="auto") as client,
                    client.listen(resource_subscriptions=["note://1"]) as changes,
                ):
                    proxy.cut_all()
                    assert (await received.outcome()).recovered, "by the second attempt"
                    assert stalling.held.is_set()
                    await client.call_tool("echo", {"text": "and listens"})

                    await server.call(stalling.release)
                    assert (await received.outcome(2)).recovered

                    await server.call(layer.notify_resource_updated, "note://1")
                    assert getattr(await anext(changes), "uri", None) == "note://1"
                    notified = await client.call_tool("echo", {"text": "still here"})
                    assert text_of(notified) == "still here"
    assert not any(outcome.has_ended for outcome in received.outcomes)
    assert app


@asynccontextmanager
async def after_an_attempt_was_given_up(
    server: ScriptedServer,
) -> AsyncGenerator[tuple[Client, Received]]:
    """A client whose first ``session/resume`` never was answered, and the next one was."""
    received = Received()
    transport = resumable(server.url(), on_resume=received.on_resume, policy=IMPATIENT)
    with anyio.fail_after(30):
        async with Client(transport, mode="legacy", message_handler=received.on_message) as client:
            await server.has(lambda: server.stream, "the notification stream")
            server.push(DETACHED, sessionId="s-1", reason="evicted")
            assert (await received.outcome()).recovered
            assert len(server.asked("session/resume")) == 2
            await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
            yield client, received


def first_is_stalled(**more: Any) -> ScriptedServer:
    """A server that leaves the first ``session/resume`` without an answer."""
    stalls = iter([True])

    def resume(exchange: Exchange) -> None:
        if next(stalls, False):
            never(exchange)

    return ScriptedServer({"session/resume": resume, **more})


def taken_over(server: ScriptedServer, **members: Any) -> None:
    server.push(DETACHED, sessionId="s-1", reason="taken_over", **members)


async def test_a_client_names_itself_the_same_in_all_that_takes_its_session() -> None:
    """TKO12."""
    async with first_is_stalled() as server, after_an_attempt_was_given_up(server):
        names = {exchange.meta[INSTANCE] for exchange in server.asked("session/resume")}
        assert len(names) == 1
        async with first_is_stalled() as other, after_an_attempt_was_given_up(other):
            others = {exchange.meta[INSTANCE] for exchange in other.asked("session/resume")}
            assert not names & others


async def test_a_notice_with_its_own_name_is_always_its_own() -> None:
    """TKO13: also the third time."""
    async with (
        first_is_stalled() as server,
        after_an_attempt_was_given_up(server) as (_, received),
    ):
        for number in (2, 3, 4):
            taken_over(server, instance=server.asked("session/resume")[0].meta[INSTANCE])
            assert (await received.outcome(number)).recovered


async def test_another_clients_name_ends_it_also_after_an_attempt_was_given_up() -> None:
    """TKO7."""
    async with (
        first_is_stalled() as server,
        after_an_attempt_was_given_up(server) as (_, received),
    ):
        taken_over(server, instance="somebody-else")
        assert (await received.outcome(2)).has_ended
        assert len(server.asked("session/resume")) == 2


async def test_a_server_that_does_not_say_who_is_believed_once_for_each_attempt() -> None:
    """TKO13: "it MAY resume once for each"."""
    async with (
        first_is_stalled() as server,
        after_an_attempt_was_given_up(server) as (_, received),
    ):
        taken_over(server)
        assert (await received.outcome(2)).recovered
        taken_over(server)
        assert (await received.outcome(3)).has_ended
