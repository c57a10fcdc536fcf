"""The next address, and the time: decided by numbers alone, and seen on sockets."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus
from mcp import Client

from mcp_sessions.client.application import Application, Callbacks
from mcp_sessions.client.control import Connector, SessionControl
from mcp_sessions.client.dialer import Dialer, Failed, Failure, Link, LinkSettings
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.requests import Exchanges
from mcp_sessions.client.sessions import KnownServer, Session
from mcp_sessions.client.state import Addresses, ClientState, Runtime
from mcp_sessions.client_transport import resumable
from mcp_sessions.core.messages import PROTOCOL_VERSION_META, Json
from mcp_sessions.core.resume import FailureCause
from tests.support.resuming import Received, text_of
from tests.support.scripted import Exchange, ScriptedServer, tool_result

SOON = 3.0
"""Seconds that a call may take while another address is free, at the default policy."""


class Named(Dialer):
    def __init__(self, target: str) -> None:
        self.target = target

    def link(self) -> Link:
        raise AssertionError("nobody dials")


def addresses(*names: str) -> Addresses:
    dialers = [Named(name) for name in names]
    return Addresses(dialers, base=0.5, cap=30, longest_rest=300)


def asked(found: Addresses, now: float) -> tuple[str, float]:
    """The address to ask, and the longest delay."""
    dialer, delay = found.next(now=now, random=1.0)
    return dialer.target, delay


def test_the_only_address_is_asked_when_its_rest_has_passed() -> None:
    one = addresses("a")
    one.rest(15, now=100)
    one.move_on()
    assert not one.has_other(now=100)
    assert asked(one, 100) == ("a", 15)


def test_another_address_is_asked_at_once_while_one_rests() -> None:
    two = addresses("a", "b")
    two.rest(15, now=100)
    assert two.has_other(now=100)
    assert asked(two, 100) == ("b", 0.5)


def test_the_address_is_kept_that_asks_for_nothing() -> None:
    assert asked(addresses("a", "b"), 0) == ("a", 0.5)


def test_if_all_rest_the_first_to_be_rested_is_asked_then() -> None:
    two = addresses("a", "b")
    two.rest(15, now=100)
    assert asked(two, 100)[0] == "b"
    two.rest(5, now=100)
    two.move_on()
    assert not two.has_other(now=100)
    assert asked(two, 100) == ("b", 5)


def test_each_address_has_its_own_back_off_and_progress_resets_them() -> None:
    two = addresses("a", "b")
    seen: list[tuple[str, float]] = []
    for _ in range(6):
        seen.append(asked(two, 0))
        two.move_on()
    assert seen == [("a", 0.5), ("b", 0.5), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    two.progressed()
    assert asked(two, 0) == ("a", 0.5)


@pytest.mark.parametrize("seconds", [1_000_000.0, float("inf"), 10.0**308])
def test_no_rest_is_longer_than_anybody_waits(seconds: float) -> None:
    one = addresses("a")
    one.rest(seconds, now=0)
    assert asked(one, 0) == ("a", 300)


def test_a_session_that_moved_is_looked_for_where_it_went() -> None:
    two = addresses("a", "b")
    two.move_to_front(Named("c"))
    two.move_to_front(Named("b"))
    assert len(two) == 3
    assert two.current.target == "b"
    two.move_on()
    assert two.current.target == "c"


# --- on sockets --------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(
    *servers: ScriptedServer, policy: ReconnectPolicy | None = None
) -> AsyncGenerator[tuple[Client, Received]]:
    """A handshake-era client of several addresses, with the numbers that everybody has."""
    received = Received()
    first, *more = [server.url() for server in servers]
    transport = resumable(first, *more, on_resume=received.on_resume, policy=policy)
    with anyio.fail_after(40):
        async with Client(transport, mode="legacy", message_handler=received.on_message) as client:
            yield client, received


def served_by(name: str) -> Any:
    """An entry for a tool that says where it ran."""

    def entry(exchange: Exchange) -> None:
        exchange.result(tool_result(name))

    return entry


def draining(method: str) -> Any:
    """An entry for ``*`` of a server that takes nothing new by that method."""

    def entry(exchange: Exchange) -> None:
        if exchange.method == method:
            exchange.respond(503, headers={"Retry-After": "15"})

    return entry


@pytest.mark.parametrize("method", ["initialize", "session/start", "tools/call"])
async def test_a_call_that_is_asked_to_wait_is_served_at_another_address_soon(method: str) -> None:
    async with (
        ScriptedServer({"*": draining(method)}) as first,
        ScriptedServer({"tools/call": served_by("second")}) as second,
    ):
        with anyio.fail_after(SOON):
            async with client_of(first, second) as (client, _):
                assert text_of(await client.call_tool("echo", {})) == "second"


async def test_a_resume_that_is_asked_to_wait_is_served_at_another_address_soon() -> None:
    def refusing(exchange: Exchange) -> None:
        if exchange.headers.get("mcp-session-id") == "transport-1":
            if exchange.method == "tools/call":
                exchange.respond(404)
        draining("session/resume")(exchange)

    async with (
        ScriptedServer({"*": refusing}) as first,
        ScriptedServer({"tools/call": served_by("second")}) as second,
        client_of(first, second) as (client, received),
    ):
        with anyio.fail_after(SOON):
            assert text_of(await client.call_tool("echo", {})) == "second"
        assert (await received.outcome()).recovered
        assert second.sessions == 0


async def test_a_server_that_says_it_drains_is_left_soon_if_there_is_another() -> None:
    """TKO11: what spreads its clients is that they do not all wait for this one."""
    async with (
        ScriptedServer() as first,
        ScriptedServer({"tools/call": served_by("second")}) as second,
        client_of(first, second) as (client, received),
    ):
        await first.has(lambda: first.stream, "the notification stream")
        first.push(
            "notifications/sessions/detached", sessionId="s-1", reason="draining", retryAfter=60
        )
        with anyio.fail_after(SOON):
            assert (await received.outcome()).connected_to == second.url()
            assert text_of(await client.call_tool("echo", {})) == "second"


async def test_whoever_waits_for_its_turn_goes_at_once_when_something_is_asked() -> None:
    """TKO11: a single address; its connection closed before its moment came."""
    async with ScriptedServer() as server, client_of(server) as (client, received):
        await server.has(lambda: server.stream, "the notification stream")
        server.push(
            "notifications/sessions/detached", sessionId="s-1", reason="draining", retryAfter=250
        )
        ended = iter([True])

        def gone(exchange: Exchange) -> None:
            if exchange.verb == "GET" and next(ended, False):
                exchange.respond(404)

        server.script["*"] = gone
        assert server.stream is not None
        server.stream.end()
        await server.has(lambda: len(server.asked("GET")) == 2, "the stream that is refused")
        with anyio.fail_after(SOON):
            await client.call_tool("echo", {})
            assert (await received.outcome()).recovered


class Nowhere:
    """A link over which nothing can be sent: HTTP, where nothing listens."""

    kind = "http"
    name = "http://nowhere/mcp"

    async def run(self, sink: Any, *, task_status: TaskStatus[None]) -> None: ...

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        raise Failed(Failure(FailureCause.UNREACHABLE, "nobody listens"))

    def configure(self, settings: LinkSettings) -> None: ...

    def listen(self) -> None: ...

    def abandon(self, request_id: object) -> None: ...

    async def close(self, *, leave: bool) -> None: ...


@pytest.mark.parametrize("session", [Session("s-1", resumable=False), None])
async def test_a_session_is_not_taken_up_where_nobody_listens(session: Session | None) -> None:
    """Over HTTP a link is open before anything was sent; modern era, where nothing is resumed."""

    async def unused(*_: object) -> None:
        raise AssertionError("nothing comes")

    peer = KnownServer("me")
    envelope = {PROTOCOL_VERSION_META: "2026-07-28"}
    peer.asked({"id": 1, "method": "tools/list", "params": {"_meta": envelope}})
    if session is not None:
        peer.sessions.begin(session)
    async with anyio.create_task_group() as tasks:
        runtime = Runtime(ReconnectPolicy(), tasks)
        control = SessionControl(
            runtime,
            ClientState(runtime, addresses()),
            peer,
            Application(Callbacks(unused, unused), runtime),
            Exchanges(timeout=5),
            Connector(runtime, peer, unused),
        )
        with pytest.raises(Failed, match="nobody listens"):
            await control.take_up(Nowhere())
