"""WebSocket over real sockets: the frames, the limits, the closing, both eras."""

import asyncio
import logging
from typing import Any

import pytest
from fastapi import FastAPI
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer
from mcp_sessions.ids import SessionId, digest
from mcp_sessions_transports.websocket.close_codes import FINAL, CloseCode, should_come_back
from tests.support import apps
from tests.support.children import child
from tests.support.duplex import (
    DECLARED,
    ELICITS,
    WITHIN,
    DuplexWorld,
    duplex_world,
    listening,
    pipe,
    websocket,
)
from tests.support.interposed import Interposed
from tests.support.modern import ACKNOWLEDGED, SUBSCRIPTION_ID, wanted
from tests.support.raw import (
    EXTENSION,
    SESSION,
    at_most,
    call_params,
    in_session,
    initialize_params,
    keyed,
    text_of,
    uris,
)
from tests.support.world import Gate, Toolbox

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

KINDS = ("websocket", "stdio")
"""Common behaviour is tested on both bindings."""


async def refused(url: str, **options: Any) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as refusal:
        async with websocket(url, **options):
            pass
    return refusal.value


def connections(world: DuplexWorld) -> list[Any]:
    return world.inside.connections.all()


# --- the handshake ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "selected"),
    [((), None), (("mcp",), "mcp"), (("other", "mcp"), "mcp"), (("other",), None)],
)
async def test_subprotocol_mcp_is_selected_when_offered_and_nothing_else_ever(
    offered: tuple[str, ...], selected: str | None
) -> None:
    """Select it, and only it, when offered; node clients refuse anything else."""
    async with duplex_world() as world:
        peer = await world.websocket(subprotocols=offered)
        assert peer.connection.subprotocol == selected
        assert (await peer.initialize())["serverInfo"]["name"] == "tools"


async def test_a_foreign_origin_is_refused_before_accept() -> None:
    """SEC9: as for HTTP, with HTTP's own status."""
    async with duplex_world() as world:
        foreign = await refused(world.url, origin="https://evil.example")
        assert foreign.response.status_code == 403
        assert connections(world) == []
        async with websocket(world.url, origin="http://localhost:3000") as peer:
            await peer.initialize()


async def test_a_foreign_host_is_refused_as_over_http() -> None:
    """SEC9. ``Host`` cannot be replaced in a stock client: the settings are."""
    settings = TransportSecuritySettings(
        enable_dns_rebinding_protection=True, allowed_hosts=["mcp.example"], allowed_origins=[]
    )
    layer = SessionLayer(Toolbox().server)
    app = layer.asgi_app(security=settings)
    async with layer.lifespan(), listening(app) as port:
        assert (await refused(f"ws://127.0.0.1:{port}/mcp")).response.status_code == 421


async def test_another_path_is_no_endpoint() -> None:
    """Same path as HTTP."""
    async with duplex_world() as world:
        other = await refused(f"ws://127.0.0.1:{world.port}/other")
        assert other.response.status_code in (403, 404)


# --- frames and limits -----------------------------------------------------------------------


async def test_a_binary_frame_closes_1003() -> None:
    """SEC9."""
    async with duplex_world() as world:
        peer = await world.websocket()
        await peer.initialize()
        await peer.connection.send(b"{}")
        assert (await peer.closed())[0] == 1003


async def test_a_message_is_too_big_above_the_limit_and_not_at_it() -> None:
    """WSS5: 1009 is ours, also inside somebody else's uvicorn, which allows 16 MiB."""
    async with duplex_world(max_message=2_000) as world:
        peer = await world.websocket()
        await peer.initialize()
        ping = '{"jsonrpc":"2.0","id":"p","method":"ping","params":{"pad":"%s"}}'
        pad = 2_000 - len(ping % "")
        await peer.put(ping % ("x" * pad))
        assert "result" in await peer.answer("p")
        # Counted in bytes, not in characters.
        await peer.put(ping % ("ä" * (pad // 2) + "xx"))
        assert await peer.closed() == (1009, "message too big: max_message is 2000 bytes")


async def test_a_client_that_refuses_a_message_as_too_large_is_notified_of_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, with how large it was: nobody else knows why the client went."""
    async with duplex_world() as world:
        peer = await world.websocket()
        await peer.initialize()
        await peer.text("echo", text="x" * 30_000)
        await peer.connection.close(1009)
        await peer.until(lambda: "a message was too large" in caplog.text, "the log")

    [line] = [r.getMessage() for r in caplog.records if "a message was too large" in r.getMessage()]
    assert int(line.split()[-2]) > 30_000


async def test_who_says_nothing_is_closed_1008() -> None:
    """WSS16: init timeout. A client that has sent a message may be silent for any time."""
    async with duplex_world(init_timeout=0.05) as world:
        silent = await world.websocket()
        speaking = await world.websocket()
        await speaking.initialize()
        assert await silent.closed() == (1008, "nothing was said: init_timeout is 0.05 s")
        assert await speaking.text("echo", text="still here") == "still here"


async def test_a_peer_that_takes_nothing_is_closed_1013_and_delays_nobody() -> None:
    """ATT7. The writer waited for the network and nobody waited for the cut: such
    a peer was never closed.
    """
    steps, detached = Interposed(), Gate()
    steps.after["detach"] = detached.arrive
    detached.go.set()
    limits: dict[str, Any] = {"send_buffer": 20_000, "slow_timeout": 0.3}
    async with duplex_world(store=steps.store, send_buffer_of_kernel=16_384, **limits) as world:
        slow = await world.websocket(receive_buffer=4_096)
        await slow.initialize()
        other = await world.connected()
        session_id = (await slow.start())["sessionId"]
        others = (await other.start())["sessionId"]
        await slow.stall()
        flood = [f"note://{number}/{'x' * 800}" for number in range(300)]
        await world.publish(session_id, *flood)
        await world.publish(others, "note://a", "note://b")
        assert uris(await other.has_events(2)) == ["note://a", "note://b"]
        assert await other.text("echo", text="quick") == "quick"
        await at_most(WITHIN, detached.started.wait())
        assert len(connections(world)) == 1
        slow.unstall()
        code, reason = await slow.closed()
        assert code == 1013
        assert reason == "too slow: slow_timeout is 0.3 s; come back in 1 s"
        # It comes back, and has lost nothing.
        seen = slow.events[-1]["params"]["sessionEventId"] if slow.events else None
        again = await world.connected()
        answer = await again.resume(session_id, seen or flood[0])
        assert answer["catchup"] is (seen is not None)
        if seen is not None:
            rest = flood[len(slow.events) :]
            assert uris(await again.has_events(len(rest))) == rest


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_wrong_with_a_message_is_answered_with_id_null(kind: str) -> None:
    """JSON-RPC 5.1; 2025-06-18 removed batches. The connection goes on."""
    async with duplex_world() as world:
        peer = await world.connected(kind)
        await peer.put("{not json")
        await peer.put('[{"jsonrpc":"2.0","id":1,"method":"ping"}]')
        await peer.put('{"jsonrpc":"2.0","id":1.5,"method":"ping"}')
        # Where the id can be read, it is that message's answer: its sender waits for it.
        await peer.put('{"jsonrpc":"1.0","id":"old","method":"ping"}')
        assert (await peer.answer("old"))["error"]["code"] == -32600
        assert await peer.text("echo", text="on") == "on"
        errors = [m["error"]["code"] for m in peer.messages if m.get("id", 0) is None]
        assert errors == [-32700, -32600, -32600]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_connection_subscribes_to_outside_of_a_session_is_bounded(kind: str) -> None:
    """ERR6: as what a session does; it is kept as long as the connection is open."""
    async with duplex_world(
        max_subscriptions=2, max_uri_bytes=20, max_subscription_bytes=30
    ) as world:
        peer = await (world.websocket() if kind == "websocket" else world.pipe())
        await peer.initialize()
        await peer.result("resources/subscribe", {"uri": "a" * 20})
        for uri, limit in (("b" * 21, "max_uri_bytes"), ("c" * 11, "max_subscription_bytes")):
            error = await peer.error("resources/subscribe", {"uri": uri})
            assert (error["code"], error["data"]["limit"]) == (-31011, limit)
        for _ in range(2):
            await peer.result("resources/subscribe", {"uri": "d"})
        error = await peer.error("resources/subscribe", {"uri": "e"})
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_subscriptions")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_says_too_much_of_itself_is_refused_and_may_say_less(kind: str) -> None:
    """ERR6: what it says is kept as long as its connection is open."""
    async with duplex_world(max_client_bytes=1_000) as world:
        peer = await (world.websocket() if kind == "websocket" else world.pipe())
        info = {"name": "x" * 1_000, "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}

        error = await peer.error("initialize", params)

        assert (error["code"], error["data"]["limit"]) == (-31011, "max_client_bytes")
        assert (await peer.initialize())["serverInfo"]["name"] == "tools"


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_served_before_initialize_but_what_names_a_session(kind: str) -> None:
    """``session/*``, ``sessions/*`` and rule-1 requests need no handshake; all else does."""
    async with duplex_world() as world:
        open_ = world.websocket if kind == "websocket" else world.pipe
        peer = await open_()
        assert "error" in await peer.answer(await peer.send("tools/list"))
        assert (await peer.error("tools/call", call_params("echo", {"text": "x"})))["code"] < 0
        session_id = (await peer.result("sessions/create"))["session"]["sessionId"]
        named = in_session(session_id)
        assert await peer.text("echo", text="named", meta=named) == "named"
        assert "result" in await peer.answer(await peer.send("ping"))
        await peer.initialize()
        assert "tools" in await peer.result("tools/list")
        assert world.inner.box.calls == ["echo"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_handshake_advertises_sessions(kind: str) -> None:
    """``capabilities.sessions`` at top level, and our settings among the extensions."""
    async with duplex_world() as world:
        peer = await (world.websocket() if kind == "websocket" else world.pipe())
        capabilities = (await peer.initialize())["capabilities"]
        assert capabilities["sessions"] == {}
        assert "websocket" in capabilities["extensions"][EXTENSION]["transports"]


@pytest.mark.parametrize("kind", KINDS)
async def test_progress_logging_questions_and_cancellation_travel_on_the_connection(
    kind: str,
) -> None:
    """Messages of a handler on its request's channel go to the connection, unnumbered."""
    async with duplex_world() as world:
        peer = await world.connected(kind, capabilities=ELICITS)
        await peer.text("progress", steps=2, meta={"progressToken": "t"})
        progress = [m["params"] for m in peer.notifications if "progress" in m["params"]]
        assert [(p["progressToken"], p["progress"]) for p in progress] == [("t", 1), ("t", 2)]
        await peer.text("log", text="a line")
        assert (await peer.notified("notifications/message"))["params"]["data"] == "a line"
        asking = await peer.call("ask", question="why?")
        question = await peer.question()
        assert question["method"] == "elicitation/create"
        await peer.respond(question, {"action": "accept", "content": {"answer": "because"}})
        assert text_of((await peer.answer(asking))["result"]) == "accept: because"
        gate = world.inner.box.gate("g")
        waiting = await peer.call("wait", gate="g")
        await at_most(WITHIN, gate.started.wait())
        await peer.notify("notifications/cancelled", {"requestId": waiting})
        await at_most(WITHIN, gate.cancelled.wait())
        assert "error" in await peer.answer(waiting)
        assert peer.events == []


@pytest.mark.parametrize("kind", KINDS)
async def test_two_open_requests_with_one_id_are_refused(kind: str) -> None:
    """REQ1: ``duplicate_id`` for the second. REQ2: it is refused before anything, so its key is not
    left behind as running.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind)
        await peer.start()
        gate = world.inner.box.gate("g")
        await peer.send("tools/call", call_params("wait", {"gate": "g"}), request_id="same")
        await at_most(WITHIN, gate.started.wait())
        again = call_params("echo", {"text": "x"}, keyed("k"))
        for method, params in (("ping", None), ("tools/call", again)):
            refused = len(peer.messages)
            await peer.send(method, params, request_id="same")
            await peer.until(lambda n=refused: len(peer.messages) > n, "it is refused")
            assert peer.messages[-1]["error"]["data"]["reason"] == "duplicate_id"
        gate.go.set()
        await peer.until(lambda: [m for m in peer.messages if m.get("result", {}).get("content")])
        assert gate.arrivals == 1
        assert text_of(await peer.result("tools/call", again)) == "x"


@pytest.mark.parametrize("kind", KINDS)
async def test_bare_subscriptions_and_list_changes_reach_the_connection(kind: str) -> None:
    """Bare copies only for its own session-less subscriptions; without sessions all is as
    it would be without us.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind)
        await peer.result("resources/subscribe", {"uri": "note://a"})
        await world.layer.notify_resource_updated("note://b")
        await world.layer.notify_resource_updated("note://a")
        await world.layer.notify_tools_changed()
        await peer.notified("notifications/tools/list_changed")
        assert uris(peer.notifications) == ["note://a", "notifications/tools/list_changed"]
        assert peer.events == []
        # With a session here, list changes are sent by it, once.
        await peer.start()
        await world.layer.notify_tools_changed()
        await peer.has_events(1)
        assert await peer.text("echo", text="x") == "x"
        assert len(peer.notifications) == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_what_gets_no_answer_leaves_nothing_behind(kind: str) -> None:
    """END2. Each notification and each answer left a request channel on its connection,
    until the connection ended.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind)
        session_id = (await peer.start())["sessionId"]
        for _ in range(10):
            await peer.notify("notifications/roots/list_changed")
            await peer.respond({"id": "nobody asked"}, {})
            await peer.text("echo", text="x")
            await peer.resume(session_id)
        (connection,) = connections(world)
        assert not connection.transport.channels
        assert not world.inner.layer._assembly.runner.calls.has(connection.id)  # pyright: ignore[reportPrivateUsage]


# --- the modern era --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_an_ordinary_connection_is_no_line_for_an_operator(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many there are. The start and the end of a session are a line each."""
    for name in ("mcp_sessions", "mcp_sessions_transports"):
        caplog.set_level(logging.DEBUG, name)
    async with duplex_world() as w:
        # What the server says at its start is said once.
        caplog.clear()
        peer = await w.connected(kind)
        session = (await peer.start())["sessionId"]
        assert await peer.text("echo", text="x") == "x"
        await peer.result("session/end", {"sessionId": session})
    said = [each for each in caplog.records if each.name.startswith("mcp_sessions")]
    for_operators = [each.getMessage() for each in said if each.levelname != "DEBUG"]
    name = digest(session)
    assert for_operators == [
        f"session {name} started (protocol)",
        f"session {name} ended: its client ended it",
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_modern_client_needs_no_handshake(kind: str) -> None:
    """Both eras on one kind of connection; results of ours carry ``resultType``."""
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        discovered = await peer.result("server/discover")
        assert discovered["capabilities"]["sessions"] == {}
        started = await peer.start()
        assert started["resultType"] == "complete"
        session_id = started["sessionId"]
        # In the modern era every request names its session: nothing became current.
        assert await peer.text("session_id") == "none"
        result = await peer.result(
            "tools/call", call_params("session_id"), meta=in_session(session_id)
        )
        assert text_of(result) == session_id
        assert result["_meta"][SESSION]["sessionId"] == session_id


@pytest.mark.parametrize("kind", KINDS)
async def test_a_modern_connection_does_not_serve_requests_without_an_envelope(kind: str) -> None:
    """As the SDK on its own pipe. After one modern request the gate stood open: requests
    without an envelope were served, under no protocol version in particular.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        await peer.result("tools/list")
        await peer.post({"jsonrpc": "2.0", "id": "bare", "method": "tools/list"})
        assert "error" in await peer.answer("bare")
        await peer.post({"jsonrpc": "2.0", "id": "init", "method": "initialize", "params": {}})
        assert "error" in await peer.answer("init")
        assert "tools" in await peer.result("tools/list")


@pytest.mark.parametrize("kind", KINDS)
async def test_who_asked_which_versions_there_are_may_continue_with_a_handshake(kind: str) -> None:
    """WSS10: clients that speak both eras do, if they are refused. Until then nothing else is
    served without an envelope.
    """
    handshake = initialize_params("both")
    bare = {"jsonrpc": "2.0", "id": "bare", "method": "tools/list"}
    hello = {"jsonrpc": "2.0", "id": "init", "method": "initialize", "params": handshake}
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        await peer.result("server/discover")
        await peer.post(bare)
        assert "error" in await peer.answer("bare")
        await peer.post(hello)
        assert (await peer.answer("init"))["result"]["protocolVersion"] == "2025-11-25"
        await peer.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        await peer.post({**bare, "id": "then"})
        assert "tools" in (await peer.answer("then"))["result"]
    async with duplex_world(server=child("dies", "licence")) as world:
        peer = await world.connected(kind, modern=True)
        refused = await peer.answer(await peer.send("server/discover", {}))
        await peer.post(hello)
        for each in (refused, await peer.answer("init")):
            assert "the licence is missing" in each["error"]["message"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_without_an_envelope_may_name_a_session_after_a_modern_one(
    kind: str,
) -> None:
    """WSS10: it is of the handshake era. It was taken for one of a client whose handshake says
    what an envelope says, and the connection was closed.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        await peer.result("server/discover")
        session_id = (await peer.start())["sessionId"]
        params = {**call_params("session_id"), "_meta": in_session(session_id)}
        call = {"jsonrpc": "2.0", "id": "bare", "method": "tools/call", "params": params}
        await peer.post(call)
        assert text_of((await peer.answer("bare"))["result"]) == session_id
        assert "tools" in await peer.result("tools/list")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_listen_of_a_session_sets_its_filter_and_stamps_its_events(kind: str) -> None:
    """Events are pushed on the connection in each era; a listen only sets the filter and
    adds ``subscriptionId``; a newer one ends the older with its completion result.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        session_id = (await peer.start())["sessionId"]
        await world.publish(session_id, "note://before")
        await peer.has_events(1)
        meta = in_session(session_id)
        first = await peer.send(
            "subscriptions/listen", {"notifications": wanted("note://a")}, meta=meta
        )
        acknowledged = await peer.notified(ACKNOWLEDGED)
        assert acknowledged["params"]["_meta"][SUBSCRIPTION_ID] == first
        await world.layer.notify_tools_changed()
        await world.layer.notify_resource_updated("note://b")
        await world.layer.notify_resource_updated("note://a")
        events = await peer.has_events(2)
        assert uris(events) == ["note://before", "note://a"]
        assert events[1]["params"]["_meta"][SUBSCRIPTION_ID] == first
        assert SUBSCRIPTION_ID not in events[0]["params"]["_meta"]
        second = await peer.send(
            "subscriptions/listen",
            {"notifications": wanted(lists=("tools",))},
            meta=meta,
        )
        ended = await peer.answer(first)
        assert ended["result"]["resultType"] == "complete"
        await world.layer.notify_tools_changed()
        assert (await peer.has_events(3))[2]["params"]["_meta"][SUBSCRIPTION_ID] == second


@pytest.mark.parametrize("kind", KINDS)
async def test_a_listen_of_a_session_can_be_cancelled_and_its_id_is_taken(kind: str) -> None:
    """On a pipe a listen ends by ``notifications/cancelled``: nothing ended it but the end of
    the session, and its id could be used again meanwhile.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        session_id = (await peer.start())["sessionId"]
        params = {"notifications": wanted("note://a")}
        meta = in_session(session_id)
        await peer.send("subscriptions/listen", params, meta=meta, request_id="l")
        await peer.notified(ACKNOWLEDGED)
        await peer.send("tools/list", request_id="l")
        assert (await peer.answer("l"))["error"]["data"]["reason"] == "duplicate_id"
        peer.messages.clear()
        await peer.notify("notifications/cancelled", {"requestId": "l"})
        assert "error" in await peer.answer("l")
        # The filter outlives it; without a listen events are not stamped.
        await world.layer.notify_resource_updated("note://a")
        (event,) = await peer.has_events(1)
        assert SUBSCRIPTION_ID not in event["params"]["_meta"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [True, False])
async def test_a_modern_notification_leaves_the_connection_open(kind: str, named: bool) -> None:
    """One that named a session, such as a cancellation by key, tore the connection down: it
    was taken for one of the handshake era, whose sender the wrapped server would know.
    """
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        session_id = (await peer.start())["sessionId"]
        call = await peer.send(
            "tools/call", call_params("wait", {"gate": "g"}), meta=keyed("k", session_id)
        )
        await at_most(WITHIN, world.inner.box.gate("g").started.wait())
        await peer.notify("notifications/roots/list_changed", {"_meta": in_session(session_id)})
        meta = keyed("k", session_id) if named else {}
        params = {"requestId": "of no interest" if named else call, "_meta": meta}
        await peer.notify("notifications/cancelled", params)
        await at_most(WITHIN, world.inner.box.gate("g").cancelled.wait())
        assert "error" in await peer.answer(call)
        assert "tools" in await peer.result("tools/list")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_a_session_ends_its_listen(kind: str) -> None:
    """Ended elsewhere: the listen is answered -32043."""
    async with duplex_world() as world:
        peer = await world.connected(kind, modern=True)
        session_id = (await peer.start())["sessionId"]
        params = {"notifications": wanted("note://a")}
        listen = await peer.send("subscriptions/listen", params, meta=in_session(session_id))
        await peer.notified(ACKNOWLEDGED)
        await world.layer.sessions.end(SessionId(session_id))
        assert (await peer.answer(listen))["error"]["code"] == -32043


# --- the end ---------------------------------------------------------------------------------


async def test_drain_notifies_who_knows_us_and_closes_everyone_1012() -> None:
    """WSS17: ``detached {draining, retryAfter}`` first, then what runs, then 1012."""
    async with duplex_world(reconnect_spread=7) as world:
        knowing = await world.websocket(capabilities=DECLARED)
        plain = await world.websocket()
        for peer in (knowing, plain):
            await peer.initialize()
        session_id = (await knowing.start())["sessionId"]
        await plain.start()
        gate = world.inner.box.gate("g")
        running = await knowing.call("wait", gate="g")
        await at_most(WITHIN, gate.started.wait())
        draining = asyncio.create_task(world.layer.drain(WITHIN))
        notified = await knowing.notified("notifications/sessions/detached")
        assert notified["params"] == {
            "sessionId": session_id,
            "reason": "draining",
            "retryAfter": 7,
        }
        # Nobody new is admitted, only to be cut again.
        away = await refused(world.url)
        assert away.response.status_code == 503
        assert away.response.headers["Retry-After"] == "7"
        gate.go.set()
        assert text_of((await knowing.answer(running))["result"]) == "through g"
        assert (await knowing.closed())[0] == 1012
        assert (await plain.closed())[0] == 1012
        assert [m["method"] for m in plain.notifications] == []
        await at_most(WITHIN, draining)


async def test_what_a_draining_server_refuses_on_an_open_connection_did_not_begin() -> None:
    """ERR15: the error says what over HTTP the 503 does, to a client that knows us; another
    is refused nothing.
    """
    async with duplex_world() as world:
        peer = await world.websocket(capabilities=DECLARED)
        await peer.initialize()
        gate = world.inner.box.gate("g")
        await peer.call("wait", gate="g")
        await at_most(WITHIN, gate.started.wait())
        draining = asyncio.create_task(world.layer.drain(WITHIN))
        await refused(world.url)

        for method in ("tools/list", "session/start"):
            error = await peer.error(method)
            assert error["code"] == -32603
            assert error["data"] == {"reason": "draining", "started": False}

        gate.go.set()
        await at_most(WITHIN, draining)


async def test_a_stock_client_is_served_until_it_waits_for_nothing_and_then_closed() -> None:
    """It learns of no shutdown, so that what it asks meanwhile is served as ever. It is closed with
    the last answer, and not before or much later: its next requests go to another server.
    """
    async with duplex_world() as world:
        busy, idle = await world.websocket(), await world.websocket()
        for peer in (busy, idle):
            await peer.initialize()
        gates = [world.inner.box.gate(name) for name in ("first", "second")]
        first = await busy.call("wait", gate="first")
        await at_most(WITHIN, gates[0].started.wait())
        draining = asyncio.create_task(world.layer.drain(10 * WITHIN))
        assert (await idle.closed())[0] == 1012

        second = await busy.call("wait", gate="second")
        await at_most(WITHIN, gates[1].started.wait())
        gates[0].go.set()
        assert text_of((await busy.answer(first))["result"]) == "through first"
        third = await busy.call("wait", gate="first")
        assert text_of((await busy.answer(third))["result"]) == "through first"
        gates[1].go.set()
        assert text_of((await busy.answer(second))["result"]) == "through second"
        assert (await busy.closed())[0] == 1012
        await at_most(WITHIN, draining)


async def test_a_broken_websocket_cancels_nothing_and_frees_its_session() -> None:
    """A broken connection never cancels a request in the handshake era (REQ4)."""
    async with duplex_world() as world:
        peer = await world.websocket()
        await peer.initialize()
        session_id = (await peer.start())["sessionId"]
        gate = world.inner.box.gate("g")
        await peer.call("wait", gate="g")
        await at_most(WITHIN, gate.started.wait())
        await peer.leave()
        other = await world.connected("stdio")
        await other.resume(session_id)
        assert not gate.cancelled.is_set()
        gate.go.set()


def test_every_close_code_says_whether_to_come_back() -> None:
    """Close codes have one table; each says whether to come back."""
    assert set(CloseCode) > FINAL
    stay_away = {code for code in CloseCode if not should_come_back(code)}
    assert {int(code) for code in stay_away} == {1000, 1003, 1008, 1009}
    assert should_come_back(None)
    assert should_come_back(4_999)


# --- where it is mounted ---------------------------------------------------------------------


@pytest.mark.parametrize("frame", ["starlette", "fastapi", "prefix"])
async def test_routes_serve_websocket_where_they_are_mounted(frame: str) -> None:
    """``layer.routes()`` in somebody else's application, under a prefix too."""
    layer = SessionLayer(Toolbox().server)
    path = "/mcp"
    if frame == "starlette":
        app: Any = Starlette(routes=layer.routes(), lifespan=layer.lifespan)
    elif frame == "fastapi":
        app = FastAPI(routes=layer.routes(), lifespan=layer.lifespan)
    else:
        mounted = [Mount("/api", routes=layer.routes())]
        app, path = Starlette(routes=mounted, lifespan=layer.lifespan), "/api/mcp"
    async with app.router.lifespan_context(app), listening(app) as port:
        url = f"ws://127.0.0.1:{port}{path}"
        async with websocket(url) as peer:
            await peer.initialize()
            assert await peer.text("echo", text=frame) == frame
        assert (await refused(url, origin="https://evil.example")).response.status_code == 403


@pytest.mark.parametrize("kind", apps.KINDS)
async def test_every_class_of_server_is_served_on_both(kind: apps.Kind) -> None:
    """``MCPServer``, lowlevel ``Server`` and ``FastMCP``, over WebSocket and a pipe."""
    served = apps.make_app(kind)
    layer = SessionLayer(served.server)
    served.publish = layer.notify_resource_updated
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port:
        async with websocket(f"ws://127.0.0.1:{port}/mcp", capabilities=ELICITS) as first:
            await first.initialize()
            session_id = (await first.start())["sessionId"]
            await first.result("resources/subscribe", {"uri": "note://1"})
            assert await first.text("session_id") == session_id
            await first.text("touch", uri="note://1")
            assert uris(await first.has_events(1)) == ["note://1"]
            asking = await first.call("ask", question="why?")
            await first.respond(
                await first.question(), {"action": "accept", "content": {"answer": "so"}}
            )
            assert text_of((await first.answer(asking))["result"]) == "accept: so"
        async with pipe(layer) as second:
            await second.initialize()
            position = first.events[0]["params"]["sessionEventId"]
            assert (await second.resume(session_id, position))["catchup"] is True
            await second.text("touch", uri="note://1")
            assert uris(await second.has_events(1)) == ["note://1"]


async def test_without_a_store_both_serve_document_004() -> None:
    """SLS1: stateless mode speaks ``sessions/*`` only, on every transport."""
    layer = SessionLayer(Toolbox().server, store=None)
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port:
        async with websocket(f"ws://127.0.0.1:{port}/mcp") as peer:
            await peer.initialize()
            assert await peer.text("echo", text="x") == "x"
            assert (await peer.error("session/start", {}))["code"] == -32601
            session = (await peer.result("sessions/create"))["session"]
            named = in_session(session["sessionId"])
            assert await peer.text("session_id", meta=named) == session["sessionId"]
