"""``Mcp-Session-Id``: which of the two modes it may name. Whose: `tests/auth/test_ownership.py`."""

import pytest

from tests.support.raw import (
    SESSION,
    VERSIONS,
    Json,
    RawClient,
    Reply,
    call_params,
    in_session,
    initialize_params,
    keyed,
    text_of,
    uris,
)
from tests.support.world import connected_world, world

UNKNOWN = "U" * 43
NOT_FOUND: Json = {
    "jsonrpc": "2.0",
    "id": None,
    "error": {"code": -32600, "message": "Session not found"},
}


async def pinged(client: RawClient, method: str) -> Reply:
    """What is answered to this HTTP method; a POST has a ping in it."""
    body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}' if method == "POST" else b""
    headers = {**client.headers(), "Content-Type": "application/json"}
    return await client.http(method, headers, body).done()


def conflict(reply: Reply) -> bool:
    error = reply.json["error"]
    return (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})


# --- transport-mode sessions ----------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
async def test_initialize_opens_a_transport_mode_session(version: str) -> None:
    """Handshake era: "exactly 2025-11-25 Streamable HTTP", and our capabilities."""
    async with world() as w:
        client = w.client(version=version)
        result = await client.initialize()

        assert result["protocolVersion"] == version
        assert result["capabilities"]["sessions"] == {}
        ours = result["capabilities"]["extensions"]["io.github.mcp-sessions/sessions"]
        assert ours["window"] == {"maxEvents": 1_000, "maxBytes": 1_048_576, "maxAge": 3_600}
        assert ours["requestKeys"] == {"lifetime": 3_600, "maxBytes": 1_048_576}
        assert await client.text("echo", text="x") == "x"


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"protocolVersion": "2025-11-25"},
        {**initialize_params("x"), "protocolVersion": 7},
        {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": "x"},
    ],
    ids=["none", "empty", "no client", "mistyped version", "mistyped client"],
)
async def test_a_handshake_that_fails_registers_nothing(params: Json | None) -> None:
    """HTL1: "A session is registered only after the opening request validates"."""
    async with world(max_sessions=1) as w:
        for _ in range(3):
            sent = w.client().send("initialize", params)
            assert (await sent.error())["code"] == -32602
            assert sent.reply.header("mcp-session-id") is None

        assert await w.layer.store.all_sessions() == []
        await w.connected()  # there is room


async def test_a_handshake_makes_another_session_than_it_comes_with() -> None:
    """A client that initializes anew gets a new session; the old one is left alone."""
    async with connected_world() as (w, old):
        session = (await old.start())["sessionId"]
        new = w.client()
        params = initialize_params("x")
        sent = new.send("initialize", params, headers={"Mcp-Session-Id": old.session_id})
        await sent.result()

        new.session_id = sent.reply.header("mcp-session-id")
        assert new.session_id not in (None, old.session_id)
        assert await new.text("session_id") == "none"
        assert await old.text("session_id") == session


async def test_a_handshake_with_an_unknown_session_is_not_found() -> None:
    """HTL1: it is a POST like every other, as in the SDK; nothing is made."""
    async with world() as w:
        client = w.client()
        params = initialize_params("x")
        sent = client.send("initialize", params, headers={"Mcp-Session-Id": UNKNOWN})
        reply = await sent.reply.done()

        assert (reply.status, reply.json) == (404, NOT_FOUND)
        assert reply.header("mcp-session-id") is None


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("sent", [UNKNOWN, "x", "", "a b", "ü"])
async def test_an_unknown_id_is_not_found(method: str, sent: str) -> None:
    """Rule: "404 for unknown ids", which tells a stock client to initialize anew."""
    async with world() as w:
        client = w.client()
        client.session_id = sent
        reply = await pinged(client, method)

        assert (reply.status, reply.json) == (404, NOT_FOUND)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_no_id_is_a_bad_request(method: str) -> None:
    """As in the SDK: only ``session/*`` and rule-1 requests come without."""
    async with world() as w:
        client = w.client()
        reply = await pinged(client, method)

        assert (reply.status, reply.json["error"]["code"]) == (400, -32600)
        assert reply.json["error"]["message"] == "Bad Request: Missing session ID"


# --- protocol-mode ids in the header ---------------------------------------------------------


async def test_a_protocol_mode_id_names_no_stream() -> None:
    """Rule: "GET and DELETE naming one's own protocol-mode id … answer 400 with the
    ``mode_conflict`` body", and the session is left alone.
    """
    async with connected_world() as (w, holder):
        stream = await holder.get().started()
        session = (await holder.start())["sessionId"]
        client = w.client()
        client.session_id = session

        for reply in (client.get(), client.get("x"), client.delete()):
            await reply.done()
            assert (reply.status, conflict(reply)) == (400, True)
        assert await holder.text("session_id") == session
        await holder.text("update", uri="a:1")
        assert uris(await stream.has(1)) == ["a:1"]


@pytest.mark.parametrize(
    "message",
    [
        {"id": 1, "method": "ping"},
        {"id": 1, "method": "tools/call", "params": call_params("echo", {"text": "x"})},
        {"id": 1, "method": "session/start"},
        {"id": 1, "method": "tools/list", "params": {"_meta": {SESSION: None}}},
        {"method": "notifications/initialized"},
        {"id": 1, "result": {}},
    ],
    ids=["ping", "call", "start", "null", "notification", "answer"],
)
async def test_a_protocol_mode_id_is_no_connection(message: Json) -> None:
    """Rule: "a POST with such a ``Mcp-Session-Id`` and no ``_meta`` session": 400."""
    async with world() as w:
        client = w.client()
        client.session_id = (await client.start())["sessionId"]

        reply = await client.post({"jsonrpc": "2.0", **message}).done()

        assert (reply.status, conflict(reply)) == (400, True)
        assert reply.json["id"] == message.get("id")
        assert w.box.calls == []


@pytest.mark.parametrize("mirrors", [False, True], ids=["bare", "with _meta"])
async def test_resume_with_an_equal_header_is_a_conflict(mirrors: bool) -> None:
    """The elevation document: "both transport headers and protocol resume parameters for the *same*
    logical attempt": ``mode_conflict``, also where ``_meta`` makes the header a mirror
    ("``session/resume`` with an equal ``Mcp-Session-Id`` keeps its ``mode_conflict``").
    """
    async with connected_world() as (w, holder):
        session = (await holder.start())["sessionId"]
        params = {"sessionId": session, **({"_meta": in_session(session)} if mirrors else {})}

        sent = w.client().send("session/resume", params, headers={"Mcp-Session-Id": session})
        reply = await sent.reply.done()

        assert conflict(reply)
        assert reply.json["id"] == sent.id
        assert await holder.text("session_id") == session


async def test_resume_with_last_event_id_is_a_conflict() -> None:
    """Rule: "``mode_conflict`` is: ``session/resume`` with ``Last-Event-ID``": nothing is moved."""
    async with connected_world() as (w, holder):
        session = (await holder.start())["sessionId"]
        for client in (await w.connected(), w.client()):
            sent = client.send(
                "session/resume", {"sessionId": session}, headers={"Last-Event-ID": "x"}
            )
            error = await sent.error()
            assert (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})
            assert sent.reply.status == 200
        assert await holder.text("session_id") == session


async def test_ownership_comes_before_mode() -> None:
    """Rule: "Ownership is checked before mode and before any effect": an unknown session stays
    unknown, whatever else is wrong with the request.
    """
    async with connected_world() as (_, client):
        error = await client.error(
            "session/resume", {"sessionId": UNKNOWN}, headers={"Last-Event-ID": "x"}
        )
        assert error["code"] == -32043


@pytest.mark.parametrize("method", ["session/resume", "session/end"])
async def test_session_methods_leave_transport_mode_sessions_alone(method: str) -> None:
    """Rule: naming a transport-mode id "is an error and leaves that session alone"."""
    async with world() as w:
        client, other = await w.connected(), await w.connected()
        stream = await client.get().started()

        for sender in (client, other, w.client()):
            error = await sender.error(method, {"sessionId": client.session_id})
            assert (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})
        assert await client.text("echo", text="x") == "x"
        assert not stream.ended


async def test_meta_naming_a_transport_mode_session_is_a_conflict() -> None:
    """Rule: "a mode used on the other kind"."""
    async with connected_world() as (w, client):
        error = await client.error(
            "tools/call", call_params("echo", {}, in_session(client.session_id))
        )

        assert (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})
        assert w.box.calls == []


# --- the mirror ------------------------------------------------------------------------------


async def test_an_equal_header_is_a_mirror() -> None:
    """Rule: "equal to the ``_meta`` sessionId it is a mirror (HTP3), accepted, no
    transport session meant".
    """
    async with world() as w:
        session = (await w.client().start())["sessionId"]
        client = w.client()
        client.session_id = session

        sent = client.call("session_id", meta=in_session(session))

        assert text_of(await sent.result()) == session
        assert sent.reply.status == 200


async def test_an_equal_header_is_a_mirror_on_a_notification_too() -> None:
    """A keyed request is cancelled by a notification "whose ``params._meta`` carries session
    and key", and "our client sends" the mirror "except on ``session/*``".
    """
    async with connected_world() as (w, client):
        session = (await client.start())["sessionId"]
        running = await w.waits(client.call("wait", gate="g", meta=keyed("k", session)))
        mirrored = w.client()
        mirrored.session_id = session

        await mirrored.notify("notifications/cancelled", {"_meta": keyed("k", session)})

        assert (await running.error())["code"] == -32800


async def test_a_lone_notification_may_name_its_session() -> None:
    """The same without any header: an explicit cancel "always wins"."""
    async with connected_world() as (w, client):
        session = (await client.start())["sessionId"]
        running = await w.waits(client.call("wait", gate="g", meta=keyed("k", session)))

        await w.client().notify("notifications/cancelled", {"_meta": keyed("k", session)})

        assert (await running.error())["code"] == -32800
        assert (await w.client().post({"jsonrpc": "2.0", "method": "x"}).done()).status == 400


async def test_another_id_in_the_header_is_the_connection() -> None:
    """Rule: "In the handshake era a different id is the transport-mode connection, no conflict":
    client 1 of "What real clients were seen to do".
    """
    async with connected_world() as (w, client):
        session = (await w.client().start())["sessionId"]
        stream = await client.get().started()

        assert await client.text("session_id", meta=in_session(session)) == session
        await client.text("update", uri="a:1", meta=in_session(session))

        assert uris(await stream.has(1)) == ["a:1"]


async def test_a_mirror_of_an_unknown_session_is_not_found_with_status_200() -> None:
    """Rule: "``-32043`` … HTTP status 200; 404 only for transport-mode ids"."""
    async with world() as w:
        client = w.client()
        client.session_id = UNKNOWN

        sent = client.call("echo", text="x", meta=in_session(UNKNOWN))

        assert (await sent.error())["code"] == -32043
        assert sent.reply.status == 200
