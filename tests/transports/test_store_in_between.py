"""Over HTTP, while the store takes its time or fails between two steps of an answer."""

import asyncio
from typing import Any

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import IN_NO_LOG, SessionId, parse_position
from tests.support.interposed import Interposed
from tests.support.raw import RawClient, Reply, Sent, call_params, in_session, text_of, uris
from tests.support.world import Ctx, World, connected_world, world

ROUND_TRIP = 0.004


async def silence(seconds: float) -> None:
    """Time passes, virtually."""
    await asyncio.sleep(seconds)


def reports_after(w: World, seconds: float, *, answers_after: float = 0.0) -> None:
    """The tool ``late`` reports progress so long after it was called, and then returns."""

    async def late(ctx: Ctx, arguments: object) -> str:
        await silence(seconds)
        await ctx.session.report_progress(1, 2)
        await silence(answers_after)
        await ctx.session.report_progress(2, 2)
        return "late"

    w.box.tools["late"] = late


def called_late(client: RawClient) -> Sent:
    return client.call("late", meta={"progressToken": 1})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tenths", range(940, 1_010, 5))
async def test_a_message_about_the_deadline_for_json_makes_a_stream(tenths: int, when: str) -> None:
    """Whenever it comes: the deadline may pass while the store opens the stream."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        reports_after(w, tenths / 10_000)
        client = await w.connected()

        async def wait() -> None:
            await silence(ROUND_TRIP)

        (interposed.before if when == "before" else interposed.after)["open_stream"] = wait
        sent = called_late(client)

        assert text_of(await sent.result()) == "late"
        reply = await sent.reply.done()
        assert reply.error is None and reply.status == 200 and reply.is_sse
        assert [m["params"]["progress"] for m in reply.messages[:-1]] == [1, 2]
        assert [event.id for event in reply.events] == sorted({e.id for e in reply.events})
        assert interposed.calls.count("open_stream") == 1


@pytest.mark.parametrize("away", [False, True])
async def test_what_a_handler_sends_at_once_waits_for_one_stream(away: bool) -> None:
    """All of it goes there, however long the store takes to open it, and if it cannot."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:

        async def both(ctx: Ctx, arguments: object) -> str:
            await asyncio.gather(*(ctx.session.report_progress(n, 3) for n in (1, 2, 3)))
            return "both"

        w.box.tools["both"] = both
        client = await w.connected()

        async def wait() -> None:
            await silence(ROUND_TRIP)
            if away:
                raise StoreUnavailable("away")

        interposed.after["open_stream"] = wait
        sent = client.call("both", meta={"progressToken": 1})

        assert text_of(await sent.result()) == "both"
        reply = await sent.reply.done()
        assert sorted(m["params"]["progress"] for m in reply.messages[:-1]) == [1, 2, 3]
        assert all(("id" in event.fields) is not away for event in reply.events)
        assert interposed.calls.count("open_stream") == 1


async def test_a_stream_that_was_cut_while_it_was_being_opened_is_one_that_nobody_reads() -> None:
    """Its request's time is bounded from then on, as of any that nobody listens to."""
    interposed = Interposed()
    async with connected_world(store=interposed.store, detached_timeout=30) as (w, client):

        async def breaks() -> None:
            raise RuntimeError("this store breaks")

        interposed.before["open_stream"] = breaks
        sent = client.call("wait", gate="g")
        error = (await sent.reply.done()).error
        assert isinstance(error, RuntimeError)
        sent.reply.error = None
        interposed.mend()

        assert not w.box.gate("g").cancelled.is_set()
        await silence(31)
        assert w.box.gate("g").cancelled.is_set()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_stream_that_cannot_be_forgotten_now_is_forgotten_later(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody's answer is spoiled by it: not the one that ends just then, and not that of
    who joined it.
    """
    interposed = Interposed()
    async with world(store=interposed.store, max_finished_streams=1) as w:
        reports_after(w, 0)
        client = await w.connected()
        interposed.fails("drop_stream", when)
        for _ in range(3):
            sent = called_late(client)
            assert text_of(await sent.result()) == "late"
            reply = await sent.reply.done()
            assert reply.status == 200 and reply.error is None
        assert "deleted later" in caplog.text

        interposed.mend()
        assert text_of(await called_late(client).result()) == "late"
        await silence(1)
        session = next(iter(interposed.memory._sessions.values()))  # pyright: ignore[reportPrivateUsage]
        assert session.streams is not None
        posts = [name for name in session.streams if name.startswith("post")]
        assert len(posts) == 1


# --- GET streams -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["change", "open_stream", "read"])
@pytest.mark.parametrize("how", ["elsewhere", "here"])
async def test_a_get_whose_session_ends_meanwhile_is_not_found_or_ends(
    method: str, how: str
) -> None:
    """However far it came: a stream that was begun ends, and the next one is not found. Never
    a 500, never a stream that stays open for nobody.
    """
    interposed = Interposed()
    async with connected_world(store=interposed.store) as (w, client):
        session_id = SessionId(client.session_id or "")

        async def ends() -> None:
            interposed.mend()
            if how == "here":
                await w.layer.sessions.end(session_id)
            else:
                await interposed.memory.end(session_id)

        interposed.before[method] = ends
        reply = client.get()
        if how == "elsewhere" and method == "read":
            # This process does not know: the stream is open until a look at the store.
            assert (await reply.started()).status == 200
        else:
            assert (await reply.done()).status == (200 if method == "read" else 404)
        assert reply.error is None
        assert (await client.get().done()).status == 404


async def received_after(w: World, client: RawClient, stream: Reply, uri: str) -> list[str]:
    """What a stream brought of ``note://`` by the time that ``uri`` came."""
    await w.layer.notify_resource_updated(uri)
    await stream.until(lambda: uri in uris(stream.messages), uri)
    return uris(stream.messages)


RESUMES = ("admit", "attach", "carry", "relay", "change")
"""What the store is asked for a ``session/resume``."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", RESUMES)
async def test_a_resume_that_failed_leaves_the_stream_as_it_was(method: str, when: str) -> None:
    """503 with ``Retry-After``, and the GET stream of the connection goes on: what is no
    session's comes at once, and the session's as soon as the client resumes.
    """
    interposed = Interposed()
    async with connected_world(store=interposed.store) as (w, client):
        session = (await client.start())["sessionId"]
        await client.result(
            "resources/subscribe", {"uri": "note://1", "_meta": in_session(session)}
        )
        await client.result("resources/subscribe", {"uri": "note://2", "_meta": in_session(None)})
        position = (await client.resume(session))["sessionEventId"]
        await w.layer.notify_resource_updated("note://1")
        stream = await client.get().started()

        interposed.fails(method, when)
        params = {"sessionId": session, "lastSessionEventId": position}
        reply = await client.send("session/resume", params).reply.done()
        assert reply.status == 503 and int(reply.header("retry-after") or 0) > 0
        interposed.mend()

        await received_after(w, client, stream, "note://2")
        assert (await client.resume(session, position))["replayed"] == 1
        await stream.until(lambda: "note://1" in uris(stream.messages))


async def test_an_answer_that_cannot_be_made_leaves_the_stream_as_it_was() -> None:
    """Nor does anything else that comes between the resume and its answer mute it."""
    async with connected_world() as (w, client):
        session = (await client.start())["sessionId"]
        await client.result("resources/subscribe", {"uri": "note://1"})
        stream = await client.get().started()
        store = w.layer.store
        real = store.change

        async def breaks(*_: object) -> None:
            raise RuntimeError("this store breaks")

        store.change = breaks  # pyright: ignore[reportAttributeAccessIssue]
        reply = await client.send("session/resume", {"sessionId": session}).reply.done()
        assert isinstance(reply.error, RuntimeError)
        reply.error = None
        store.change = real  # pyright: ignore[reportAttributeAccessIssue]

        assert await received_after(w, client, stream, "note://1") == ["note://1"]


# --- what comes from outside -----------------------------------------------------------------


def positions_asked(interposed: Interposed, name: str, argument: int | str) -> list[str]:
    """The positions that a method of the store is asked for from now on.

    Args:
        argument: Where it has them: a number or a keyword.
    """
    asked: list[str] = []
    real = getattr(interposed.store, name)

    async def call(*args: Any, **kwargs: Any) -> Any:
        found = args[argument] if isinstance(argument, int) else kwargs.get(argument)
        asked.extend([found] if found is not None else [])
        return await real(*args, **kwargs)

    setattr(interposed.store, name, call)
    return asked


@pytest.mark.parametrize(
    "last_event_id",
    ["nonsense", "1" * 60_000, "post-" + "a" * 60_000 + "/1800000000000000000-000000000007.NQ"],
)
async def test_no_store_is_asked_for_what_is_no_id(last_event_id: str) -> None:
    """ERR6: it is answered as a position that nobody knows, however long it is."""
    interposed = Interposed()
    async with connected_world(store=interposed.store) as (_, client):
        await client.result("resources/subscribe", {"uri": "note://1"})
        await client.get().started()
        asked = positions_asked(interposed, "read", 1)
        stream = client.get(last_event_id)

        assert uris(await stream.has(1))[0] == "note://1"
        assert stream.status == 200
        assert all(parse_position(position) for position in asked)


@pytest.mark.parametrize("text", ["x", "\U0001f600", "\x00", '"'])
async def test_a_request_id_is_in_the_ids_of_events_if_it_is_short(text: str) -> None:
    """ERR6: with a longer one a response is a stream all the same, but not one to come back to."""
    async with connected_world() as (w, client):
        for length, is_named in ((512, True), (513, False)):
            request_id = text * length
            params = call_params("progress", {"steps": 2}, {"progressToken": 1})
            sent = client.send("tools/call", params, request_id=request_id)
            await sent.result()
            await sent.reply.done()
            assert all(("id" in event.fields) is is_named for event in sent.reply.events)
            if is_named:
                again = await client.get(sent.reply.events[0].id).done()
                assert again.answer_to(request_id) is not None
            gate = f"{length}"
            closed = call_params("close_stream", {"gate": gate})
            w.box.gate(gate).go.set()
            sent = client.send("tools/call", closed, request_id=request_id)
            if not is_named:
                assert text_of(await sent.result()) == "cannot be closed"
            else:
                assert (await sent.reply.done()).answer_to(request_id) is None


@pytest.mark.parametrize("position", ["nonsense", "1" * 1_000_000])
async def test_no_store_is_asked_for_what_is_no_position(position: str) -> None:
    """ERR6: nor of a session."""
    interposed = Interposed()
    async with connected_world(store=interposed.store) as (_, client):
        session = (await client.start())["sessionId"]
        await client.get().started()
        asked = positions_asked(interposed, "attach", "position")
        result = await client.resume(session, position)

        assert result["catchup"] is False and result["reason"] == "unknown_position"
        assert asked and set(asked) <= {None, IN_NO_LOG}


# --- the end of a session --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "expired", "elsewhere"])
async def test_a_request_whose_connection_ends_is_answered_on_its_stream(how: str) -> None:
    """END6: not only where the answer is the first thing that is said."""
    async with connected_world() as (w, client):
        session_id = SessionId(client.session_id or "")
        sent = await w.waits(client.call("wait", gate="g"))
        await sent.reply.event(0)
        if how == "delete":
            await client.delete().done()
        elif how == "expired":
            w.clock.advance(86_400 * 8)
            await w.expire()
        else:
            await w.layer.store.end(session_id)
            await w.inside.lifecycle.forget_here(session_id, None)

        error = await sent.error()
        assert error["code"] == -32043 and error["data"]["started"] is True
        await sent.reply.done()
        assert w.box.gate("g").cancelled.is_set()


# --- the first GET ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["admit", "open_stream", "change", "read"])
async def test_a_first_get_that_failed_is_not_the_first(method: str, when: str) -> None:
    """HTL3: who was answered 503 has received nothing. What waited since ``initialize`` is on the
    stream that is opened then, and no session is detached for it.
    """
    interposed = Interposed()
    async with connected_world(store=interposed.store) as (w, client):
        session = (await client.start())["sessionId"]
        await client.result("resources/subscribe", {"uri": "note://1"})
        await w.layer.notify_resource_updated("note://1")
        interposed.fails(method, when)
        reply = await client.get().done()
        # Where the store is only asked for what follows, the stream has begun, and is cut.
        assert reply.status == (200 if method == "read" and reply.is_sse else 503)
        interposed.mend()

        stream = client.get()
        assert uris(await stream.has(1)) == ["note://1"]
        await w.client().text("update", uri="note://2", meta=in_session(session))
        assert uris(await stream.has(2)) == ["note://1", "note://2"]
        # And the one after it is a later one (HTL7).
        await stream.gone()
        await w.client().text("update", uri="note://3", meta=in_session(session))
        later = await client.get().started()
        await silence(1)
        assert uris(later.messages) == []
