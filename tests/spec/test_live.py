"""What our server and client really send has the shapes of ``spec/schema``."""

import json
from typing import Any, cast

import pytest

from mcp_sessions.core.resume import Follower, event_id_of
from mcp_sessions.layer import SessionLayer
from mcp_sessions.security import SessionSecurity, mint_key
from tests.support.modern import ModernClient
from tests.support.raw import (
    EXTENSION,
    KEY,
    NEWEST,
    SESSION,
    Json,
    RawClient,
    call_params,
    in_process,
    in_session,
    keyed,
)
from tests.support.resuming import connected
from tests.support.specification import faults
from tests.support.world import Toolbox, connected_world, world

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|removed) as of 2026-07-28")

DECLARED: Json = {"extensions": {EXTENSION: {}}}
INFO = {"name": "raw", "version": "1"}


def expect_shape(schema: str, message: Any) -> None:
    assert faults(schema, message) == [], message


async def test_the_handshake_eras_messages() -> None:
    """Start, events, resume in each outcome, a takeover, the end, and the errors between."""
    async with world(max_subscriptions=1) as w:
        client = w.client(capabilities=DECLARED)
        expect_shape("server-capabilities", (await client.initialize())["capabilities"])
        stream = client.get()
        expect_shape("session-start.result", answer := await client.answer("session/start"))
        started = answer["result"]
        session = started["sessionId"]
        for position, caught_up in ((started["sessionEventId"], True), ("x", False), (None, False)):
            params = {"sessionId": session, "lastSessionEventId": position}
            if position is None:
                del params["lastSessionEventId"]
            answer = await client.answer("session/resume", params)
            expect_shape("session-resume.result", answer)
            assert answer["result"]["catchup"] is caught_up
        await client.result("resources/subscribe", {"uri": "a:1"})
        limited = await client.answer("resources/subscribe", {"uri": "a:2"})
        expect_shape("limit-reached.error", limited)
        await w.layer.notify_resource_updated("a:1")
        await w.layer.notify_tools_changed()
        for message in await stream.has(2):
            expect_shape("session-event.notification", message)

        lone = await w.client().answer("session/resume", {"sessionId": session})
        expect_shape("session-resume.result", lone)
        assert lone["result"]["reason"] == "no_stream"
        expect_shape("sessions-detached.notification", (await stream.has(3))[2])
        expect_shape("session-detached.error", await client.answer("tools/list"))

        running = client.call("wait", gate="g", meta=in_session(session))
        await w.box.gate("g").started.wait()
        expect_shape(
            "session-end.result", await client.answer("session/end", {"sessionId": session})
        )
        expect_shape("session-not-found.error", answer := await running.answer())
        assert answer["error"]["data"]["started"] is True
        gone = {"_meta": in_session(session)}
        expect_shape("session-not-found.error", answer := await client.answer("tools/list", gone))
        assert "started" not in answer["error"]["data"]
        expect_shape("invalid-params.error", await client.answer("session/end", {}))


async def test_the_data_layers_messages() -> None:
    """Create, use, keys, a state that is not good, a gate, delete."""
    async with world() as w:
        w.layer.require_session(tools=["session_id"])
        client = await w.connected()
        expect_shape("sessions-create.result", answer := await client.answer("sessions/create"))
        session = answer["result"]["session"]["sessionId"]
        for key, schema in (
            ({"text": "x"}, "in-session.result"),
            ({"text": "x"}, "in-session.result"),
            ({"text": "y"}, "invalid-request.error"),
        ):
            params = call_params("echo", key, keyed("k", session))
            expect_shape("in-session.request", {**REQUEST, "params": params})
            expect_shape(schema, await client.answer("tools/call", params))
        meta = {SESSION: {"sessionId": session, "state": "forged"}}
        bad = await client.answer("tools/call", call_params("echo", {"text": "x"}, meta))
        expect_shape("invalid-state.error", bad)
        expect_shape(
            "session-required.error", await client.answer("tools/call", call_params("session_id"))
        )
        crossed = await client.answer("session/end", {"sessionId": client.session_id})
        expect_shape("invalid-request.error", crossed)
        deleted = await client.answer("sessions/delete", {"_meta": in_session(session)})
        expect_shape("session-end.result", deleted)


REQUEST: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


async def test_the_modern_eras_messages() -> None:
    """Discovery, a listen from its acknowledgement to its result, a mirror that is none."""
    async with world() as w:
        client = ModernClient(w.carrier, capabilities=DECLARED)
        discovered = await client.send("server/discover").result()
        expect_shape("server-capabilities", discovered["capabilities"])
        expect_shape("session-start.result", answer := await client.send("session/start").answer())
        session = answer["result"]["sessionId"]
        received = await client.listening(session, "a:1", lists=("tools",))
        await w.layer.notify_resource_updated("a:1")
        first, event = await received.has(2)
        expect_shape("acknowledged.notification", first)
        expect_shape("session-event.notification", event)
        newer = await client.listening(session, "a:1")
        expect_shape("listen.result", await received.answer())
        resumed = await client.send("session/resume", {"sessionId": session}).answer()
        expect_shape("session-resume.result", resumed)
        # The newer one is displaced by the resume, and its client notified.
        expect_shape("sessions-detached.notification", (await newer.has(3))[1])
        last = await client.listening(session)
        other = client.call("echo", {"text": "x"}, session=session, headers={"Mcp-Session-Id": "x"})
        expect_shape("header-mismatch.error", await other.answer())
        ended = await client.send("session/end", {"sessionId": session}).answer()
        expect_shape("session-end.result", ended)
        expect_shape("session-not-found.error", await last.answer())


async def test_the_messages_of_a_server_without_a_store() -> None:
    """SLS1 to SLS5: fewer features, no head, the same shapes."""
    layer = SessionLayer(Toolbox().server, store=None, security=SessionSecurity([mint_key()]))
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        client = RawClient(carrier)
        params = {"protocolVersion": NEWEST, "capabilities": {}, "clientInfo": INFO}
        shaken = client.send("initialize", params)
        expect_shape("server-capabilities", (await shaken.result())["capabilities"])
        assert shaken.reply.header("mcp-session-id") is None
        expect_shape("sessions-create.result", answer := await client.answer("sessions/create"))
        assert "_meta" not in answer["result"]
        named = answer["result"]["session"]
        meta = {SESSION: {"sessionId": named["sessionId"], "state": named["state"]}}
        used = await client.answer("tools/call", call_params("echo", {"text": "x"}, meta))
        expect_shape("in-session.result", used)
        meta[SESSION]["state"] = "forged"
        bad = await client.answer("tools/call", call_params("echo", {"text": "x"}, meta))
        expect_shape("invalid-state.error", bad)
        gone = await client.answer("sessions/delete", {"_meta": in_session("unknown")})
        expect_shape("session-not-found.error", gone)
        del meta[SESSION]["state"]
        expect_shape("session-end.result", await client.answer("sessions/delete", {"_meta": meta}))
        for method in ("session/start", "session/resume", "session/end"):
            assert (await client.error(method))["code"] == -32601


async def test_an_unknown_outcome() -> None:
    """A keyed request of a server that stops before it is done."""
    async with connected_world() as (w, client):
        session = (await client.start())["sessionId"]
        sent = client.call("wait", gate="g", meta=keyed("k", session))
        await w.box.gate("g").started.wait()
        await w.layer.drain(grace=0)
        expect_shape("outcome-unknown.error", await sent.answer())


def session_named_by(message: Json) -> Json | None:
    """The session's metadata in a message, if it has any."""
    params = cast("Json", message.get("params") or {})
    return cast("Json", params.get("_meta") or {}).get(SESSION)


async def requests_of_our_client(mode: str) -> list[tuple[Json, dict[str, str]]]:
    """What our client sends over HTTP in a short life: each message with its headers."""
    async with connected(mode) as it:
        await it.call("echo", text="x")
        await it.transport.move_to(it.server.url())
        await it.call("echo", text="y")
        sent = [(e.sent, e.headers) for e in it.server.wire.exchanges]
    return [entry for entry in sent if "method" in entry[0]]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_our_clients_messages(mode: str) -> None:
    """Each request in a session, each start and resume has its shape."""
    shapes = {"session/start": "session-start.request", "session/resume": "session-resume.request"}
    sent = await requests_of_our_client(mode)
    seen: set[str] = set()
    for message, _ in sent:
        named = session_named_by(message)
        schema = shapes.get(message["method"], "in-session.request" if named else None)
        if schema is not None and "id" in message:
            expect_shape(schema, message)
            seen.add(schema)
    assert seen == {*shapes.values(), "in-session.request"}, json.dumps([m for m, _ in sent])


async def test_our_client_mirrors_the_session_in_the_modern_era_only() -> None:
    """HTP4: "MUST NOT send it with ``session/*``"; the other era's header is the connection."""
    sent = await requests_of_our_client("auto")
    in_sessions = 0
    for message, headers in sent:
        named = session_named_by(message)
        header = headers.get("mcp-session-id")
        if message["method"].startswith("session/"):
            assert header is None, message
        elif named is not None:
            in_sessions += 1
            assert header == named["sessionId"]
    assert in_sessions >= 2

    for message, headers in await requests_of_our_client("legacy"):
        named = session_named_by(message)
        if named is not None:
            assert headers["mcp-session-id"] != named["sessionId"]


async def test_ping_passes_where_the_current_session_is_gone() -> None:
    """ASC17: other requests on that connection are ``-32043`` meanwhile."""
    async with connected_world() as (w, client):
        session = (await client.start())["sessionId"]
        await w.client().end(session)

        assert await client.result("ping") == {}
        assert (await client.error("tools/list"))["code"] == -32043


async def test_of_several_refusals_the_first_is_the_answer() -> None:
    """ASC20: each request here has two faults, of two neighbouring steps."""
    async with connected_world() as (w, client):
        transport = client.session_id
        session = (await client.start())["sessionId"]
        running = client.call("wait", gate="g", meta=keyed("k", session))
        await w.box.gate("g").started.wait()
        forged = {SESSION: {"sessionId": session, "state": "forged"}}

        async def refused(meta: Json, request_id: str | int | None = None) -> tuple[int, Any]:
            params = call_params("echo", {"text": "x"}, meta)
            sent = client.send("tools/call", params, request_id=request_id)
            error = await sent.error()
            data: Json = error.get("data") or {}
            return error["code"], data.get("reason")

        assert await refused({KEY: ""}, running.id) == (-32602, None)
        assert await refused({SESSION: 1}) == (-32602, None)
        stranger = {SESSION: {"sessionId": "unknown", "state": "forged"}}
        assert await refused(stranger) == (-32043, None)
        of_transport = {SESSION: {"sessionId": transport, "state": "forged"}}
        assert await refused(of_transport) == (-32602, "invalid_state")
        assert await refused(keyed("k", transport)) == (-32600, "mode_conflict")
        assert await refused({**forged, KEY: "k"}) == (-32602, "invalid_state")
        await (await w.connected()).resume(session)
        assert await refused({KEY: "k"}) == (-31010, None)
        assert await refused(keyed("k", session)) == (-32600, "key_reused")
        w.box.gate("g").go.set()
        await running.result()
        assert w.box.calls == ["wait"]


async def test_an_sse_id_is_no_position() -> None:
    """HTL19: though both look alike, and the stream's log may even be the older one."""
    async with connected_world() as (w, client):
        stream = client.get()
        started = await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        await w.layer.notify_resource_updated("a:1")
        await stream.has(1)

        resumed = await client.resume(started["sessionId"], stream.events[-1].id)
        assert (resumed["catchup"], resumed["replayed"]) == (False, 0)
        assert resumed["reason"] in ("log_replaced", "unknown_position")
        caught_up = await client.resume(started["sessionId"], started["sessionEventId"])
        assert (caught_up["catchup"], caught_up["replayed"]) == (True, 1)


def test_an_event_id_of_another_server_may_be_a_number() -> None:
    """EVT8: strings here; our client takes what the elevation document allows as well."""
    assert faults("session-event.notification", _event("se_306")) == []
    assert faults("session-event.notification", _event(306)) != []
    for event_id in ("se_306", 306):
        params = _event(event_id)["params"]
        assert event_id_of(params, "s_abc123") == event_id
        follower = Follower()
        assert follower.admits(event_id) and follower.position == event_id


def _event(event_id: str | int) -> Json:
    meta = {SESSION: {"sessionId": "s_abc123"}}
    params = {"uri": "doc:/foo", "sessionEventId": event_id, "_meta": meta}
    return {"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": params}
