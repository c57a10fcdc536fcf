"""How long a session lives, how many there may be, and what is left when it has ended."""

import asyncio
from typing import Any

import pytest
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from mcp_sessions import SessionPolicy, current_session
from mcp_sessions.errors import ConfigurationError, LimitReached, StoreUnavailable
from mcp_sessions.ids import SessionId
from tests.support.raw import (
    Json,
    RawClient,
    call_params,
    in_session,
    initialize_params,
    keyed,
    text_of,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world


async def is_there(w: World, session: str) -> bool:
    """Whether the session is known to the store, looked at from the side."""
    record = await w.layer.store.load(SessionId(session), now=w.clock())
    return record is not None


# --- idle -----------------------------------------------------------------------------------


async def test_a_session_expires_when_nothing_was_asked_of_it() -> None:
    """SES14: at its deadline and not before; then it is unknown, and its traces are gone (END2).

    ERR1: resuming an expired session is ``-32043``.
    """
    async with world(idle_timeout=100) as w:
        session = (await w.client().start())["sessionId"]
        w.clock.advance(99)
        assert await w.expire() == 0
        w.clock.advance(1)
        error = await w.client().error("session/resume", {"sessionId": session})
        assert error["code"] == -32043  # by its deadline, not by the reaper's round
        assert await w.expire() == 1
        assert await w.layer.store.all_sessions() == []


async def test_every_request_moves_the_deadline() -> None:
    """SES14: whatever it asks for, and however it names the session."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        for _ in range(3):
            w.clock.advance(60)
            await client.text("echo", text="x")
            w.clock.advance(60)
            await w.client().text("echo", text="x", meta=in_session(session))
            await client.result("ping")
        w.clock.advance(99)
        assert await client.text("session_id") == session


async def test_a_notification_moves_no_deadline() -> None:
    """SES14: "from the last finished request"; a client that only chatters is idle."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        for _ in range(3):
            w.clock.advance(40)
            await client.notify("notifications/roots/list_changed")
            await cycles()
        assert not await is_there(w, session)


async def test_events_move_no_deadline() -> None:
    """SES14: what the server says is no sign of life of the client."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        for _ in range(3):
            w.clock.advance(40)
            await w.layer.notify_tools_changed()
        assert not await is_there(w, session)
        assert await w.expire() == 2


async def test_idle_time_counts_from_the_end_of_a_request() -> None:
    """SES14: "Idle time counts from the last finished request"."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        running = await w.waits(client.call("wait", gate="g"))
        w.clock.advance(90)
        w.box.gate("g").go.set()
        await running.result()

        w.clock.advance(99)
        assert await w.expire() == 0
        assert await client.text("session_id") == session


@pytest.mark.parametrize("rounds", [0, 1, 5])
async def test_a_busy_session_is_never_reaped(rounds: int) -> None:
    """SES14, SES15: "a busy session is never reaped", nor is the connection that carries the
    request, however long that runs and however rarely anybody looks.
    """
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        running = await w.waits(client.call("wait", gate="g"))
        for _ in range(rounds):
            w.clock.advance(90)
            assert await w.expire() == 0
        w.clock.advance(1_000)
        assert await client.text("session_id") == session
        assert await w.expire() == 0
        w.box.gate("g").go.set()

        assert text_of(await running.result()) == "through g"
        w.clock.advance(99)
        assert await client.text("session_id") == session


async def test_a_session_that_cannot_be_forgotten_yet_keeps_no_other_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """END2: the store says once that a session has ended; what follows is done for each of them,
    and for the one whose turn came while the store was away in the next round.
    """
    async with world(idle_timeout=100, max_lifetime=100) as w:
        streams: list[Any] = []
        for _ in range(3):
            client = await w.connected()
            streams.append(await client.get().started())
            await client.start()
        detach, failures = w.layer.store.detach, [StoreUnavailable("it is away")]

        async def fails_once(*of: Any) -> bool:
            if failures:
                raise failures.pop()
            return await detach(*of)

        monkeypatch.setattr(w.layer.store, "detach", fails_once)
        w.clock.advance(100)

        assert await w.expire() == 6
        assert not failures
        await cycles()
        assert [stream.ended for stream in streams].count(False) == 1
        assert await w.expire() == 0
        for stream in streams:
            await stream.done()


async def test_a_busy_session_is_alive_past_its_idle_deadline() -> None:
    """SES14: between two rounds of the reaper, as when a laptop wakes up: changes reach it, and
    its handler can ask its client; both found it expired.
    """
    async with world(idle_timeout=100) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        stream = await client.get().started()
        await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        await client.result("resources/subscribe", {"uri": "a:2", "_meta": in_session(None)})

        async def later(ctx: Ctx, arguments: Json) -> str:
            await w.box.gate("g").arrive()
            return await w.box.tools["ask_standalone"](ctx, {"question": "?"})

        w.box.tools["later"] = later
        running = await w.waits(client.call("later"))
        w.clock.advance(36_000)

        await w.layer.notify_resource_updated("a:1")
        await w.layer.notify_resource_updated("a:2")
        assert uris(await stream.has(2)) == ["a:1", "a:2"]
        w.box.gate("g").go.set()
        question = (await stream.has(3))[2]
        await client.respond(question, {"action": "decline"})
        assert text_of(await running.result()) == "decline: None"


async def test_a_request_without_a_listener_still_holds_its_session() -> None:
    """SES14: its client may come back for the answer."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        await client.start()
        running = await w.waits(client.call("wait", gate="g"))
        await running.reply.started()
        await running.reply.gone()
        for _ in range(5):
            w.clock.advance(90)
            assert await w.expire() == 0
        w.box.gate("g").go.set()
        await cycles()

        position = running.reply.events[0].id
        assert "result" in await client.get(position).answer(running.id)


# --- absolute ---------------------------------------------------------------------------------


async def test_a_session_ends_at_its_absolute_lifetime_however_busy() -> None:
    """SES15: "Idle *and* absolute lifetime"; what runs is cancelled and answered."""
    async with world(idle_timeout=100, max_lifetime=300) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        other = await w.connected()
        running = await w.waits(other.call("wait", gate="g", meta=in_session(session)))
        for _ in range(3):
            w.clock.advance(90)
            await client.text("echo", text="x")
            assert await w.expire() == 0
        w.clock.advance(30)

        assert await w.expire() >= 1
        assert (await running.error())["code"] == -32043
        await w.box.gate("g").cancelled.wait()
        assert not await is_there(w, session)


async def test_expires_at_is_the_earlier_of_both() -> None:
    """``expiresAt`` promises no more than the session has."""
    async with world(idle_timeout=100, max_lifetime=150) as w:
        w.clock.now = 1_800_000_000.0
        client = w.client()
        started = await client.start()
        assert started["expiresAt"] == "2027-01-15T08:01:40Z"
        w.clock.advance(90)
        resumed = await client.resume(started["sessionId"])
        assert resumed["expiresAt"] == "2027-01-15T08:02:30Z"


async def test_a_transport_mode_session_ends_at_its_lifetime_too() -> None:
    """404, and its client initializes anew."""
    async with world(idle_timeout=100, max_lifetime=150) as w:
        client = await w.connected()
        stream = await client.get().started()
        w.clock.advance(90)
        await client.text("echo", text="x")
        w.clock.advance(60)
        await w.expire()

        await stream.done()
        assert (
            await client.post({"jsonrpc": "2.0", "id": 1, "method": "ping"}).done()
        ).status == 404


# --- how many ---------------------------------------------------------------------------------


async def test_the_number_of_sessions_is_bounded() -> None:
    """SES15: "cap per process"; ``-31011`` with the limit's name; of both modes."""
    async with world(max_sessions=3) as w:
        client = await w.connected()
        for _ in range(2):
            await client.start()

        error = await client.error("session/start")
        refused = await w.client().send("initialize", _HANDSHAKE).error()

        assert (error["code"], error["data"]["limit"]) == (-31011, "max_sessions")
        assert (refused["code"], refused["data"]["limit"]) == (-31011, "max_sessions")
        assert await client.text("echo", text="x") == "x"


_HANDSHAKE: Json = initialize_params("x")


async def test_the_sessions_of_one_principal_are_bounded() -> None:
    """SES15: "and per principal": one that has too many hinders nobody else."""
    async with world(max_sessions_per_principal=2) as w:

        async def user(subject: str) -> RawClient:
            token = AccessToken(token=subject, client_id="c", scopes=[], subject=subject)
            return RawClient(await w.carrier_of(AuthenticatedUser(token)))

        greedy, other = await user("greedy"), await user("other")
        sessions = [(await greedy.start())["sessionId"] for _ in range(2)]
        error = await greedy.error("session/start")
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_sessions_per_principal")
        await other.start()
        await greedy.end(sessions[0])
        await greedy.start()


async def test_expired_sessions_make_room() -> None:
    """SES15: whoever is refused is refused for sessions that live."""
    async with world(max_sessions=2, idle_timeout=100) as w:
        await w.client().start()
        kept = (await w.client().start())["sessionId"]
        w.clock.advance(60)
        await w.client().resume(kept)
        w.clock.advance(60)

        await w.client().start()

        assert (await w.client().error("session/start"))["code"] == -31011
        await w.client().resume(kept)


async def test_no_session_is_evicted_for_another() -> None:
    """SES15, SES20: a session with work in flight is not, nor one that a client started; and
    no other, up to a minute after it was used.
    """
    async with world(max_sessions=2) as w:
        client = await w.connected()
        await client.start()
        running = await w.waits(client.call("wait", gate="g"))
        for _ in range(3):
            assert (await w.client().error("session/start"))["code"] == -31011
        w.box.gate("g").go.set()
        assert text_of(await running.result()) == "through g"


async def test_sessions_that_nobody_uses_make_room_where_no_one_can_be_asked() -> None:
    """SES20: a client that leaves a connection behind for each call fills the server alone. Those
    go, those that were used for longer do not, and whoever's is gone initializes again.
    """
    async with world(max_sessions=300, min_evictable_idle_time=60) as w:
        person = await w.connected()
        w.clock.advance(90)
        assert await person.text("echo", text="x") == "x"
        listening = await w.connected()
        await listening.get().started()
        running = await w.connected()
        call = await w.waits(running.call("wait", gate="g"))
        left = [await w.connected() for _ in range(297)]
        for _ in range(2):
            refused = await w.client().send("initialize", _HANDSHAKE).error()
            assert (refused["code"], refused["data"]["limit"]) == (-31011, "max_sessions")
            w.clock.advance(30)

        newcomers = await asyncio.gather(*(w.connected() for _ in range(10)))

        # Many at once, and not once for each who comes.
        assert len(await w.layer.store.all_sessions()) == 300 - 256 + 10
        for client in (person, listening, *newcomers):
            assert await client.text("echo", text="x") == "x"
        w.box.gate("g").go.set()
        assert text_of(await call.result()) == "through g"
        reply = await left[0].send("tools/list").reply.done()
        assert reply.status == 404


async def test_a_principals_own_limit_ends_unowned_session() -> None:
    """SES20: others' sessions are not in its way."""
    async with world(max_sessions_per_principal=1) as w:
        token = AccessToken(token="x", client_id="c", scopes=[], subject="x")
        user = RawClient(await w.carrier_of(AuthenticatedUser(token)))
        await user.start()
        unowned = await w.connected()
        w.clock.advance(61)

        assert (await user.error("session/start"))["code"] == -31011
        assert await unowned.text("echo", text="x") == "x"
        w.clock.advance(61)
        await w.connected()
        assert (await unowned.send("tools/list").reply.done()).status == 404


LARGE = "x" * 100_000


@pytest.mark.parametrize("member", ["clientInfo", "capabilities", "_meta", "unknown"])
async def test_of_what_a_client_says_of_itself_is_kept_what_is_read_and_that_is_bounded(
    member: str, w: World
) -> None:
    """ERR6: a session keeps it as long as it lives, and every replica reads it."""
    params: Json = initialize_params("x", capabilities={"roots": {}})
    large = {"title": LARGE, "experimental": {"x": {"y": LARGE}}}
    params[member] = params.get(member, {}) | large
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}

    answer = (await w.client().post(request).done()).json

    records = await w.layer.store.all_sessions()
    if member in ("clientInfo", "capabilities"):
        assert answer["error"]["code"] == -31011
        assert answer["error"]["data"]["limit"] == "max_client_bytes"
        assert records == []
    else:
        assert answer["result"]["protocolVersion"] == "2025-11-25"
        peers = [record.client.peer for record in records]
        assert [peer and peer.initialize_params for peer in peers] == [
            {name: value for name, value in params.items() if name != member}
        ]


async def test_a_session_keeps_no_copy_of_what_its_connections_client_said(w: World) -> None:
    """Whoever uses it later says so again; what it can be asked, and its name, are enough."""
    capabilities = {"roots": {"listChanged": True}, "experimental": {"x": {"y": "z" * 9_000}}}
    client = await w.connected(capabilities=capabilities)
    session = (await client.start())["sessionId"]

    record = await w.layer.store.load(SessionId(session), now=w.clock())
    assert record is not None and record.client.peer is not None
    assert record.client.peer.protocol_version == "2025-11-25"
    assert len(str(record.client.peer.initialize_params)) < 200
    assert record.client.peer.initialize_params == {
        "capabilities": {"roots": {}},
        "clientInfo": {"name": "raw", "version": "1"},
    }


async def test_a_handler_whose_data_is_too_large_is_notified_which_limit() -> None:
    """It is not stored, and the session goes on with what there was."""
    async with world(max_data_bytes=1_000) as w:

        async def remember(ctx: Ctx, arguments: Json) -> str:
            try:
                async with current_session().data.edit() as data:
                    data["value"] = "x" * arguments["size"]
            except LimitReached as reached:
                return reached.limit
            return "stored"

        w.box.tools["remember"] = remember
        client = await w.connected()
        session = (await client.start())["sessionId"]
        assert await client.text("remember", size=900) == "stored"
        assert await client.text("remember", size=1_000) == "max_data_bytes"
        kept = await w.layer.store.load_data(SessionId(session))
        assert kept is not None and kept.value == {"value": "x" * 900}


async def test_subscriptions_are_bounded() -> None:
    """REQ8: ``-31011`` with the limit's name; one that is there already is no new one."""
    async with world(max_subscriptions=2) as w:
        client = await w.connected()
        for uri in ("a:1", "a:2", "a:1"):
            await client.result("resources/subscribe", {"uri": uri})

        error = await client.error("resources/subscribe", {"uri": "a:3"})
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_subscriptions")
        await client.result("resources/unsubscribe", {"uri": "a:1"})
        await client.result("resources/subscribe", {"uri": "a:3"})


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_a_positive_number(wrong: float) -> None:
    """A policy that cannot be kept is refused when it is made."""
    with pytest.raises(ConfigurationError, match="idle_timeout"):
        SessionPolicy(idle_timeout=wrong)


# --- the end leaves nothing -------------------------------------------------------------------


@pytest.mark.in_memory
@pytest.mark.parametrize("end", ["session/end", "expiry"])
async def test_the_end_removes_every_trace(end: str) -> None:
    """END2: "remove every trace (session, events, leases …)": in the store and running."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        await client.result("resources/subscribe", {"uri": "a:1"})
        await client.call("echo", text="x", meta=keyed("k")).result()
        await client.text("update", uri="a:1")
        if end == "session/end":
            await client.end(session)
        else:
            w.clock.advance(60)
            await w.client().start()
            await client.text("session_id", meta=in_session(None))
            w.clock.advance(60)
            await w.expire()

        store: Any = w.layer.store
        registry: Any = w.inside.connections
        host: Any = w.inside.runner
        assert session not in store._sessions
        assert store._by_uri == {}
        assert session not in registry._used_on
        assert all(session not in connection.attached for connection in registry.all())
        assert all(session not in c.upstream_peers for c in registry.all())
        assert session not in host.held
        assert host.calls._by_key == {}
        log = store._sessions[client.session_id].streams["get"]
        assert len(log) == 0


async def test_a_late_write_does_not_bring_a_session_back(w: World) -> None:
    """SES18: "a late write or touch cannot re-create a deleted session": by the handler that
    was cancelled with it, by its kept channel, by its handle.
    """
    results: list[str] = []

    async def late(ctx: Ctx, arguments: Json) -> str:
        from mcp_sessions import current_session

        session = current_session()
        try:
            await w.box.gate("g").arrive()
        except asyncio.CancelledError:
            for attempt in (
                lambda: session.notify("notifications/x"),
                lambda: _edit(session),
                lambda: session.data.read(),
            ):
                try:
                    await attempt()
                    results.append("done")
                except Exception as error:
                    results.append(type(error).__name__)
            await ctx.session.send_resource_updated("a:1")
            w.box.gate("over").started.set()
            raise
        return "not cancelled"

    w.box.tools["late"] = late
    client = await w.connected()
    session = (await client.start())["sessionId"]
    running = await w.waits(client.call("late"))

    await client.end(session)
    await w.box.gate("over").started.wait()

    assert (await running.error())["code"] == -32043
    assert results == ["SessionNotFound"] * 3
    assert not await is_there(w, session)
    assert (await client.error("tools/list", call_params("x", {}, in_session(session))))[
        "code"
    ] == -32043


async def _edit(session: Any) -> None:
    async with session.data.edit() as data:
        data["x"] = 1
