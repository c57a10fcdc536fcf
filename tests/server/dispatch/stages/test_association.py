"""Which session a request belongs to: rules 1 to 3 (ASC1, ASC2, SES3)."""

import pytest

from tests.support.raw import SESSION, Json, RawClient, call_params, in_session, text_of
from tests.support.world import World, world

UNKNOWN_ID = "A" * 43


async def session_seen_by(client: RawClient, **meta: str | None) -> str:
    """The session that a tool sees: named by rule 1 if ``meta`` says so."""
    named = in_session(meta["named"]) if meta else None
    return await client.text("session_id", meta=named)


async def test_without_any_session_a_request_is_served_as_the_bare_server_would(
    client: RawClient,
) -> None:
    """Rule 3."""
    result = await client.result("tools/call", call_params("session_id"))

    assert text_of(result) == "none"
    assert "_meta" not in result


async def test_a_request_names_its_session(client: RawClient) -> None:
    """Rule 1, and "successful results of requests that named a session by rule 1 carry
    ``_meta``": the same ``sessionId`` and ``expiresAt``.
    """
    first = (await client.start())["sessionId"]
    second = (await client.start())["sessionId"]

    result = await client.result("tools/call", call_params("session_id", {}, in_session(first)))

    assert text_of(result) == first != second
    assert result["_meta"][SESSION]["sessionId"] == first
    assert result["_meta"][SESSION]["expiresAt"].endswith("Z")


async def test_the_current_session_is_the_one_last_started_or_resumed_there(
    client: RawClient,
) -> None:
    """Rule 2, and "Results by rule 2 stay as they are"."""
    first = (await client.start())["sessionId"]
    second = (await client.start())["sessionId"]
    assert await session_seen_by(client) == second

    await client.resume(first)
    result = await client.result("tools/call", call_params("session_id"))

    assert text_of(result) == first
    assert "_meta" not in result


async def test_null_means_none_for_this_request_only(client: RawClient, session: str) -> None:
    """Rule 2: ``"io.modelcontextprotocol/session": null``."""
    assert await session_seen_by(client, named=None) == "none"
    assert await session_seen_by(client) == session


async def test_a_session_is_current_on_its_own_connection_only(w: World) -> None:
    """Rule 2: "the connection's current session"."""
    one, other = await w.connected(), await w.connected()
    session = (await one.start())["sessionId"]

    assert await session_seen_by(other) == "none"
    assert await session_seen_by(one) == session


@pytest.mark.parametrize("method", ["tools/list", "tools/call", "resources/list", "x/unknown"])
async def test_rule_1_holds_for_every_method(method: str, client: RawClient) -> None:
    """An unknown session is refused whatever the request asks for."""
    error = await client.error(method, {"name": "echo", "_meta": in_session(UNKNOWN_ID)})

    assert error == {
        "code": -32043,
        "message": "Session not found",
        "data": {"sessionId": UNKNOWN_ID},
    }


async def test_an_error_answer_carries_no_session(client: RawClient, session: str) -> None:
    """``_meta`` is for "successful results"."""
    answer = await client.answer("x/unknown", {"_meta": in_session(session)})

    assert answer["error"]["code"] == -32601
    assert SESSION not in str(answer)


@pytest.mark.parametrize("method", ["session/start", "session/resume", "tools/call"])
async def test_a_lone_post_needs_no_handshake(method: str, w: World) -> None:
    """Rule: ``session/*`` and rule-1 requests "work without a prior ``initialize`` and without
    ``Mcp-Session-Id``".
    """
    session = (await w.client().start())["sessionId"]
    lone = w.client()
    params: Json = {"sessionId": session}
    if method == "tools/call":
        params = call_params("session_id", {}, in_session(session))

    result = await lone.result(method, params)

    if method == "tools/call":
        assert text_of(result) == session


async def test_a_lone_post_has_no_current_session(w: World) -> None:
    """Rule: "Any other POST is a connection that lives as long as its response"."""
    lone = w.client()
    await lone.start()

    reply = await lone.call("session_id").reply.done()

    assert (reply.status, reply.json["error"]["code"]) == (400, -32600)
    assert w.box.calls == []


@pytest.mark.parametrize(
    "named",
    ["text", 7, [], {}, {"sessionId": 7}, {"sessionId": None}, {"state": "x"}, True],
    ids=str,
)
async def test_malformed_session_metadata_is_invalid_params(
    named: object, w: World, client: RawClient
) -> None:
    """Rule: "absent or mistyped: ``-32602``"; it is not served without a session instead."""
    error = await client.error("tools/call", call_params("echo", {}, {SESSION: named}))

    assert error["code"] == -32602
    assert w.box.calls == []


@pytest.mark.parametrize("odd", ["", " ", "a b", "ü" * 10, "x" * 5_000, "\u0000"])
async def test_a_string_that_cannot_be_a_session_id_names_an_unknown_session(
    odd: str, client: RawClient
) -> None:
    """SES4: whatever a caller sends is looked up, never adopted; the answer repeats it."""
    error = await client.error("tools/call", call_params("echo", {}, in_session(odd)))

    assert (error["code"], error["data"]) == (-32043, {"sessionId": odd})


@pytest.mark.parametrize("method", ["session/start", "initialize"])
async def test_a_callers_id_is_never_adopted(method: str, w: World) -> None:
    """SES4: neither by ``session/start`` nor as ``Mcp-Session-Id``."""
    if method == "session/start":
        client = await w.connected()
        started = await client.result(method, {"sessionId": UNKNOWN_ID, "id": UNKNOWN_ID})
        assert started["sessionId"] != UNKNOWN_ID
    else:
        client = w.client()
        client.session_id = UNKNOWN_ID
        refused = await client.send("initialize", {}).reply.done()
        assert refused.status == 404
    error = await w.client().error("session/resume", {"sessionId": UNKNOWN_ID})
    assert error["code"] == -32043


async def test_ids_are_long_visible_and_all_different(client: RawClient) -> None:
    """EVT8, SES4: "0x21–0x7E, at least 256 bits"."""
    ids = {(await client.start())["sessionId"] for _ in range(20)} | {client.session_id}

    assert len(ids) == 21
    for session_id in ids:
        assert session_id is not None
        assert len(session_id) >= 43  # base64url, 6 bits each
        assert all(0x21 <= ord(character) <= 0x7E for character in session_id)


async def test_a_session_made_by_one_client_serves_another_of_the_same_principal(w: World) -> None:
    """Without authentication "everyone is one principal and the id is the credential"."""
    session = (await (await w.connected()).start())["sessionId"]
    assert await session_seen_by(await w.connected(), named=session) == session


# --- a current session that is over -------------------------------------------------------


async def ended_at_replica(w: World) -> tuple[RawClient, str]:
    client = await w.connected()
    session = (await client.start())["sessionId"]
    await (await w.connected()).end(session)
    return client, session


async def test_a_current_session_ended_by_its_own_connection_is_no_longer_current(
    client: RawClient, session: str
) -> None:
    """Rule: "later requests there fall under rule 3"."""
    assert await client.end(session) == {}
    assert await session_seen_by(client) == "none"


async def test_another_session_ended_there_leaves_the_current_one(client: RawClient) -> None:
    """Only "a current session that is ended" stops being current."""
    first = (await client.start())["sessionId"]
    second = (await client.start())["sessionId"]

    await client.end(first)
    assert await session_seen_by(client) == second


async def test_a_current_session_ended_at_another_replica_is_not_found(w: World) -> None:
    """Rule: "Ended elsewhere or expired: rule-2 requests get ``-32043``"; it does not pass by
    itself, and nothing runs.
    """
    client, _ = await ended_at_replica(w)

    for _ in range(3):
        error = await client.error("tools/call", call_params("echo", {"text": "x"}))
        assert error["code"] == -32043
    assert w.box.calls == []


async def test_a_current_session_that_expired_is_not_found() -> None:
    """Rule: "Ended elsewhere or expired": the connection itself was busy and lives on."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        await client.start()
        other = (await w.client().start())["sessionId"]
        for _ in range(4):
            w.clock.advance(40)
            await session_seen_by(client, named=other)
        await w.expire()

        error = await client.error("tools/call", call_params("echo", {"text": "x"}))

        assert error["code"] == -32043


@pytest.mark.parametrize("way", ["null", "start", "resume"])
async def test_three_ways_lead_out_of_it(way: str, w: World) -> None:
    """Rule: "until the client starts or resumes a session or sends ``null``"."""
    client, _ = await ended_at_replica(w)
    expected = "none"
    if way == "null":
        assert await session_seen_by(client, named=None) == "none"
    elif way == "start":
        expected = (await client.start())["sessionId"]
    else:
        expected = (await w.client().start())["sessionId"]
        await client.resume(expected)

    assert await session_seen_by(client) == expected


async def test_rule_1_and_session_methods_work_meanwhile(w: World) -> None:
    """They do not depend on the current session."""
    client, ended = await ended_at_replica(w)
    other = (await w.client().start())["sessionId"]

    assert await session_seen_by(client, named=other) == other
    assert (await client.error("session/resume", {"sessionId": ended}))["code"] == -32043
    assert (await client.error("tools/call", call_params("echo")))["code"] == -32043


@pytest.mark.in_memory
async def test_a_notification_with_null_leads_out_of_it_too(w: World) -> None:
    """Rule: "or sends ``null``": a notification is something sent."""
    client, _ = await ended_at_replica(w)

    await client.notify("notifications/roots/list_changed", {"_meta": in_session(None)})

    assert await session_seen_by(client) == "none"


# --- what stock clients really send --------------------------------------------------------


async def test_extra_session_metadata_is_ignored(w: World, client: RawClient) -> None:
    """Client 1 sends ``expiresAt`` never and others do; unknown members are no error."""
    session = (await w.client().start())["sessionId"]
    meta = {SESSION: {"sessionId": session, "expiresAt": "x", "other": 1}, "progressToken": 1}

    assert await client.text("session_id", meta=meta) == session


async def test_ids_start_at_zero_again_after_a_new_handshake(w: World) -> None:
    """REQ1: "JSON-RPC ids mean nothing beyond their connection"."""
    first, second = await w.connected(), await w.connected()
    session = (await first.start())["sessionId"]
    running = await w.waits(first.call("wait", gate="g"))

    await second.resume(session)
    assert running.id == 2
    answer = second.send("tools/call", call_params("echo", {"text": "b"}), request_id=2)
    assert text_of(await answer.result()) == "b"
    w.box.gate("g").go.set()

    assert text_of(await running.result()) == "through g"


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 7])
async def test_a_gate_is_not_passed_by_a_tool_name_that_is_no_text(name: object, w: World) -> None:
    """Some servers read ``["echo"]`` as ``echo``."""
    w.layer.require_session(tools={"echo"})
    client = await w.connected()

    error = await client.error("tools/call", {"name": name, "arguments": {}})

    assert error["code"] == -31044
