"""What a handler sees: ``current_session()``, the handle, and ``session.data``."""

import asyncio
from typing import Any

import pytest

from mcp_sessions import current_session
from mcp_sessions.errors import DataConflict, LimitReached, SessionRequired
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.support.raw import Json, RawClient, in_process, in_session, keyed, text_of
from tests.support.replicas import cluster
from tests.support.world import Ctx, Toolbox, World, count, world


def tool(w: World, name: str) -> Any:
    """Adds a tool to the server."""

    def add(function: Any) -> Any:
        w.box.tools[name] = function
        return function

    return add


async def test_outside_of_a_session_there_is_none() -> None:
    """Promised: "raises outside a session; ``current_session(default=None)`` asks"."""
    with pytest.raises(SessionRequired, match="this request belongs to no session"):
        current_session()
    assert current_session(default=None) is None
    assert current_session(default="other") == "other"


async def test_a_request_without_a_session_has_none(w: World) -> None:
    """Rule 3; a transport-mode session alone is none."""

    @tool(w, "ask_for_it")
    async def ask_for_it(ctx: Ctx, arguments: Json) -> str:
        try:
            session = current_session()
        except SessionRequired:
            return "none"
        return session.id if session.source == "session" else "none"

    client = await w.connected()
    assert await client.text("ask_for_it") == "none"
    session = (await client.start())["sessionId"]
    assert await client.text("ask_for_it") == session
    assert await client.text("ask_for_it", meta=in_session(None)) == "none"


async def test_requests_at_the_same_time_have_their_own(w: World) -> None:
    """SEC7: many sessions in one event loop never see each other's."""
    sessions = [(await w.client().start())["sessionId"] for _ in range(20)]

    @tool(w, "slowly")
    async def slowly(ctx: Ctx, arguments: Json) -> str:
        before = current_session().id
        await w.box.gate("g").arrive()
        inner = await asyncio.create_task(_id())
        return " ".join({before, inner, current_session().id})

    sent = [w.client().call("slowly", meta=in_session(session)) for session in sessions]
    await w.box.gate("g").started.wait()
    w.box.gate("g").go.set()

    assert [text_of(await one.result()) for one in sent] == sessions


async def _id() -> str:
    return current_session().id


async def test_the_handle_says_what_it_is() -> None:
    """Promised: "``id``, ``created_at``, ``expires_at``, ``principal``"."""
    async with world(idle_timeout=100) as w:
        seen: list[Any] = []

        @tool(w, "look")
        async def look(ctx: Ctx, arguments: Json) -> str:
            seen.append(current_session())
            return "seen"

        begun = w.clock.now
        client = await w.connected()
        session = (await client.start())["sessionId"]
        w.clock.advance(50)
        await client.text("look")

        handle = seen[0]
        assert (handle.id, handle.created_at) == (session, begun)
        assert handle.expires_at == begun + 150
        assert handle.principal.subject is None


async def test_notify_is_a_session_event(w: World) -> None:
    """It is stored, numbered, and replayed if missed."""
    started = await w.client().start()
    named = in_session(started["sessionId"])
    await w.client().text("tell", method="notifications/x", params={"a": 1}, meta=named)
    await w.client().text("tell", method="notifications/y", meta=named)
    client = await w.connected()
    stream = client.get()

    resumed = await client.resume(started["sessionId"], started["sessionEventId"])

    assert resumed["replayed"] == 2
    first, second = await stream.has(2)
    assert (first["method"], first["params"]["a"]) == ("notifications/x", 1)
    assert set(second["params"]) == {"_meta", "sessionEventId"}


# --- data ---------------------------------------------------------------------------------


async def test_data_is_kept_with_the_session_and_never_sent(w: World) -> None:
    """``session.data``: "kept in the store, edited with compare-and-set, never sent"; another
    connection of the session finds it, another session does not.
    """

    @tool(w, "remember")
    async def remember(ctx: Ctx, arguments: Json) -> str:
        async with current_session().data.edit() as data:
            data.setdefault("log", []).append(arguments["text"])
        return str(await current_session().data.read())

    first = await w.connected()
    session = (await first.start())["sessionId"]
    await first.text("remember", text="secret-1")
    second = await w.connected()
    await second.resume(session)

    assert await second.text("remember", text="secret-2") == str({"log": ["secret-1", "secret-2"]})
    await second.start()
    assert await second.text("remember", text="x") == str({"log": ["x"]})
    result = await first.result("session/resume", {"sessionId": session})
    assert "secret" not in str(result)


async def test_an_edit_that_fails_changes_nothing(w: World) -> None:
    """Nothing is stored when the block ends with an error; and reading gives a copy."""

    @tool(w, "edit")
    async def edit(ctx: Ctx, arguments: Json) -> str:
        session = current_session()
        async with session.data.edit() as data:
            data["kept"] = {"n": 1}
        with pytest.raises(RuntimeError):
            async with session.data.edit() as data:
                data["kept"]["n"] = 2
                raise RuntimeError
        (await session.data.read())["kept"]["n"] = 3
        return str(await session.data.read())

    client = await w.connected()
    await client.start()
    assert await client.text("edit") == str({"kept": {"n": 1}})


async def test_edits_of_one_session_wait_for_each_other(w: World) -> None:
    """A hundred handlers at once: nothing is lost, and none has to try again."""

    @tool(w, "count")
    async def count(ctx: Ctx, arguments: Json) -> str:
        async with current_session().data.edit() as data:
            seen = data.get("n", 0)
            await asyncio.sleep(0)
            data["n"] = seen + 1
        return str(seen)

    client = await w.connected()
    session = (await client.start())["sessionId"]
    sent = [w.client().call("count", meta=in_session(session)) for _ in range(100)]

    seen = sorted([int(text_of(await one.result())) for one in sent])
    assert seen == [*range(100)]


async def test_an_edit_of_another_session_does_not_wait(w: World) -> None:
    """A lock per session, not one for all."""

    @tool(w, "hold")
    async def hold(ctx: Ctx, arguments: Json) -> str:
        async with current_session().data.edit() as data:
            data["x"] = 1
            if "gate" in arguments:
                await w.box.gate("g").arrive()
        return "held"

    one, other = await w.connected(), await w.connected()
    await one.start()
    await other.start()
    held = await w.waits(one.call("hold", gate="g"))

    assert await other.text("hold") == "held"
    w.box.gate("g").go.set()
    await held.result()


async def test_an_edit_next_to_another_process_is_a_conflict() -> None:
    """``DataConflict``: "somebody else changed session.data first"; nothing was stored. Two
    layers over one store stand for the two processes.
    """
    store = MemoryStore()
    async with world(store=store) as w:
        other_box = Toolbox()
        other = ClockedLayer(other_box.server, store=store, policy=w.layer.policy, clock=w.clock)
        app = other.asgi_app()
        outcome: list[str] = []

        @tool(w, "slowly")
        async def slowly(ctx: Ctx, arguments: Json) -> str:
            try:
                async with current_session().data.edit() as data:
                    data["winner"] = "slow"
                    await w.box.gate("g").arrive()
            except DataConflict as conflict:
                outcome.append(str(conflict))
            return str(await current_session().data.read())

        async def quickly(ctx: Ctx, arguments: Json) -> str:
            async with current_session().data.edit() as data:
                data["winner"] = "quick"
            return "done"

        other_box.tools["quickly"] = quickly
        session = (await w.client().start())["sessionId"]
        slow = await w.waits(w.client().call("slowly", meta=in_session(session)))
        async with other.lifespan(), in_process(app) as carrier:
            await RawClient(carrier).text("quickly", meta=in_session(session))
            w.box.gate("g").go.set()
            assert text_of(await slow.result()) == str({"winner": "quick"})
        assert outcome == [
            "another request changed session.data during this edit, and nothing was stored: "
            "read it again, and repeat the edit"
        ]


async def test_a_keyed_request_has_its_session_too(w: World) -> None:
    """The key changes who receives the answer, not who asked."""
    session = (await w.client().start())["sessionId"]
    assert await w.client().text("session_id", meta=keyed("k", session)) == session


# --- the session of a connection ----------------------------------------------------------


async def test_a_connection_whose_client_started_no_session_is_one_to_its_handlers(
    w: World,
) -> None:
    """Of each connection its own; what a client starts there is another, and so is none."""
    w.box.tools["count"] = count
    client, other = await w.connected(), await w.connected()

    said = [await client.text("count"), await client.text("count"), await other.text("count")]
    assert said == ["connection 1 1", "connection 2 2", "connection 1 1"]
    await client.start()
    assert await client.text("count") == "session 1 1"
    assert await client.text("session_id", meta=in_session(None)) == "none"
    await client.end(await client.text("session_id"))
    assert await client.text("count") == "connection 3 3"


async def test_what_such_a_client_gets_is_what_it_got_before(w: World) -> None:
    """Nothing is added to an answer; what its session tells it waits for its stream, like all that
    a server says outside of a request.
    """
    w.box.tools["count"] = count
    client = await w.connected()
    counted = await client.call("count").result()
    assert counted == await client.call("echo", text="connection 1 1").result()

    await client.text("tell", method="notifications/x", params={"a": 1})
    [notified] = await client.get().has(1)
    assert notified == {"jsonrpc": "2.0", "method": "notifications/x", "params": {"a": 1}}


async def test_the_id_of_a_connections_session_opens_nothing(w: World) -> None:
    """It is always the same, another for each connection, and nobody is admitted by it."""

    @tool(w, "name")
    async def name(ctx: Ctx, arguments: Json) -> str:
        return current_session().id

    client, other = await w.connected(), await w.connected()
    named = await client.text("name")

    assert named == await client.text("name") != await other.text("name")
    assert named not in (client.session_id, other.session_id)
    as_session = await w.client().call("count", meta=in_session(named)).error()
    assert as_session["code"] == -32043
    stolen = w.client()
    stolen.session_id = named
    assert (await stolen.send("tools/list").reply.done()).status == 404
    assert (await other.error("session/resume", {"sessionId": named}))["code"] == -32043


async def test_a_gate_asks_for_a_session_that_the_client_started(w: World) -> None:
    """``require_session`` is not opened by a connection's own."""
    w.box.tools["count"] = count
    w.layer.require_session(tools={"count"})
    refused = await (await w.connected()).call("count").error()
    assert refused["code"] == -31044


async def test_the_state_of_a_connections_session_is_bounded() -> None:
    """No token carries it, so its bound is the store's, and the handler gets the error at once."""
    async with world(max_state_bytes=100) as w:

        @tool(w, "fill")
        async def fill(ctx: Ctx, arguments: Json) -> str:
            session = current_session()
            session.state["text"] = "x" * 90
            with pytest.raises(LimitReached, match="Limit reached"):
                session.state["more"] = "x" * 90
            return ",".join(session.state)

        client = await w.connected()
        assert await client.text("fill") == "text"
        assert await client.text("fill") == "text"


async def test_a_connections_session_is_the_same_at_every_replica() -> None:
    """Over HTTP it is in the store."""
    async with cluster(2) as c:
        for w in c.worlds:
            w.box.tools["count"] = count
        client = await c[0].connected()

        said = [await c.at(number, client).text("count") for number in (0, 1, 0)]
        assert said == ["connection 1 1", "connection 2 2", "connection 3 3"]
