"""The POST side of handshake-era HTTP: JSON or a stream, and what becomes of a cut one."""

import asyncio
import gc
from collections.abc import Sequence

import mcp_types as types
import pytest
from mcp.server.context import CallNext, HandlerResult

from mcp_sessions import Conversations
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions_transports.http.channel import PostChannel
from tests.support.raw import (
    NEWEST,
    VERSIONS,
    Json,
    RawClient,
    Reply,
    Sent,
    call_params,
    in_session,
    keyed,
    text_of,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, connected_world, world

CHANGED = "notifications/roots/list_changed"
SMALL_BUFFER = {"send_buffer": 10_000, "max_events": 5_000, "max_bytes": 10_000_000}
"""A reader that stalls fills it; what is emitted all fits the log."""
OLDER = [version for version in VERSIONS if version != NEWEST]


async def started(w: World, client: RawClient, gate: str = "g", **meta: object) -> Sent:
    """A call that waits at a gate, seen to have begun."""
    sent = await w.waits(client.call("wait", gate=gate, meta=meta or None), gate)
    return sent


async def silence(seconds: float) -> None:
    """Time passes, virtually."""
    await asyncio.sleep(seconds)


# --- JSON or a stream ------------------------------------------------------------------------


async def test_an_answer_that_comes_soon_is_json() -> None:
    """Promised: "JSON if done within 100 ms with nothing emitted"."""
    async with connected_world() as (w, client):

        async def soon(ctx: Ctx, arguments: object) -> str:
            await silence(0.09)
            return "soon"

        w.box.tools["soon"] = soon
        reply = await client.call("soon").reply.done()

        assert reply.status == 200
        assert reply.header("content-type") == "application/json"
        assert reply.header("content-length") == str(len(reply.body))
        assert reply.header("mcp-session-id") == client.session_id


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_answer_that_takes_longer_is_a_stream(version: str) -> None:
    """Rule: "else SSE, from 2025-11-25 on opened with a priming event and ``retry``": older clients
    do not understand an event without data.
    """
    async with world() as w:
        client = await w.connected(version=version)
        sent = await started(w, client)
        await sent.reply.started()
        assert sent.reply.is_sse
        if version == NEWEST:
            priming = await sent.reply.event(0)
            assert priming.fields == {"id": priming.id, "retry": "1000", "data": ""}
        w.box.gate("g").go.set()

        await sent.result()
        await sent.reply.done()

        first_with_data = 1 if version == NEWEST else 0
        events = sent.reply.events
        assert [event.message is not None for event in events] == [False] * first_with_data + [True]
        assert events[-1].fields["event"] == "message"
        assert events[-1].id


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_answer_after_something_else_is_a_stream(version: str) -> None:
    """However soon it comes: what was emitted has to go first."""
    async with world() as w:
        client = await w.connected(version=version)
        sent = client.call("progress", steps=3, meta={"progressToken": 7})

        await sent.result()
        await sent.reply.done()

        kinds = [m.get("method", "answer") for m in sent.reply.messages]
        assert kinds == ["notifications/progress"] * 3 + ["answer"]


async def test_a_stream_is_not_buffered_on_its_way() -> None:
    """Promised: "``X-Accel-Buffering: no``, ``Cache-Control: no-cache, no-transform``"."""
    async with connected_world() as (w, client):
        for reply in (client.get(), (await started(w, client)).reply):
            await reply.started()
            assert reply.header("x-accel-buffering") == "no"
            assert reply.header("cache-control") == "no-cache, no-transform"
            assert reply.header("mcp-session-id") == client.session_id
            assert reply.header("content-length") is None


async def test_a_silent_stream_says_that_it_lives() -> None:
    """Promised: "a comment every 15 s", on GET and POST streams."""
    async with connected_world() as (w, client):
        replies = [client.get(), (await started(w, client)).reply]
        for reply in replies:
            await reply.event(0)

        await silence(15.1)
        assert [reply.comments for reply in replies] == [[": keep-alive"]] * 2
        await silence(30)
        assert [len(reply.comments) for reply in replies] == [3, 3]


async def test_a_handler_sees_the_http_request() -> None:
    """Promised: "``ctx.request_context.request``", its headers and its body."""
    async with world() as w:

        async def look(ctx: Ctx, arguments: object) -> str:
            assert ctx.request is not None
            body = await ctx.request.json()
            return f"{ctx.request.headers['x-test']} {body['method']} {ctx.request.url.path}"

        w.box.tools["look"] = look
        client = await w.connected()
        for _ in range(2):
            params = call_params("look")
            sent = client.send("tools/call", params, headers={"X-Test": "seen"})
            assert text_of(await sent.result()) == "seen tools/call /mcp"
            await client.start()


async def test_our_errors_come_with_status_200() -> None:
    """Client 2: "on 404 the 1.x Python client throws the body away …; on some other 4xx its whole
    transport dies".
    """
    async with connected_world(request_key_bytes=300) as (w, client):
        session = (await client.start())["sessionId"]
        await started(w, client, **keyed("k"))
        sent = [
            client.call("wait", gate="h", meta=keyed("k")),
            client.call("echo", text="x", meta=keyed("k" * 200)),
            client.call("echo", text="x", meta=in_session("x")),
            client.send("session/resume", {}),
            client.send("session/end", {"sessionId": client.session_id}),
        ]
        answers = [(one.reply, await one.error()) for one in sent]
        await w.client().resume(session)
        displaced = client.send("tools/list")
        answers.append((displaced.reply, await displaced.error()))

        codes = [error["code"] for _, error in answers]
        assert codes == [-32600, -31011, -32043, -32602, -32600, -31010]
        assert {reply.status for reply, _ in answers} == {200}
        assert {reply.header("content-type") for reply, _ in answers} == {"application/json"}


async def test_a_lone_post_streams_without_ids() -> None:
    """It cannot be resumed, so nothing in it may look as if it could."""
    async with world() as w:
        session = (await w.client().start())["sessionId"]
        sent = w.client().call(
            "progress", steps=2, meta={"progressToken": 1, **in_session(session)}
        )

        await sent.result()
        await sent.reply.done()

        assert [sorted(event.fields) for event in sent.reply.events] == [["data", "event"]] * 3


def logs_at_initialize(w: World, *texts: str) -> None:
    """The server logs while it handles ``initialize``."""

    async def log(ctx: Ctx, call_next: CallNext) -> HandlerResult:
        result = await call_next(ctx)
        if ctx.method == "initialize":
            for text in texts:
                params = types.LoggingMessageNotificationParams(level="info", data=text)
                await ctx.session.send_notification(
                    types.LoggingMessageNotification(params=params), ctx.request_id
                )
        return result

    w.box.server.middleware.append(log)


async def test_what_a_server_says_while_it_handles_initialize_comes_before_the_answer() -> None:
    """On the response's stream, whose headers name the session all the same."""
    async with world() as w:
        logs_at_initialize(w, "hello", "again")

        client_info = {"name": "raw", "version": "1"}
        handshake = {"protocolVersion": NEWEST, "capabilities": {}, "clientInfo": client_info}
        sent = w.client().send("initialize", handshake)
        answer = await sent.result()
        await sent.reply.done()

        assert "capabilities" in answer
        messages = sent.reply.messages
        assert [said["params"]["data"] for said in messages[:-1]] == ["hello", "again"]
        assert messages[-1]["id"] == sent.id
        assert not any("id" in event.fields for event in sent.reply.events)
        assert sent.reply.header("mcp-session-id") is not None


async def test_initialize_is_answered_whatever_a_server_says_meanwhile() -> None:
    """More than the buffer takes: what waits too long is given up, and not the handshake."""
    async with world(send_buffer=10_000) as w:
        logs_at_initialize(w, *("x" * 1_000 for _ in range(100)))

        client = await w.connected()

        assert client.session_id is not None


# --- cut, and fetched again --------------------------------------------------------------------


async def test_the_answer_can_be_fetched_after_its_stream_was_cut() -> None:
    """HTL10: "The final response is replayable after its stream ended"; as often as asked."""
    async with connected_world() as (w, client):
        sent = await started(w, client)
        priming = await sent.reply.event(0)
        await sent.reply.gone()
        w.box.gate("g").go.set()

        for _ in range(2):
            again = client.get(priming.id)
            answer = await again.answer(sent.id)
            await again.done()
            assert answer["result"]["content"][0]["text"] == "through g"
        assert w.box.calls == ["wait"]


async def test_a_stream_fetched_while_its_request_runs_continues_live() -> None:
    """ATT6: what was missed, then what comes, once and in order, then the end."""
    async with connected_world() as (w, client):
        sent = client.call("progress", steps=4, gate="g", meta={"progressToken": 1})
        first = await sent.reply.event(1)
        await sent.reply.gone()

        again = await client.get(first.id).started()
        w.box.gate("g").go.set()
        await again.done()

        steps = [m["params"]["progress"] for m in again.messages if "method" in m]
        assert steps == [2, 3, 4]
        assert again.answer_to(sent.id) is not None


async def test_a_stream_fetched_twice_ends_the_older_reader() -> None:
    """HTL8: "Half-open old connection: reconnect … works at once"; and the newer one gets all."""
    async with connected_world() as (w, client):
        sent = await started(w, client)
        priming = await sent.reply.event(0)  # and nobody noticed that it was cut
        again = await client.get(priming.id).started()
        await sent.reply.done()
        third = await client.get(priming.id).started()
        await again.done()
        w.box.gate("g").go.set()

        assert "result" in await third.answer(sent.id)
        assert sent.reply.messages == again.messages == []


async def test_a_fetched_stream_has_an_id_before_its_first_event() -> None:
    """STA3: "Priming events on POST and GET streams": cut again at once, nothing is lost."""
    async with connected_world() as (w, client):
        sent = await started(w, client)
        position = (await sent.reply.event(0)).id
        sent.reply.leave()
        for _ in range(3):
            again = client.get(position)
            position = (await again.event(0)).id
            await again.gone()
        w.box.gate("g").go.set()

        assert "result" in await client.get(position).answer(sent.id)


async def test_two_streams_of_one_connection_never_cross() -> None:
    """REQ1, SEC7: "Replay is scoped to session *and* stream"; here with one JSON-RPC id."""
    async with connected_world() as (w, client):
        positions: list[str] = []
        for gate in ("a", "b"):
            params = call_params("wait", {"gate": gate})
            sent = client.send("tools/call", params, request_id="same")
            positions.append((await sent.reply.event(0)).id)
            await sent.reply.gone()
        get = await client.get().started()
        for gate in ("b", "a"):
            w.box.gate(gate).go.set()

        for gate, position in zip("ab", positions, strict=True):
            answer = await client.get(position).answer("same")
            assert answer["result"]["content"][0]["text"] == f"through {gate}"
        assert get.messages == []


async def test_a_foreign_position_yields_nothing_of_its_stream() -> None:
    """SEC7: the stream of another connection is none of one's own."""
    async with world() as w:
        client, other = await w.connected(), await w.connected()
        sent = await started(w, client)
        position = (await sent.reply.event(0)).id
        w.box.gate("g").go.set()
        await sent.result()

        reply = await other.get(position).done()

        assert [m["error"]["code"] for m in reply.messages] == [-31012]


@pytest.mark.parametrize("request_id", [7, "seven", 'ü/."', 0, "", 2**53])
async def test_an_evicted_position_is_answered(request_id: int | str) -> None:
    """Rule: "A POST stream's evicted ``Last-Event-ID``: its request id is answered with ``-31012``,
    and the stream ends": whatever the id is made of (EVT8).
    """
    async with connected_world(max_events=2) as (w, client):
        params = call_params("progress", {"steps": 9, "gate": "g"}, {"progressToken": 1})
        sent = client.send("tools/call", params, request_id=request_id)
        position = (await sent.reply.event(0)).id
        assert all(0x21 <= ord(character) <= 0x7E for character in position)
        await sent.reply.gone()
        w.box.gate("g").go.set()
        await cycles()

        reply = await client.get(position).done()

        assert reply.status == 200
        assert reply.messages == [
            {
                "jsonrpc": "2.0",
                "id": request_id,
                "error": {"code": -31012, "message": "Outcome unknown"},
            }
        ]


# Which of five calls made at once completes first, another store decides.
@pytest.mark.in_memory
async def test_the_ends_of_finished_streams_are_kept_within_a_bound() -> None:
    """ATT7, REQ8: ``max_finished_streams``; the oldest goes first, and says so."""
    async with connected_world(max_finished_streams=3) as (_, client):
        sent: list[Sent] = []
        for number in range(5):
            # One after the other: the oldest is the one that ended first.
            sent.append(client.call("progress", steps=1, meta={"progressToken": number}))
            await sent[-1].reply.done()
            await cycles(20)
        positions = [one.reply.events[0].id for one in sent]

        replies = [await client.get(position).done() for position in positions]

        codes = [reply.messages[-1].get("error", {}).get("code") for reply in replies]
        assert codes == [-31012, -31012, None, None, None]


def say(w: World, client: RawClient, number: int, gate: str | None = None) -> Sent:
    """A call that is answered on a stream, with 2,000 letters."""

    async def tool(ctx: Ctx, arguments: Json) -> str:
        await ctx.session.report_progress(1, 1)
        if "gate" in arguments:
            await w.box.gate(arguments["gate"]).arrive()
        return "x" * 2_000

    w.box.tools["say"] = tool
    arguments = {} if gate is None else {"gate": gate}
    return client.call("say", meta={"progressToken": number}, **arguments)


async def fetched(client: RawClient, sent: Sequence[Sent]) -> list[int | None]:
    """Which of these calls' answers come again: None, or the error's code."""
    replies = [await client.get(one.reply.events[0].id).done() for one in sent]
    return [reply.messages[-1].get("error", {}).get("code") for reply in replies]


async def test_the_ends_of_finished_streams_are_bounded_in_bytes() -> None:
    """ATT7: what was sent whole stands within one window, however few that are."""
    async with connected_world(max_bytes=5_000) as (w, client):
        sent: list[Sent] = []
        for number in range(4):
            sent.append(say(w, client, number))
            assert "result" in await sent[-1].answer()
            await sent[-1].reply.done()
            await cycles(50)

        assert await fetched(client, sent) == [-31012, -31012, None, None]


async def test_an_answer_that_nobody_read_is_not_forgotten_for_one_that_was_read() -> None:
    """HTL10: until answers that nobody read are more than ``max_unread_bytes``."""
    async with connected_world(max_bytes=5_000, max_unread_bytes=7_000) as (w, client):
        unread: list[Sent] = []
        for number in range(4):
            unread.append(say(w, client, number, f"g{number}"))
            await unread[-1].reply.event(0)
            unread[-1].reply.leave()
            await cycles(50)
            w.box.gate(f"g{number}").go.set()
            await cycles(50)
        read: list[Sent] = []
        for number in range(4, 7):
            read.append(say(w, client, number))
            await read[-1].reply.done()
            await cycles(50)

        assert await fetched(client, read) == [-31012, None, None]
        assert await fetched(client, unread) == [-31012, None, None, None]


async def test_nothing_of_a_request_stays_but_what_it_sent() -> None:
    """Its messages are kept for ``Last-Event-ID``, as often as somebody asks for them; what ran,
    who asked for it, and the way back are not.
    """

    def left() -> list[object]:
        gc.collect()
        kinds = (RunningRequest, Inbound, PostChannel)
        return [each for each in gc.get_objects() if type(each) in kinds]

    async with connected_world() as (_, client):
        sent = [client.call("progress", steps=1, meta={"progressToken": n}) for n in range(5)]
        for one in sent:
            assert (await one.reply.done()).status == 200
        await cycles(20)
        assert left() == []

        for _ in range(2):
            assert await fetched(client, sent) == [None] * 5
            await cycles(20)
            assert left() == []


async def test_a_stream_is_not_forgotten_while_it_is_read() -> None:
    """HTL10: a bound on finished streams must not take the answer from a slow reader's hands, as
    it did when many calls of one connection ended together.
    """
    async with connected_world(max_finished_streams=3, send_buffer=500) as (w, client):
        sent = [
            client.call("progress", steps=10, gate="g", meta={"progressToken": n})
            for n in range(50)
        ]
        for one in sent:
            await one.reply.event(0)
            one.reply.stall()
        w.box.gate("g").go.set()
        await cycles(200)
        for one in sent:
            one.reply.unstall()

        for one in sent:
            assert "result" in await one.answer()
            assert len(one.reply.messages) == 11


async def test_a_position_of_a_stream_that_never_was_is_answered() -> None:
    """Well-formed and unknown: the client that waits for it must not wait for ever (CLI1)."""
    async with connected_world() as (w, client):
        sent = await started(w, client)
        position = (await sent.reply.event(0)).id
        stream, _, rest = position.partition("/")
        unknown = stream[:-1] + ("0" if stream[-1] != "0" else "1") + "/" + rest

        reply = await client.get(unknown).done()

        assert reply.messages[0]["id"] == sent.id
        assert reply.messages[0]["error"]["code"] == -31012
        assert not sent.reply.ended


# --- close_sse_stream --------------------------------------------------------------------------


async def test_a_handler_closes_its_stream_and_the_client_comes_back() -> None:
    """``ctx.close_sse_stream()``; the client has an id to come back with."""
    async with connected_world() as (w, client):
        sent = client.call("close_stream", gate="g")
        await sent.reply.done()
        await w.box.gate("g").started.wait()

        assert [event.message for event in sent.reply.events] == [None]
        again = client.get(sent.reply.events[0].id)
        w.box.gate("g").go.set()

        answer = await again.answer(sent.id)
        assert answer["result"]["content"][0]["text"] == "answered after its stream was closed"


@pytest.mark.parametrize("version", OLDER)
async def test_an_older_clients_stream_cannot_be_closed(version: str) -> None:
    """It got no priming event, so it could not come back (as in the SDK)."""
    async with world() as w:
        client = await w.connected(version=version)
        assert await client.text("close_stream", gate="g") == "cannot be closed"


async def test_a_lone_posts_stream_cannot_be_closed() -> None:
    """It could not come back either."""
    async with world() as w:
        session = (await w.client().start())["sessionId"]
        text = await w.client().text("close_stream", gate="g", meta=in_session(session))
        assert text == "cannot be closed"


# --- a reader that stalls ----------------------------------------------------------------------


async def flood(
    w: World, client: RawClient, *, messages: int, size: int, session: str | None = None
) -> Reply:
    """A call that emits more than its stalled reader takes; the POST's reply."""

    async def emit(ctx: Ctx, arguments: dict[str, object]) -> str:
        for number in range(messages):
            await ctx.session.report_progress(number, None, "x" * size)
        w.box.gate("flooded").started.set()
        return "flooded"

    w.box.tools["flood"] = emit
    w.carrier.stalls_next = True
    named = in_session(session) if session is not None else {}
    return client.call("flood", meta={"progressToken": 1, **named}).reply


@pytest.mark.parametrize("lone", [False, True], ids=["connection", "lone post"])
async def test_a_stalled_post_reader_is_cut(lone: bool) -> None:
    """Rule: "A connection is slow, and detached, only when its peer has taken nothing for 10 s with
    a full buffer"; then the handler goes on, and what it emits is kept where it can be.
    """
    async with connected_world(**SMALL_BUFFER) as (w, client):
        session = (await client.start())["sessionId"]
        begun = asyncio.get_running_loop().time()

        sender = w.client() if lone else client
        reply = await flood(w, sender, messages=100, size=1_000, session=session)
        await w.box.gate("flooded").started.wait()

        waited = asyncio.get_running_loop().time() - begun
        assert 10 <= waited < 12
        await reply.done()


@pytest.mark.parametrize("lone", [False, True], ids=["connection", "lone post"])
async def test_a_handler_that_never_waits_yields_to_the_writer(lone: bool) -> None:
    """Rule: "A handler that emits faster than its own session's connection takes yields to the
    writer": its messages fell out of the stream's window before anybody had read one, and
    its client, who read as fast as it could, received ``-31012``.
    """
    async with connected_world(max_events=100) as (w, client):
        session = (await client.start())["sessionId"]
        sender = w.client() if lone else client

        sent = sender.call(
            "progress", steps=3_000, meta={"progressToken": 1, **in_session(session)}
        )
        await sent.answer()

        assert [m["params"]["progress"] for m in sent.reply.messages[:-1]] == [*range(1, 3_001)]


async def test_a_handler_that_never_waits_lets_others_run() -> None:
    """Rule: "It … delays no other session or request"."""
    async with world() as w:
        client, other = await w.connected(), await w.connected()
        sent = client.call("progress", steps=100_000, meta={"progressToken": 1})
        await sent.reply.has(1)

        assert await other.text("echo", text="x") == "x"
        assert len(sent.reply.messages) < 1_000
        sent.reply.leave()
        await client.notify("notifications/cancelled", {"requestId": sent.id})


async def test_a_stalled_reader_gets_the_rest_when_it_comes_back() -> None:
    """It was cut, and lost nothing: the log was the buffer."""
    async with connected_world(**SMALL_BUFFER) as (w, client):
        reply = await flood(w, client, messages=100, size=1_000)
        await cycles()
        reply.unstall()
        position = (await reply.event(0)).id
        await reply.gone()

        again = await client.get(position).done()

        assert [m["params"]["progress"] for m in again.messages[:-1]] == [*range(100)]
        assert again.messages[-1]["result"]["content"][0]["text"] == "flooded"


async def test_a_stalled_reader_delays_nothing_else() -> None:
    """Promised: "A reader that stalls delays nothing else in its session (it does in the
    SDK)": other requests, the GET stream, other sessions.
    """
    async with connected_world(send_buffer=10_000) as (w, client):
        await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        stream = await client.get().started()
        begun = asyncio.get_running_loop().time()
        await flood(w, client, messages=100, size=1_000)
        await cycles()

        assert await client.text("echo", text="x") == "x"
        await w.layer.notify_resource_updated("a:1")
        await stream.has(1)
        other = await w.connected()
        assert await other.text("echo", text="y") == "y"
        assert asyncio.get_running_loop().time() == begun
        assert not w.box.gate("flooded").started.is_set()


async def test_a_reader_that_is_slow_but_takes_something_is_not_cut() -> None:
    """Rule: "only when its peer has taken nothing for 10 s"."""
    async with connected_world(**SMALL_BUFFER) as (w, client):
        reply = await flood(w, client, messages=50, size=1_000)
        while not reply.ended:
            await silence(9)
            reply.unstall()
            await cycles(2)
            reply.stall()

        assert len(reply.messages) == 51
        assert "result" in reply.messages[-1]


async def test_the_buffer_of_a_stalled_reader_is_bounded() -> None:
    """Rule: "It is never buffered without bound": what was handed over when it takes again."""
    async with connected_world(**SMALL_BUFFER) as (w, client):
        reply = await flood(w, client, messages=1_000, size=1_000)
        await cycles(3_000)
        chunks = len(w.carrier.journal)
        reply.unstall()
        await reply.done()

        sizes = [len(chunk) for sent, chunk in w.carrier.journal[chunks:] if sent is reply]
        assert sizes
        assert max(sizes) <= 10_000 + 2_000
        assert len(reply.messages) == 1_001


async def test_notifications_whose_handlers_do_not_end_are_bounded() -> None:
    """ERR6: each was a task that nobody counted. What one client leaves unhandled keeps no
    other client's from being handled.
    """
    async with world(max_running_requests=2) as w:
        begun: list[str] = []
        go = asyncio.Event()

        async def handler(ctx: object, params: types.NotificationParams) -> None:
            begun.append("handled")
            await go.wait()

        w.box.server.add_notification_handler(CHANGED, types.NotificationParams, handler)
        client, other = await w.connected(), await w.connected()
        for _ in range(5):
            await client.notify(CHANGED)
        await cycles()
        assert len(begun) == 2
        await other.notify(CHANGED)
        await cycles()
        assert len(begun) == 3
        go.set()
        await cycles()
        await client.notify(CHANGED)
        await cycles()
        assert len(begun) == 4


async def test_strangers_without_a_session_have_notifications_of_their_own() -> None:
    """ERR6: without authentication all of them counted as one, so that the handlers of one kept
    everybody else's notifications out.
    """
    async with world(max_running_requests=2, conversations=Conversations()) as w:
        begun: list[str] = []
        go = asyncio.Event()

        async def handler(ctx: object, params: types.NotificationParams) -> None:
            begun.append("handled")
            await go.wait()

        w.box.server.add_notification_handler(CHANGED, types.NotificationParams, handler)
        client, other = w.client(), RawClient(await w.carrier_from("203.0.113.7"))
        for _ in range(5):
            await client.notify(CHANGED)
        await cycles()
        assert len(begun) == 2
        await other.notify(CHANGED)
        await cycles()
        assert len(begun) == 3
        go.set()
