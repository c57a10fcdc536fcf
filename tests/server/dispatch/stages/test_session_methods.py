"""``session/start``, ``session/resume`` and ``session/end`` on the wire of handshake-era HTTP."""

import re
from typing import Any

import pytest

from tests.support.raw import (
    UPDATED,
    Json,
    RawClient,
    call_params,
    event_ids,
    in_session,
    keyed,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import World, world

POSITION = re.compile(r"[0-9]{19}-[0-9]{12}")
UNKNOWN_ID = "A" * 43


async def update(w: World, session: str, *changed: str) -> None:
    """Events of one session, one per URI."""
    for uri in changed:
        client = w.client()
        await client.text("update", uri=uri, meta=in_session(session))


# --- session/start ------------------------------------------------------------------------


async def test_start_returns_an_id_a_position_and_an_expiry() -> None:
    """``{"sessionId": …, "sessionEventId": "<head>", "expiresAt": …}`` and nothing else."""
    async with world(idle_timeout=1800) as w:
        w.clock.now = 1_800_000_000.0
        started = await w.client().start()

        assert set(started) == {"sessionId", "sessionEventId", "expiresAt"}
        assert POSITION.fullmatch(started["sessionEventId"])
        assert started["expiresAt"] == "2027-01-15T08:30:00Z"  # 30 minutes later


async def test_start_takes_no_params_or_any(client: RawClient) -> None:
    """The elevation document sends ``{}``; none at all is as good."""
    assert "sessionId" in await client.result("session/start")
    assert "sessionId" in await client.result("session/start", {"x": 1, "_meta": {}})


async def test_the_head_of_start_is_a_position_before_the_first_event(w: World) -> None:
    """STA3: "a drop before the first event loses nothing"."""
    started = await w.client().start()
    await update(w, started["sessionId"], "a:1", "a:2")
    client = await w.connected()

    resumed = await client.resume(started["sessionId"], started["sessionEventId"])

    assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
    assert uris(await client.get().has(2)) == ["a:1", "a:2"]


async def test_a_connection_can_have_many_sessions_attached(w: World, client: RawClient) -> None:
    """The elevation document: "any number of independent sessions"; each event names its own."""
    sessions = [(await client.start())["sessionId"] for _ in range(3)]
    stream = client.get()
    for session in sessions:
        await update(w, session, "a:1")

    messages = await stream.has(3)

    assert [m["params"]["_meta"] for m in messages] == [in_session(s) for s in sessions]


# --- session/resume: the answer ------------------------------------------------------------


async def test_resume_says_what_it_replays(w: World) -> None:
    """``{"resumed": true, "catchup": true, "sessionEventId": "<head>", "replayed": 3,
    "expiresAt": …}`` and nothing else; the head is the last replayed event.
    """
    started = await w.client().start()
    await update(w, started["sessionId"], "a:1", "a:2", "a:3")
    client = await w.connected()

    resumed = await client.resume(started["sessionId"], started["sessionEventId"])
    messages = await client.get().has(3)

    assert set(resumed) == {"resumed", "catchup", "sessionEventId", "replayed", "expiresAt"}
    assert (resumed["resumed"], resumed["catchup"], resumed["replayed"]) == (True, True, 3)
    assert resumed["sessionEventId"] == event_ids(messages)[-1]


async def test_zero_missed_events_are_a_success(w: World) -> None:
    """CUP2: "a second resume with nothing new replays nothing"; the replay moved the client."""
    started = await w.client().start()
    await update(w, started["sessionId"], "a:1")
    client = await w.connected()
    stream = client.get()
    await client.resume(started["sessionId"], started["sessionEventId"])
    position = event_ids(await stream.has(1))[0]

    again = await client.resume(started["sessionId"], position)
    await cycles()

    assert (again["catchup"], again["replayed"]) == (True, 0)
    assert len(stream.messages) == 1


async def test_resume_from_the_middle_replays_what_follows(w: World) -> None:
    """ATT6: "the replay is (position, head]", in order, once."""
    started = await w.client().start()
    await update(w, started["sessionId"], *(f"a:{n}" for n in range(6)))
    reader = await w.connected()
    await reader.resume(started["sessionId"], started["sessionEventId"])
    third = event_ids(await reader.get().has(6))[2]
    client = await w.connected()

    resumed = await client.resume(started["sessionId"], third)

    assert resumed["replayed"] == 3
    assert uris(await client.get().has(3)) == ["a:3", "a:4", "a:5"]


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (None, "no_position"),
        ("{epoch}-{number:012d}", "ahead"),
        ("0000000000000000000-000000000001", "log_replaced"),
        ("9999999999999999999-000000000001", "unknown_position"),
        ("", "unknown_position"),
        ("se_305", "unknown_position"),
        ("x" * 100_000, "unknown_position"),
    ],
    ids=["none", "ahead", "older log", "newer log", "empty", "another server's", "large"],
)
async def test_a_bad_position_is_no_error_and_replays_nothing(
    w: World, position: str | None, reason: str
) -> None:
    """CUP8, CUP5: "nothing up to head is sent, head is the new position. Never a
    partial replay, never an error for a bad position". What is a position: `tests/test_ids.py`.
    """
    started = await w.client().start()
    await update(w, started["sessionId"], "a:1", "a:2")
    client = await w.connected()
    stream = client.get()
    head = (await client.resume(started["sessionId"]))["sessionEventId"]
    if position is not None:
        position = position.format(epoch=head[:19], number=int(head[20:]) + 1)

    resumed = await client.resume(started["sessionId"], position)
    await update(w, started["sessionId"], "a:3")

    assert (resumed["resumed"], resumed["catchup"], resumed["reason"]) == (True, False, reason)
    assert (resumed["sessionEventId"], resumed["replayed"]) == (head, 0)
    assert uris(await stream.has(1)) == ["a:3"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_events": 3}, "evicted"),
        ({"max_bytes": 2_000}, "evicted"),
        ({"max_age": 60, "idle_timeout": 1_000}, "expired"),
    ],
    ids=str,
)
async def test_what_the_window_lost_is_not_replayed_in_part(
    limits: dict[str, Any], reason: str
) -> None:
    """CUP5, ATT7: one missing event is enough. The window has bounds in events, bytes and
    age; lost to time and lost to space are two reasons.
    """
    async with world(**limits) as w:
        started = await w.client().start()
        await update(w, started["sessionId"], "a:1", *(f"a:{n}{'x' * 900}" for n in range(3)))
        w.clock.advance(61)
        client = await w.connected()
        stream = client.get()

        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        await update(w, started["sessionId"], "a:9")

        assert (resumed["catchup"], resumed["reason"]) == (False, reason)
        assert uris(await stream.has(1)) == ["a:9"]


@pytest.mark.parametrize("position", [None, 7, True, [], {}, 1.5], ids=str)
async def test_a_position_that_is_no_string_is_invalid_params(position: object, w: World) -> None:
    """Rule: "any other type is ``-32602``"; the session is not touched."""
    started = await w.client().start()
    holder = await w.connected()
    await holder.resume(started["sessionId"])
    thief = await w.connected()

    error = await thief.error(
        "session/resume", {"sessionId": started["sessionId"], "lastSessionEventId": position}
    )

    assert error["code"] == -32602
    assert await holder.text("session_id") == started["sessionId"]


@pytest.mark.parametrize("method", ["session/resume", "session/end"])
@pytest.mark.parametrize(
    "params", [None, {}, {"sessionId": None}, {"sessionId": 7}, {"sessionId": []}], ids=str
)
async def test_the_session_comes_from_params_only(
    method: str, params: Json | None, client: RawClient, session: str
) -> None:
    """Rule: "take the session from ``params.sessionId`` only; absent or mistyped: ``-32602``", also
    where rule 1 or rule 2 would name one.
    """
    assert (await client.error(method, params))["code"] == -32602
    named = {**(params or {}), "_meta": in_session(session)}
    assert (await client.error(method, named))["code"] == -32602
    assert await client.text("session_id") == session


@pytest.mark.parametrize("method", ["session/resume", "session/end"])
async def test_an_unknown_session_is_an_error_with_http_status_200(method: str, w: World) -> None:
    """Client 2: "``-32043`` must come with HTTP 200"; from a connection and from none."""
    for client in (await w.connected(), w.client()):
        sent = client.send(method, {"sessionId": UNKNOWN_ID})
        assert await sent.error() == {
            "code": -32043,
            "message": "Session not found",
            "data": {"sessionId": UNKNOWN_ID},
        }
        assert sent.reply.status == 200


async def test_a_lone_post_has_no_stream_and_keeps_its_position(w: World) -> None:
    """Rule: "``session/resume`` there detaches the old connection and answers ``catchup: false``,
    reason ``no_stream``; the client keeps its position for a resume elsewhere".
    """
    holder = await w.connected()
    started = await holder.start()
    stream = holder.get()
    await stream.started()

    lone = await w.client().resume(started["sessionId"], started["sessionEventId"])
    await update(w, started["sessionId"], "a:1")
    assert (lone["catchup"], lone["reason"], lone["replayed"]) == (False, "no_stream", 0)
    assert (await holder.error("tools/list"))["code"] == -31010
    assert stream.messages == []

    other = await w.connected()
    resumed = await other.resume(started["sessionId"], started["sessionEventId"])
    assert (resumed["catchup"], resumed["replayed"]) == (True, 1)


# --- session/resume: what follows ----------------------------------------------------------


async def test_the_answer_precedes_the_first_replayed_event(w: World) -> None:
    """RES6: "The result is written before the first replayed event", however slow its reader."""
    started = await w.client().start()
    await update(w, started["sessionId"], "a:1", "a:2")
    client = await w.connected()
    stream = await client.get().started()
    w.carrier.stalls_next = True
    sent = client.send(
        "session/resume",
        {"sessionId": started["sessionId"], "lastSessionEventId": started["sessionEventId"]},
    )
    await cycles(100)
    assert stream.messages == []

    sent.reply.unstall()

    assert uris(await stream.has(2)) == ["a:1", "a:2"]
    assert (await sent.result())["replayed"] == 2
    written = [
        reply
        for reply, chunk in w.carrier.journal
        if b"replayed" in chunk or UPDATED.encode() in chunk
    ]
    assert written[0] is sent.reply
    assert stream in written


async def test_resuming_where_it_is_attached_displaces_nobody(w: World) -> None:
    """Rule: "Resuming where it is already attached displaces nobody"."""
    client = await w.connected(capabilities={"extensions": {EXTENSION_NAME: {}}})
    stream = client.get()
    started = await client.start()
    await update(w, started["sessionId"], "a:1")
    await stream.has(1)

    resumed = await client.resume(started["sessionId"], started["sessionEventId"])
    await update(w, started["sessionId"], "a:2")

    assert resumed["replayed"] == 1
    assert uris(await stream.has(3)) == ["a:1", "a:1", "a:2"]
    assert await client.text("session_id") == started["sessionId"]


EXTENSION_NAME = "io.github.mcp-sessions/sessions"


async def test_what_waits_there_is_not_sent_twice_by_a_resume(w: World, client: RawClient) -> None:
    """Rule: "``session/resume`` first removes that session's entries from every GET stream"."""
    started = await client.start()
    await update(w, started["sessionId"], "a:1", "a:2")  # wait for the first GET

    await client.resume(started["sessionId"], started["sessionEventId"])
    stream = client.get()
    await update(w, started["sessionId"], "a:3")

    assert uris(await stream.has(3)) == ["a:1", "a:2", "a:3"]
    await cycles()
    assert len(stream.messages) == 3


async def test_a_resume_without_a_position_gives_up_what_waits(w: World, client: RawClient) -> None:
    """Rule: "Otherwise … nothing up to head is sent"."""
    started = await client.start()
    await update(w, started["sessionId"], "a:1", "a:2")

    await client.resume(started["sessionId"])
    stream = client.get()
    await update(w, started["sessionId"], "a:3")

    assert uris(await stream.has(1)) == ["a:3"]


async def test_resume_moves_the_deadline() -> None:
    """It is a request of the session, and says the new ``expiresAt``."""
    async with world(idle_timeout=100) as w:
        started = await w.client().start()
        w.clock.advance(50)
        resumed = await w.client().resume(started["sessionId"])

        assert resumed["expiresAt"] > started["expiresAt"]
        w.clock.advance(99)
        await w.client().resume(started["sessionId"])


# --- session/end -----------------------------------------------------------------------------


async def test_end_answers_an_empty_object(w: World) -> None:
    """Rule: "answer ``{}`` without session ``_meta``"."""
    session = (await w.client().start())["sessionId"]
    assert await w.client().end(session) == {}


async def test_ending_again_finds_nothing(client: RawClient, session: str) -> None:
    """END2, END1: "Ending again: ``-32043``"; so does a resume, by anybody, for ever."""
    await client.end(session)

    for method in ("session/end", "session/resume"):
        assert (await client.error(method, {"sessionId": session}))["code"] == -32043
    error = await client.error("tools/call", call_params("echo", {}, in_session(session)))
    assert error["code"] == -32043


async def test_nothing_of_an_ended_session_is_delivered(
    w: World, client: RawClient, session: str
) -> None:
    """END3: "MUST NOT deliver further session-scoped notifications"; not even what waited for
    the stream when it ended. SES18: a late write does not bring it back.
    """
    await client.result("resources/subscribe", {"uri": "a:1"})
    await client.text("keep")
    await update(w, session, "a:0")

    await client.end(session)
    await w.box.kept[0].send_resource_updated("a:1")
    await w.layer.notify_resource_updated("a:1")
    await w.layer.notify_tools_changed()
    stream = client.get()

    # The list change is sent without a session: none is attached here any more.
    assert [m["method"] for m in await stream.has(1)] == ["notifications/tools/list_changed"]
    assert "params" not in stream.messages[0]
    error = await client.error("session/resume", {"sessionId": session})
    assert error["code"] == -32043


async def test_end_cancels_what_runs(w: World) -> None:
    """Rule: "cancel running requests of the session (they answer ``-32043``)", also those that
    another connection sent; and "the answer is written last".
    """
    client, other = await w.connected(), await w.connected()
    session = (await client.start())["sessionId"]
    mine = client.call("wait", gate="mine")
    others = other.call("wait", gate="others", meta=in_session(session))
    unrelated = other.call("wait", gate="unrelated")
    for gate in ("mine", "others", "unrelated"):
        await w.box.gate(gate).started.wait()

    assert await client.end(session) == {}

    for sent in (mine, others):
        assert (await sent.error())["code"] == -32043
    for gate in ("mine", "others"):
        await w.box.gate(gate).cancelled.wait()
    assert not unrelated.reply.messages
    w.box.gate("unrelated").go.set()
    await unrelated.result()


async def test_end_ends_keyed_requests_too(w: World, client: RawClient, session: str) -> None:
    """Their keys go with the session; nothing waits for ever."""
    running = await w.waits(client.call("wait", gate="g", meta=keyed("k")))

    await client.end(session)

    assert (await running.error())["code"] == -32043


async def test_end_fails_open_questions(w: World) -> None:
    """ASK2: "fail open server-to-client requests": on the request's channel and next to it."""
    client = await w.connected(capabilities={"elicitation": {}})
    stream = client.get()
    session = (await client.start())["sessionId"]
    asks = client.call("ask", question="a?")
    alone = client.call("ask_standalone", question="b?")
    question = (await asks.reply.has(1))[0]
    other_question = (await stream.has(1))[0]

    await client.end(session)

    assert (await asks.error())["code"] == (await alone.error())["code"] == -32043
    for asked in (question, other_question):
        assert asked["method"] == "elicitation/create"
        await client.respond(asked, {"action": "cancel"})  # too late; accepted, ignored


async def test_a_session_can_be_ended_from_a_lone_post(w: World) -> None:
    """Ended elsewhere, as far as its connection is concerned."""
    client: RawClient = await w.connected()
    session = (await client.start())["sessionId"]
    await w.client().end(session)
    assert (await client.error("tools/list"))["code"] == -32043
    assert (await client.error("resources/subscribe", {"uri": "a:1"}))["code"] == -32043
    assert UPDATED not in str(client.get().messages)
