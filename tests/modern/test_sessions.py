"""Sessions in the modern era: every request names its own."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.everything import ODD, EverythingKind, make_everything
from tests.support.modern import EVENT_ID, ModernClient, envelope
from tests.support.raw import KEY, SESSION, Json, call_params
from tests.support.side_by_side import wrapped
from tests.support.world import Ctx, Toolbox, World, world

UNKNOWN_ID = "A" * 43
EPOCH_WIDTH = 19 + 1 + 12


@asynccontextmanager
async def modern(**options: Any) -> AsyncGenerator[tuple[World, ModernClient]]:
    async with world(**options) as w:
        yield w, ModernClient(w.carrier)


def not_found(session_id: str, *, started: bool = False) -> Json:
    """The one answer to an id that is unknown, ended, expired or somebody else's.

    Args:
        started: To a request that ran when its session ended: it says so.
    """
    data: Json = {"sessionId": session_id}
    if started:
        data["started"] = True
    return {"code": -32043, "message": "Session not found", "data": data}


# --- making one ----------------------------------------------------------------------------


async def test_start_answers_in_this_era_too(client: ModernClient) -> None:
    """Rule: "``session/start`` → ``{"sessionId": …, "sessionEventId": "<head>", "expiresAt": …}``",
    and "Modern-era results of ours carry ``resultType: "complete"``".
    """
    received = client.send("session/start")
    result = await received.result()

    assert set(result) == {"sessionId", "sessionEventId", "expiresAt", "resultType"}
    assert result["resultType"] == "complete"
    assert len(result["sessionEventId"]) == EPOCH_WIDTH
    assert result["expiresAt"].endswith("Z")
    assert received.status == 200 and not received.is_sse
    assert received.reply.header("mcp-session-id") is None


@pytest.mark.parametrize("meta", [{}, {SESSION: None}, {KEY: "ignored"}], ids=str)
async def test_create_answers_strings_only(meta: Json, client: ModernClient) -> None:
    """Its ``session`` holds "strings ``sessionId``, ``expiresAt``, ``state`` only"; a state is
    issued always, "also an empty one". ``null`` names no session.
    """
    result = await client.send("sessions/create", meta=meta).result()

    assert set(result) == {"session", "_meta", "resultType"}
    assert set(result["session"]) == {"sessionId", "expiresAt", "state"}
    assert all(isinstance(value, str) and value for value in result["session"].values())
    assert set(result["_meta"]) == {EVENT_ID}
    assert len(result["_meta"][EVENT_ID]) == EPOCH_WIDTH


@pytest.mark.parametrize("named", [{"sessionId": UNKNOWN_ID}, {}, 5], ids=str)
async def test_create_takes_no_session(named: Any, w: World, client: ModernClient) -> None:
    """Rule: "``-32602``: ``sessions/create`` with session ``_meta``", whatever is in it."""
    received = client.send("sessions/create", meta={SESSION: named})
    error = await received.error()

    assert error["code"] == -32602
    assert received.status == 400
    assert await w.layer.sessions.list() == []


@pytest.mark.parametrize("method", ["session/start", "sessions/create"])
async def test_a_callers_id_is_never_adopted(method: str, client: ModernClient) -> None:
    """SES4."""
    made = await client.send(
        method,
        {"sessionId": UNKNOWN_ID, "id": UNKNOWN_ID},
        headers={"Mcp-Session-Id": UNKNOWN_ID},
    ).result()

    assert made.get("sessionId", made.get("session", {}).get("sessionId")) != UNKNOWN_ID
    assert await client.call("session_id", session=UNKNOWN_ID).error() == not_found(UNKNOWN_ID)


# --- naming one ----------------------------------------------------------------------------


async def test_a_request_names_its_session(client: ModernClient, session: str) -> None:
    """Rule 1. The result carries "the same ``sessionId``, the newest ``state``,
    ``expiresAt``", next to what the SDK puts into ``_meta``.
    """
    received = client.call("session_id", session=session)
    result = await received.result()

    assert result["content"][0]["text"] == session
    assert set(result["_meta"]) == {SESSION, "io.modelcontextprotocol/serverInfo"}
    assert set(result["_meta"][SESSION]) == {"sessionId", "state", "expiresAt"}
    assert result["_meta"][SESSION]["sessionId"] == session
    assert result["resultType"] == "complete"


async def test_nothing_is_current_in_this_era(client: ModernClient, session: str) -> None:
    """Rule: "In the modern era every request names its session"."""
    await client.resume(session)

    assert await client.text("session_id") == "none"
    assert await client.text("session_id", meta={SESSION: None}) == "none"
    result = await client.call("session_id").result()
    assert SESSION not in result["_meta"]


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel", "fastmcp"])
async def test_with_a_session_the_answer_is_the_same_but_for_the_stamp(
    kind: EverythingKind,
) -> None:
    """Every method, next to the same request without a session."""
    requests: list[tuple[str, Json]] = [
        ("tools/list", {}),
        ("tools/call", call_params("echo", {"text": ODD})),
        ("tools/call", call_params("weather", {"city": "x"})),
        ("tools/call", call_params("fail", {"how": "tool"})),
        ("tools/call", call_params("unknown")),
        ("resources/list", {}),
        ("resources/read", {"uri": "note://a"}),
        ("resources/read", {"uri": "nowhere://at/all"}),
        ("prompts/get", {"name": "greet", "arguments": {"name": "x"}}),
        ("server/discover", {}),
        ("ping", {}),
        ("resources/subscribe", {"uri": "note://a"}),
        ("x/unknown", {}),
    ]
    async with wrapped(lambda: make_everything(kind)) as side:
        client = side.client()
        session = (await client.start())["sessionId"]
        for method, params in requests:
            without = client.send(method, params, request_id=1)
            within = client.send(method, params, request_id=1, session=session)
            expected, answer = await without.answer(), await within.answer()
            assert within.status == without.status, method
            if "result" in answer:
                assert answer["result"]["_meta"].pop(SESSION)["sessionId"] == session
                if not expected["result"].get("_meta"):
                    # It had none of its own: ours is the only one.
                    answer["result"].pop("_meta") if not answer["result"]["_meta"] else None
            assert answer == expected, method


@pytest.mark.parametrize(
    "method", ["tools/list", "tools/call", "server/discover", "subscriptions/listen", "x/unknown"]
)
async def test_an_unknown_session_is_refused_with_status_200(
    method: str, w: World, client: ModernClient
) -> None:
    """Rule: "``-32043`` must come with HTTP 200": some clients throw away the body of a 404."""
    params: Json = {"name": "echo", "arguments": {}, "notifications": {}}
    received = client.send(method, params, session=UNKNOWN_ID)

    assert await received.error() == not_found(UNKNOWN_ID)
    assert received.status == 200
    assert w.box.calls == []


@pytest.mark.parametrize(
    "named", ["text", 7, [], {}, {"sessionId": 7}, {"sessionId": None}, True], ids=str
)
@pytest.mark.parametrize("method", ["tools/call", "subscriptions/listen", "sessions/delete"])
async def test_malformed_metadata_is_invalid_params(
    named: Any, method: str, w: World, client: ModernClient
) -> None:
    """Rule: "absent or mistyped: ``-32602``", which the core answers with 400."""
    params: Json = {"name": "echo", "arguments": {"text": "x"}, "notifications": {}}
    received = client.send(method, params, meta={SESSION: named})

    assert (await received.error())["code"] == -32602
    assert received.status == 400
    assert w.box.calls == []


@pytest.mark.parametrize("method", ["session/resume", "session/end"])
@pytest.mark.parametrize("params", [{}, {"sessionId": 5}, {"sessionId": None}], ids=str)
async def test_resume_and_end_take_the_session_from_params_only(
    method: str, params: Json, client: ModernClient, session: str
) -> None:
    received = client.send(method, params, session=session)

    assert (await received.error())["code"] == -32602
    assert await client.text("session_id", session=session) == session


async def test_delete_takes_the_session_from_the_metadata_only(
    client: ModernClient, session: str
) -> None:
    received = client.send("sessions/delete", {"sessionId": session})

    assert (await received.error())["code"] == -32602
    assert await client.text("session_id", session=session) == session


# --- Mcp-Session-Id ------------------------------------------------------------------------


async def test_an_equal_header_is_a_mirror(client: ModernClient, session: str) -> None:
    """Rule: "equal to the ``_meta`` sessionId it is a mirror …, accepted"."""
    mirrored = {"Mcp-Session-Id": session}

    assert await client.text("session_id", session=session, headers=mirrored) == session


@pytest.mark.parametrize("method", ["tools/call", "sessions/delete", "subscriptions/listen", "x"])
async def test_another_header_is_a_mismatch(
    method: str, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "``-32020`` Header mismatch (HTTP 400): modern era: ``Mcp-Session-Id`` next to a
    different ``_meta`` sessionId", before anything happens.
    """
    params: Json = {"name": "echo", "arguments": {"text": "x"}, "notifications": {}}
    for other in (UNKNOWN_ID, session + " x", session.swapcase()):
        received = client.send(method, params, session=session, headers={"Mcp-Session-Id": other})
        assert (await received.error())["code"] == -32020
        assert received.status == 400

    assert w.box.calls == []
    assert await client.text("session_id", session=session) == session


async def test_a_header_without_metadata_is_ignored(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: "In the modern era without ``_meta`` session it is ignored", whatever it names."""
    older = await w.connected()
    for named in (UNKNOWN_ID, session, older.session_id, "with space", ""):
        headers = {"Mcp-Session-Id": named}
        assert await client.text("session_id", headers=headers) == "none"
        null = client.call("session_id", meta={SESSION: None}, headers=headers)
        assert (await null.result())["content"][0]["text"] == "none"


async def test_resume_goes_with_neither_header(w: World, client: ModernClient) -> None:
    """Rule: "``mode_conflict`` is: ``session/resume`` with ``Last-Event-ID``, or with
    ``Mcp-Session-Id`` equal to its ``sessionId``".
    """
    started = await client.start()
    session = started["sessionId"]
    before = await w.layer.store.load(session, now=w.clock.now)
    assert before is not None
    epoch = before.fencing_epoch
    params = {"sessionId": session, "lastSessionEventId": started["sessionEventId"]}
    for headers, named in (
        ({"Last-Event-ID": started["sessionEventId"]}, None),
        ({"Mcp-Session-Id": session}, None),
        ({"Mcp-Session-Id": session}, session),
    ):
        received = client.send("session/resume", params, headers=headers, session=named)
        error = await received.error()
        assert (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})

    record = await w.layer.store.load(session, now=w.clock.now)
    assert record is not None and record.fencing_epoch == epoch


# --- two eras, two modes, one namespace ----------------------------------------------------


async def test_a_session_serves_both_eras(w: World, client: ModernClient) -> None:
    """Rule: "a session made by either can be resumed, used by ``_meta``, ended or deleted by
    either", here also from each era.
    """
    older = await w.connected()
    made_there = (await older.start())["sessionId"]
    made_here = (await client.create())["sessionId"]

    assert await client.text("session_id", session=made_there) == made_there
    assert await older.text("session_id", meta={SESSION: {"sessionId": made_here}}) == made_here
    assert (await client.resume(made_there))["resumed"] is True
    assert (await older.resume(made_here))["resumed"] is True
    await client.send("sessions/delete", session=made_there).result()
    await older.end(made_here)
    for gone in (made_there, made_here):
        assert await client.call("session_id", session=gone).error() == not_found(gone)


@pytest.mark.parametrize("method", ["session/resume", "session/end", "sessions/delete", "call"])
async def test_a_transport_mode_session_is_left_alone(
    method: str, w: World, client: ModernClient
) -> None:
    """Rule: "naming a transport-mode id is an error and leaves that session alone"."""
    older = await w.connected()
    theirs = older.session_id
    assert theirs is not None
    match method:
        case "call":
            received = client.call("session_id", session=theirs)
        case "sessions/delete":
            received = client.send(method, session=theirs)
        case _:
            received = client.send(method, {"sessionId": theirs})
    error = await received.error()

    assert (error["code"], error["data"]) == (-32600, {"reason": "mode_conflict"})
    assert await older.text("session_id") == "none"


# --- its end -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["session/end", "sessions/delete"])
async def test_end_and_delete_answer_an_empty_result(
    method: str, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "answer ``{}`` without session ``_meta`` (modern era: plus ``resultType``)"; ending
    again is ``-32043``.
    """
    named = session if method == "sessions/delete" else None
    params = None if named else {"sessionId": session}

    assert await client.send(method, params, session=named).result() == {"resultType": "complete"}
    assert await client.send(method, params, session=named).error() == not_found(session)
    assert await client.call("session_id", session=session).error() == not_found(session)
    assert await client.send("session/resume", {"sessionId": session}).error() == (
        not_found(session)
    )
    assert await w.layer.sessions.list() == []


async def test_an_expired_session_is_unknown() -> None:
    """Rule: "unknown, expired, ended and somebody else's all get the same answer"."""
    async with modern(idle_timeout=100) as (w, client):
        session = (await client.start())["sessionId"]
        w.clock.advance(99)
        assert await client.text("session_id", session=session) == session
        w.clock.advance(100)

        assert await client.call("session_id", session=session).error() == not_found(session)
        await w.expire()
        assert await client.call("session_id", session=session).error() == not_found(session)


async def test_a_running_request_is_answered_when_its_session_ends(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: "cancel running requests of the session (they answer ``-32043``)"; "the answer is
    written last".
    """
    running = await w.waits(client.call("wait", {"gate": "g"}, session=session))

    ended = await client.send("session/end", {"sessionId": session}).result()

    assert ended == {"resultType": "complete"}
    assert await running.error() == not_found(session, started=True)
    assert w.box.gate("g").cancelled.is_set()


# --- gating --------------------------------------------------------------------------------


async def test_a_gated_tool_needs_a_session(w: World, client: ModernClient) -> None:
    """Rule: "``-31044`` Session required: the server gated this method or tool and rules 1 and 2
    give the request no protocol-mode session".
    """
    w.layer.require_session(tools={"echo"}, methods={"resources/list"})
    session = (await client.start())["sessionId"]
    older = await w.connected()

    for received in (
        client.call("echo", {"text": "x"}),
        client.call("echo", {"text": "x"}, meta={SESSION: None}),
        client.call("echo", {"text": "x"}, headers={"Mcp-Session-Id": session}),
        client.send("resources/list"),
    ):
        error = await received.error()
        assert (error["code"], error["message"]) == (-31044, "Session required")
        assert received.status == 200
    # A transport-mode session is none.
    assert (await older.error("resources/list"))["code"] == -31044
    assert w.box.calls == []

    assert await client.text("echo", {"text": "x"}, session=session) == "x"
    assert "resources" in await client.send("resources/list", session=session).result()
    await older.start()
    assert "resources" in await older.result("resources/list")
    # What is not gated is served as before.
    assert await client.text("session_id") == "none"


async def test_a_gate_comes_after_the_session(w: World, client: ModernClient) -> None:
    """An unknown session is answered as such, gated or not."""
    w.layer.require_session(tools={"echo"})
    assert await client.call("echo", session=UNKNOWN_ID).error() == not_found(UNKNOWN_ID)


# --- listing -------------------------------------------------------------------------------


async def test_an_operator_lists_and_ends_sessions(w: World, client: ModernClient) -> None:
    """``layer.sessions.list(principal=…)``, ``.end(id)``."""
    older = await w.connected()
    started = (await client.start())["sessionId"]
    w.clock.advance(1)
    created = (await client.create())["sessionId"]
    await client.listening(started, "note://a")

    infos = {str(info.id): info for info in await w.layer.sessions.list()}
    assert set(infos) == {older.session_id, started, created}
    assert [i.id for i in await w.layer.sessions.list()][-1] == created
    assert infos[started].mode == "protocol" and infos[started].is_attached
    assert infos[started].subscriptions == {"note://a"}
    assert not infos[created].is_attached
    assert older.session_id is not None and infos[older.session_id].mode == "transport"

    assert await w.layer.sessions.end(created) is True
    assert await w.layer.sessions.end(created) is False
    assert await w.layer.sessions.end(UNKNOWN_ID) is False
    assert await client.call("echo", session=created).error() == not_found(created)
    assert await w.layer.sessions.end(older.session_id) is True
    assert (await older.send("ping").reply.done()).status == 404


async def test_a_session_keeps_the_name_and_version_of_the_client_that_made_it(
    w: World, client: ModernClient
) -> None:
    """For an operator's list. More than that nobody reads, and a client may write much."""
    for made in (await client.start(), await client.create()):
        record = await w.layer.store.load(made["sessionId"], now=w.clock.now)
        peer = record.client.peer if record is not None else None
        assert peer is not None and peer.modern
        info = (peer.initialize_params or {}).get("clientInfo")
        assert info == {"name": "raw", "version": "1"}


# --- limits --------------------------------------------------------------------------------


async def test_a_limit_says_its_name() -> None:
    """Rule: "``-31011`` Limit reached: sessions per principal or process, ``data.limit``"."""
    async with modern(max_sessions_per_principal=2) as (_, client):
        await client.start()
        await client.create()
        for method in ("session/start", "sessions/create"):
            received = client.send(method)
            error = await received.error()
            named = {"limit": "max_sessions_per_principal", "max": 2}
            assert (error["code"], error["data"]) == (-31011, named)
            assert received.status == 200


async def test_what_a_handler_sees() -> None:
    """The version, the client's capabilities and the HTTP request, in a session as without."""
    box = Toolbox()

    async def seen(ctx: Ctx, arguments: Json) -> str:
        capabilities = ctx.session.client_capabilities
        assert capabilities is not None and ctx.request is not None
        return " ".join(
            [
                ctx.protocol_version,
                str(capabilities.sampling is not None),
                ctx.request.headers["x-mine"],
                str(ctx.session.can_send_request),
                str(ctx.meta is not None and ctx.meta.get("example.com/x")),
            ]
        )

    box.tools["seen"] = seen
    async with world(box=box) as w:
        client = ModernClient(w.carrier, capabilities={"sampling": {}})
        session = (await client.start())["sessionId"]
        for named in (None, session):
            text = await client.text(
                "seen", session=named, headers={"X-Mine": "y"}, meta={"example.com/x": "z"}
            )
            assert text == "2026-07-28 True y True z"


async def test_an_envelope_is_asked_for_before_a_session(w: World, client: ModernClient) -> None:
    """Rule: "the envelope ladder … exactly as the SDK answers": also for our own methods."""
    for meta in ({}, {SESSION: {"sessionId": UNKNOWN_ID}}, None):
        members: Json = {"_meta": meta} if meta is not None else {}
        for method in ("session/start", "sessions/create", "tools/list"):
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": members}
            reply = await client.post(message).done()
            assert (reply.status, reply.json["error"]["code"]) == (400, -32602)
    named = {"jsonrpc": "2.0", "id": 1, "method": "session/start"}
    full = {**named, "params": {"_meta": envelope()}}
    reply = await client.post(full, {"Mcp-Method": "session/end"}).done()
    assert (reply.status, reply.json["error"]["code"]) == (400, -32020)
    assert await w.layer.sessions.list() == []
